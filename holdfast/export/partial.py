"""Where a target is written until it is complete: a folder beside it, with a journal of what is done."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch

import msgspec

from holdfast.commit.folder import refuse_cited, taken
from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming

LAST = ("manifest.json", "model.safetensors.index.json", "model.safetensors", ".metadata")
"""What readers look for first, and what makes a folder a checkpoint; so it is uploaded last."""

OURS = ("lock", "plan", ".plan.*.tmp", "content", "journal", "old")


class Row(msgspec.Struct, array_like=True):
    """One unit that is done: the sums of its atoms, and bytes (by offset) that the first rank is to write for it."""

    unit: int
    sums: list[str]
    heads: list[tuple[int, bytes]] = []


_decoder = msgspec.json.Decoder(Row)


class Partial:
    """The folder of one target. Any rank writes into its ``content``; the first rank alone calls the methods."""

    def __init__(self, target: LocalPlace) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.partial")
        self.content = self.folder / "content"
        self._lock = -1
        self._published = False

    def begin(self, plan: str, files: Mapping[str, int], *, overwrite: bool) -> list[Row]:
        """Make it, with room for all files; or go on with what an earlier call of the same ``plan`` left.

        Raises StorageError if the target is taken, if another process is at it, or if the disk is too small.
        """
        self.target.parent.make_folder()
        self._check_target(overwrite=overwrite)
        self._claim()
        self._put_back()
        if self._read_plan() == plan and self.content.is_dir():
            for path in self.content.files_below():
                if path not in files:  # of an end that was begun: made again, and perhaps not all of them
                    (self.content / path).delete()
            return self._gathered()
        if self._journals():
            log.warning("%s: what an earlier call with other arguments has copied is given up", self.folder)
        self._clear()
        self.content.make_folders(["", *dict.fromkeys(os.path.dirname(path) for path in files)])
        for path, nbytes in files.items():
            os.close((self.content / path).open_to_write(nbytes)[0])
        # The plan is written after its files: a call that resumes trusts the journals.
        self._sync_folders(files)
        (self.folder / "plan").write_small(plan.encode())
        return []

    def _check_target(self, *, overwrite: bool) -> None:
        target = self.target
        if not target.exists() and not target.is_symlink():
            return
        if target.is_dir() and not any(target.iterdir()):
            return
        if not overwrite:
            raise taken(f"{target} exists")
        if target.is_dir() and not _is_checkpoint(target):
            raise not_a_checkpoint(target)
        if target.is_dir():
            inner = next((path.name for path in sorted(target.iterdir()) if path.is_dir() and _is_whole(path)), None)
            if inner is not None:
                raise holds_others(target, inner)
            refuse_cited(target)

    def _claim(self) -> None:
        """Lock the folder. Raises StorageError if another call, or a rank of an earlier one, is still at it."""
        while self._lock < 0:
            self.folder.make_folder()
            with naming(self.folder, "lock"), suppress(FileNotFoundError):
                # Not found: another call has just finished and deleted the folder. Then it is made again.
                odd = sorted(p.name for p in self.folder.iterdir() if not any(fnmatch(p.name, ours) for ours in OURS))
                if odd:
                    raise taken(f"{self.folder}, where it would grow, holds other files ({odd[0]})")
                self._lock = self._locked(self.folder / "lock")
        if any(path.in_use() for path in self._journals()):
            self.release()
            raise self._busy()

    def _locked(self, path: LocalPlace) -> int:
        lock = disk.open(path, os.O_RDWR | os.O_CREAT)
        kept = False
        try:
            _lock(lock, fcntl.LOCK_EX)
            kept = os.fstat(lock).st_ino == os.stat(path).st_ino
        except BlockingIOError:
            raise self._busy() from None
        finally:
            if not kept:
                os.close(lock)
        if not kept:
            raise FileNotFoundError(path)
        return lock

    def _busy(self) -> StorageError:
        return _refusal(
            f"another process is converting to {self.target} right now: wait for it, or end it; "
            "ranks that are to do it together need a process group (torch.distributed.init_process_group)",
            errno.EBUSY,
        )

    def _read_plan(self) -> str | None:
        try:
            return (self.folder / "plan").read_small().decode()
        except FileNotFoundError:
            return None

    def _journals(self) -> list[LocalPlace]:
        return sorted((self.folder / "journal").glob("*"))

    def _gathered(self) -> list[Row]:
        """What the journals of an earlier call say is done, joined in one."""
        done: dict[int, Row] = {}
        journals = self._journals()
        for path in journals:
            for line in path.read_small().splitlines():
                try:
                    row = _decoder.decode(line)
                except msgspec.MsgspecError:
                    break  # the end of a process, in the middle of a line
                done[row.unit] = row
        (self.folder / "journal" / "before").write_small(_lines(done.values()))
        for path in journals:
            if path.name != "before":
                path.delete()
        return list(done.values())

    def _put_back(self) -> None:
        """Put back a target that was moved aside by a process that ended before it put the new one in place."""
        old = self.folder / "old"
        if old.exists() and not self.target.exists():
            with naming(old, "put back"):
                disk.replace(old, self.target)
            self.target.parent.sync_folder()

    def _forget_plan(self) -> None:
        """From now on no call resumes from what is here. This is durable before any of it is deleted."""
        (self.folder / "plan").delete()
        self.folder.sync_folder()

    def _sync_folders(self, files: Iterable[str]) -> None:
        for folder in {above for file in files for above in LocalPlace(file).parents}:
            (self.content / folder).sync_folder()

    def _clear(self) -> None:
        self._forget_plan()
        for path in self.folder.iterdir():
            if path.name != "lock":
                with naming(path, "delete"):
                    disk.delete_all(path)

    def publish(self, content: LocalPlace, files: Sequence[str], *, overwrite: bool) -> None:
        """Put ``content`` in the target's place in one step, once its ``files`` and folders are durable."""
        self._sync_folders(files)
        self._forget_plan()  # else what is replaced could be taken for what was copied
        with naming(self.target, "put in place"):
            old = None
            if not disk.rename(content, self.target):
                self._check_target(overwrite=overwrite)
                old = _exchange(content, self.target, self.folder / "old")
        self._published = True
        try:
            self.target.parent.sync_folder()
        except StorageError as error:
            error.settled = False  # it is there, and whole; but a power cut may take its name away
            raise
        if old is not None:
            try:
                disk.delete_all(old)
            except OSError as error:
                log.warning("%s is in place, but what it replaced stays at %s: %s", self.target, old, error)

    def leave(self) -> None:
        """End a call: release the folder, and keep it if a later call can resume from it."""
        if self._lock < 0:
            return
        try:
            if not self._published and any(path.stat().st_size for path in self._journals()):
                log.warning("%s keeps what was copied: the same call goes on from there", self.folder)
            else:
                self._remove()
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.folder, error)
        finally:
            self.release()

    def _remove(self) -> None:
        self._clear()  # the lock goes last: it says what this folder is
        disk.delete_all(self.folder)

    def give_up(self) -> None:
        """Delete what an interrupted call has left. Raises StorageError (EBUSY) if another process is at it."""
        self._claim()
        try:
            self._put_back()
            with naming(self.folder, "delete"):
                self._remove()
        finally:
            self.release()

    def release(self) -> None:
        """Let another call claim it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Journal:
    """What one rank has done, noted once it is durable. It is locked as long as the rank lives."""

    def __init__(self, partial: Partial, rank: int) -> None:
        self.path = partial.folder / "journal" / f"{rank:05d}"
        self.path.parent.make_folder()
        with naming(self.path, "create"):
            self._fd = disk.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            _lock(self._fd, fcntl.LOCK_SH)

    def add(self, rows: Iterable[Row]) -> None:
        """Note units whose bytes are durable."""
        with naming(self.path, "write"):
            data = _lines(rows)
            while data:
                data = data[disk.append(self._fd, data, self.path) :]
            disk.sync(self._fd, self.path)

    def close(self) -> None:
        os.close(self._fd)


def _lines(rows: Iterable[Row]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _lock(fd: int, how: int) -> None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):  # no locks there
            raise


def holds_others(target: object, inner: str) -> StorageError:
    """The refusal to replace a folder that holds other checkpoints, such as the output folder of a training."""
    return _refusal(
        f"{target} holds other checkpoints ({inner}), which would go with it: overwrite=True replaces one; choose "
        "another path, or move them",
        errno.EEXIST,
    )


def not_a_checkpoint(target: object) -> StorageError:
    """The refusal to replace files that are no checkpoint."""
    return _refusal(
        f"{target} holds files and does not look like a checkpoint: overwrite=True replaces checkpoints only",
        errno.EEXIST,
    )


def _refusal(text: str, number: int) -> StorageError:
    error = StorageError(text)
    error.errno = number
    return error


def _is_whole(folder: LocalPlace) -> bool:
    """Whether a folder in a checkpoint is one by itself: its own folders hold no file of these names."""
    return any((folder / mark).is_file() for mark in LAST)


def _is_checkpoint(folder: LocalPlace) -> bool:
    marks = ("manifest.json", ".metadata", "*.safetensors", "*.safetensors.index.json")
    return any(any(folder.glob(mark)) for mark in marks)


def _exchange(content: LocalPlace, target: LocalPlace, aside: LocalPlace) -> LocalPlace | None:
    """Put ``content`` under the target's name. Returns where the previous content is now, if there was any."""
    if disk.exchange(content, target):
        return content
    # A file system that can do neither: a file replaces a file all the same, but with folders there is a moment with
    # nothing under the target's name. If the process ends then, the next call puts the old one back.
    old = None
    if target.exists() and (content.is_dir() or target.is_dir()):
        disk.replace(target, aside)
        old = aside
    disk.replace(content, target)
    return old
