"""Compressed archives, unpacked once for all processes of a machine into a private folder for temporary files.

A name in an archive never becomes a path. What a killed process left is deleted by a later call.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import xxhash

from holdfast import events
from holdfast.errors import Damaged, StorageError, Unsupported
from holdfast.formats.machine import tars
from holdfast.formats.machine.compressed import Unpacking, kind_of
from holdfast.formats.sources import File, Stretch, all_of, file
from holdfast.storage.local.local_place import LocalPlace, private_folder
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace

LIMIT = "HOLDFAST_SCRATCH_LIMIT"
"""The environment variable that says how many bytes an archive may unpack to; by default half of what is free."""

PATIENCE = 600.0
"""Seconds to wait for another process that unpacks the same archive and makes no progress."""

_INDEX = "index.json"
_PAUSE = 0.05
_SPAN = 1 << 20
_END = 64 << 10


class Lease:
    """Keeps what was unpacked: it stays while any process of the machine has a lease.

    The lease is a lock, which the kernel releases when a process is killed; the next call sweeps what it left.
    """

    def __init__(self, folder: LocalPlace, lock: int) -> None:
        self.folder = folder
        self._end = weakref.finalize(self, _give_up, folder, lock, os.getpid())


@dataclass(frozen=True)
class Scratched:
    """A member of an archive, unpacked. ``path`` names archive and member in errors."""

    path: Place = field(compare=False)
    nbytes: int = field(compare=False)
    file: LocalPlace
    lease: Lease = field(compare=False, repr=False)

    def open(self) -> tuple[int, int | None]:
        return self._there().open_to_read()

    def read(self, begin: int, nbytes: int) -> bytes:
        return File(self._there(), self.nbytes).read(begin, nbytes)

    def _there(self) -> LocalPlace:
        if not self.file.is_file():
            raise StorageError(f"{self.path} was unpacked to {self.file}, which was removed: open it again")
        return self.file


def first_member(path: Place) -> str | None:
    """The name of the first file in a compressed tar archive; "" for another compressed file, None if it is neither."""
    packed = all_of(file(path))
    kind = kind_of(packed.read(0, min(8, packed.nbytes)))
    if kind is None:
        return None
    stream = Unpacking(packed, kind, 1 << 30)
    if not tars.is_tar(stream.peek(tars.BLOCK)):
        return ""
    return next((entry.name for entry in tars.entries(stream, path)), None)


def unpacked(path: Place, wanted: Callable[[str], bool]) -> dict[str, Stretch]:
    """The members of a compressed tar archive that are ``wanted``, by name; any other compressed file whole, as "".

    ``wanted`` must be the same for all who open ``path``. Raises StorageError if it unpacks to too much, Damaged or
    Unsupported for what cannot be unpacked.
    """
    lease = _lease(path, wanted)
    index = json.loads((lease.folder / _INDEX).read_bytes())
    return {
        name: all_of(Scratched(path / name, nbytes, lease.folder / str(i), lease))
        for i, (name, nbytes) in enumerate(index.items())
    }


def _unpack(path: Place, folder: LocalPlace, limit: int, wanted: Callable[[str], bool]) -> None:
    """Write the wanted members into ``folder`` under numbers, and at last which is which."""
    packed = all_of(file(path))
    kind = kind_of(packed.read(0, min(8, packed.nbytes)))
    if kind is None:
        raise Damaged(f"{path} is not compressed")
    sizes: dict[str, int] = {}
    with events.task("unpack", str(path), total=packed.nbytes) as task:
        stream = Unpacking(packed, kind, limit, task.advance)
        if tars.is_tar(stream.peek(tars.BLOCK)):
            for entry in tars.entries(stream, path):
                if wanted(entry.name):
                    sizes[entry.name] = _copy(stream, folder / str(len(sizes)), entry.nbytes)
        elif wanted(""):
            sizes[""] = _copy(stream, folder / "0", None)
        stream.drain()
    (folder / _INDEX).write_text(json.dumps(sizes))


def _copy(stream: Unpacking, target: LocalPlace, nbytes: int | None) -> int:
    """The next bytes of a stream, or all that follow, into a file; how many."""
    if nbytes is not None and nbytes > stream.limit - stream.at:
        raise stream.exceeded()
    done = 0
    with target.open("xb") as file:
        while part := stream.read(_SPAN if nbytes is None else min(_SPAN, nbytes - done)):
            file.write(part)
            done += len(part)
    return done  # if the stream ended before, `tars` raises


# One process unpacks, the others wait, the last one cleans up

_leases: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: another thread may have held the lock, and the leases are the parent's."""
    global _lock, _leases
    _lock, _leases = threading.Lock(), weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget)


def _lease(path: Place, wanted: Callable[[str], bool]) -> Lease:
    with naming(path, "open"):
        identity = _in_store(as_store(path)) if path.is_remote else _on_disk(LocalPlace(os.path.realpath(path)))
    key = xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())
    with _lock:
        lease = _leases.get(key)
        if lease is None:
            with naming(path, "unpack"):
                root = private_folder("scratch")
                _sweep(root, key)
                lease = _leases[key] = _taken(
                    root / key, path, lambda folder: _unpack(path, folder, _limit(root), wanted)
                )
        return lease


def _on_disk(real: LocalPlace) -> list[Any]:
    status = real.stat()
    return [str(real), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def _in_store(place: StorePlace) -> list[Any]:
    # Not every store keeps the time of a write; compressed files end with a sum of their contents.
    packed = file(place)
    ends = packed.read(0, _END) + packed.read(max(packed.nbytes - _END, 0), _END)
    return [str(place), packed.nbytes, place.modified(), xxhash.xxh3_128_hexdigest(ends)]


def _size_below(folder: LocalPlace) -> int:
    size = 0
    with suppress(OSError):  # deleted while we looked
        for path in folder.rglob("*"):
            size += path.stat().st_size
    return size


def _taken(folder: LocalPlace, path: Place, fill: Callable[[LocalPlace], None]) -> Lease:
    """A lease of ``folder``. The first process fills it, the others wait for as long as it grows."""
    if (lease := _attempt(folder, fill)) is not None:
        return lease
    with events.task("wait", str(path)) as task:  # other ranks see that this one goes on
        grown, since = 0, time.monotonic()
        while True:
            time.sleep(_PAUSE)
            if (lease := _attempt(folder, fill)) is not None:
                return lease
            size = _size_below(folder)
            if size != grown:
                task.advance(max(size - grown, 0))
                grown, since = size, time.monotonic()
            elif time.monotonic() - since > PATIENCE:  # a frozen process never releases its lock
                raise OSError(
                    errno.ETIMEDOUT,
                    f"another process is unpacking there and gets no further for {PATIENCE:g} s",
                    str(folder),
                )


def _attempt(folder: LocalPlace, fill: Callable[[LocalPlace], None]) -> Lease | None:
    """A lease, after filling the folder if nobody has; None while another process fills it."""
    while True:
        lock = _open_lock(folder)
        try:
            if _locks(lock, fcntl.LOCK_SH) and _is_filled(lock, folder):
                return Lease(folder, lock)
            # Not waited for: another process may fill the folder in the meantime and then keep a shared lock, while
            # it waits for this one in a collective.
            if not _locks(lock, fcntl.LOCK_EX):
                _close(lock)
                return None
            if _is_current(lock, folder) and not _is_filled(lock, folder):
                try:
                    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed while unpacking
                    folder.mkdir(0o700)
                    fill(folder)
                except BaseException:
                    _remove(folder)
                    raise
        except BaseException:
            _close(lock)
            raise
        # Filled, by this process or another. Again, as an exclusive lock cannot become a shared one in one step.
        _close(lock)


def _locks(lock: int, how: int) -> bool:
    """Whether the lock could be had. One that was held before is gone if it could not: flock(2)."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(folder: LocalPlace) -> int:
    return os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _close(lock: int) -> None:
    """Release the lock, though a child that was forked in the meantime still has the file open."""
    try:
        fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def _is_filled(lock: int, folder: LocalPlace) -> bool:
    return _is_current(lock, folder) and (folder / _INDEX).is_file()


def _is_current(lock: int, folder: LocalPlace) -> bool:
    """Whether an open lock file is still the one of that name: it is removed when the folder is."""
    try:
        return os.path.samestat(os.fstat(lock), folder.with_suffix(".lock").stat())
    except FileNotFoundError:
        return False


def _give_up(folder: LocalPlace, lock: int, process: int) -> None:
    """End a lease; the last one cleans up. A forked child only lets go."""
    if os.getpid() != process:
        os.close(lock)
        return
    try:
        _remove_if_idle(folder, lock)
    finally:
        _close(lock)


def _remove_if_idle(folder: LocalPlace, lock: int) -> None:
    if _locks(lock, fcntl.LOCK_EX) and _is_current(lock, folder):
        _remove(folder)


def _remove(folder: LocalPlace) -> None:
    # The lock file last: a process that waits for it then sees that it was replaced.
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


def _sweep(root: LocalPlace, but: str) -> None:
    """Remove what killed processes have left."""
    for name in sorted({LocalPlace(name).stem for name in os.listdir(root)} - {but}):
        lock = _open_lock(root / name)
        try:
            _remove_if_idle(root / name, lock)
        finally:
            _close(lock)


def _limit(root: LocalPlace) -> int:
    text = os.environ.get(LIMIT)
    if text is None:
        return shutil.disk_usage(root).free // 2
    if not text.isascii() or not text.isdigit():
        raise Unsupported(f"{LIMIT} is {text!r}, not a number of bytes")
    return int(text)
