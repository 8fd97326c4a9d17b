"""A folder on a local or network disk: whether a checkpoint can be saved there, safely and quickly."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.doctor.finding import Finding
from holdfast.ranks.heartbeat import amount
from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.place import Place

_KINDS = {
    "overlay": "a container's own layer: it is gone with the container; mount a volume",
    "tmpfs": "memory: it is gone when the machine restarts, and takes the memory of training",
    "ramfs": "memory: it is gone when the machine restarts, and takes the memory of training",
    "9p": "shared with a host: links and locks may not be as on a disk",
    "fuse.gcsfuse": "a bucket dressed as a disk, without atomic renames: give its URL (gs://) instead",
    "fuse.s3fs": "a bucket dressed as a disk, without atomic renames: give its URL (s3://) instead",
    "fuse.mountpoint-s3": "a bucket dressed as a disk, without renames: give its URL (s3://) instead",
    "fuse.goofys": "a bucket dressed as a disk, without atomic renames: give its URL (s3://) instead",
}
SKEW = 2.0


def findings(folder: Place, *, write: bool = True) -> Iterator[Finding]:
    """Check ``folder``, or the nearest folder above it that exists."""
    above = next(path for path in [folder, *folder.parents] if os.path.exists(path))  # False where we may not look
    if not above.is_dir():
        above = above.parent
    yield _kind(above)
    yield _room(above)
    rights = _rights(above)
    yield rights
    if rights.verdict == "ok" and write:
        yield from _tried(above)


def _kind(folder: Place) -> Finding:
    device, kind, options = mounted(folder)
    text = f"{kind} ({device}) for {folder}"
    if "ro" in options.split(","):
        return _fail("file system", f"{text}, mounted read-only", "mount it writable, or save elsewhere")
    if kind in _KINDS:
        return Finding("file system", "warn", f"{text}: {_KINDS[kind]}", "fine for trying things out", "storage")
    return Finding("file system", "ok", text)


def mounted(folder: Place) -> tuple[str, str, str]:
    """Device, kind and options of the mount that a folder is on."""
    real = os.path.realpath(folder)
    best = ("?", "unknown", "")
    longest = -1
    for line in Path("/proc/mounts").read_text().splitlines():
        device, at, kind, options, *_ = line.split()
        at = at.replace("\\040", " ")
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= longest:
            best, longest = (device, kind, options), len(at)
    return best


def _room(folder: Place) -> Finding:
    status = os.statvfs(folder)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{amount(free)} of {amount(total)}"
    clear = f"holdfast prune {folder}, and the same with --orphans, list what can be deleted"
    if total and free < 0.02 * total:
        return Finding("free space", "warn", text, clear, "storage")
    if status.f_files and status.f_favail < 1000:
        return Finding("free space", "warn", f"{text}, but only {status.f_favail} more files", clear, "storage")
    return Finding("free space", "ok", text)


def _rights(folder: Place) -> Finding:
    status = disk.stat(folder)
    text = (
        f"{folder} belongs to user {status.st_uid}, mode {status.st_mode & 0o7777:o}, and you are user {os.geteuid()}"
    )
    lacking = [
        name for name, way in (("read", os.R_OK), ("write", os.W_OK), ("enter", os.X_OK)) if not _may(folder, way)
    ]
    if lacking:
        mend = f"as its owner: chmod u+rwx {folder}, or chown {os.geteuid()} {folder}"
        return _fail("rights", f"{text}: you may not {', '.join(lacking)}", mend)
    return Finding("rights", "ok", text)


def _may(folder: Place, way: int) -> bool:
    return os.access(folder, way, effective_ids=os.access in os.supports_effective_ids)


def _fail(name: str, text: str, mend: str) -> Finding:
    return Finding(name, "fail", text, mend, "storage")


def _tried(folder: Place) -> Iterator[Finding]:
    """Try what the file system can do, in a folder of our own."""
    work = folder / f".holdfast-doctor-{secrets.token_hex(4)}"
    try:
        disk.make_folder(work)
    except OSError as error:
        yield _fail("writing", f"{folder}: {error.strerror}", "docs/troubleshooting.md; another folder")
        return
    try:
        yield from _each(work)
    finally:
        disk.delete_all(work)


def _each(work: Place) -> Iterator[Finding]:
    file = work / "file"
    began = time.time()
    try:
        fd = disk.open(file, os.O_RDWR | os.O_CREAT)
        try:
            disk.write_all(fd, b"x" * SECTOR, 0, file)
            disk.sync(fd, file)
        finally:
            os.close(fd)
        disk.sync_folder(work)
    except OSError as error:
        yield _fail("writing", f"{work.parent}: {error.strerror}", when_refused(error, work.parent))
        return
    yield Finding("writing", "ok", "a file can be made, written and synced")
    skew = disk.stat(file).st_mtime - time.time()
    if abs(skew) > SKEW + (time.time() - began):
        text = f"files get times {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's clock"
        yield Finding("clock", "warn", text, "synchronise both clocks (chronyc makestep, ntpd)", "storage")
    else:
        yield Finding("clock", "ok", "files get this machine's time")
    slower = "saves and loads go through the page cache: slower, and it pushes other files out of memory"
    yield _ability("direct I/O", lambda: _directly(file), slower)
    yield _ability("reserving space", lambda: _reserve(file), "a full disk is noticed late, during a save")
    yield _ability("hard links", lambda: disk.link(file, work / "link"), "incremental saves cite files instead")
    yield _ability("locks", lambda: _lock(file), "running saves look like dead ones: let one job write here at a time")
    yield _ability("new names only", lambda: _rename(file, work / "other"), "commits take a slower way that is as safe")


def when_refused(error: OSError, path: Place) -> str:
    """What to do about a call on ``path`` that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space or raise the quota"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"as its owner: chmod -R u+rX {path}, or let its owner do this"
    return "look at dmesg, and at the health of the disk or the mount"


def _ability(name: str, do: Callable[[], object], without: str) -> Finding:
    try:
        do()
    except OSError as error:
        mend = f"nothing is unsafe; another file system can do it (this one: {error.strerror})"
        return Finding(name, "warn", f"not here: {without}", mend, "storage")
    return Finding(name, "ok", "works")


def _directly(file: Place) -> None:
    memory = mmap.mmap(-1, SECTOR)
    fd = disk.open(file, os.O_RDWR | os.O_DIRECT)
    try:
        disk.write_all(fd, memory, 0, file)
        disk.read(fd, memory, 0, file)
    finally:
        os.close(fd)


def _reserve(file: Place) -> None:
    fd = disk.open(file, os.O_RDWR)
    try:
        disk.reserve(fd, 2 * SECTOR, file)
    finally:
        os.close(fd)


def _lock(file: Place) -> None:
    fd = disk.open(file, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _rename(file: Place, target: Place) -> None:
    if not disk.rename(file, target):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
