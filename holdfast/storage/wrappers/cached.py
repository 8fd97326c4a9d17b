"""A cache of a store on local disk, shared by all processes of a node: one fetches, the others wait for it.

`layers.with_cache` puts it around the store of a `load` or an `open`. Never serves bytes that may have changed in the
store, and never fails because of the disk: then it reads from the store.

    <folder>/usage               bytes taken, as 8 bytes; its lock is held to change it and to evict
    <folder>/<object>/<number>   a chunk of a file: bytes of the whole file, a sum, and the chunk's own bytes
    <folder>/<object>/lock       byte n is locked while chunk n is fetched; the kernel unlocks it when a process dies

A chunk is written under another name first, and its sum covers url, key, version and number, so a crash at any moment
leaves chunks that are whole or not there. A lock only saves work: two processes that write one chunk write the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import xxhash

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.local import disk
from holdfast.storage.store import Buffer, Got, Listing, Store
from holdfast.storage.wrappers.retrying import transient
from holdfast.storage.wrappers.wrapper import Wrapper

CHUNK = 256 << 10
"""Bytes of a chunk. Reads are rounded to chunks: at most two are fetched that nobody asked for."""

LARGE = 1 << 20
"""Files of other formats are cached from so many bytes on."""

LEAST, LIMIT, SHARE = 16 << 20, 100 << 30, 0.8
"""The smallest limit; and the default one, or that share of what the disk has free and the cache has, if it is less."""

PAUSE, PATIENCE, REST = 0.005, 30.0, 60.0
"""Seconds between two looks for what another process is fetching; until it is fetched here as well; and without the
cache after an error of its disk, since processes would wait in turn for bytes that are not kept."""

_HEAD, _FLOCK = struct.Struct("<Q8s"), struct.Struct("hhqqi4x")
_OBJECT, _CHUNK_FILE = re.compile(r"[0-9a-f]{32}"), re.compile(r"\d+(\.\d+\.tmp)?")


class Cached(Wrapper):
    """``store`` with a cache in ``folder`` on local disk, which other stores and any number of processes may share.

    Data files of holdfast never change, and exactly one process fetches each chunk of them. Large files of other
    formats are kept under the size and time of the last listing through this object, so use a `Cached` for one reading.
    Everything else, manifests above all, always comes from the store.

    ``limit``: bytes on disk, for the whole folder; what was used longest ago goes first. By default 100 GiB, or 80 %
    of what is free and of what the cache has already, if that is less. Raises StorageError if the folder cannot be
    made, ValueError for a limit below 16 MiB.
    """

    def __init__(
        self, store: Store, folder: str | os.PathLike[str], *, limit: int | None = None, patience: float = PATIENCE
    ) -> None:
        if limit is not None and limit < LEAST:
            raise ValueError(f"a cache of {limit} bytes is too small to be of use: give {LEAST} at least")
        super().__init__(store)
        self.fetched = self.served = 0
        """Bytes of files that were read from the store, and from the disk."""
        self._folder = Path(os.path.abspath(os.path.expanduser(os.fspath(folder))))
        self._limit, self._patience = limit, patience
        self._listed: dict[str, str] = {}
        self._resting, self._warned, self._uncounted = 0.0, False, 0
        self._lock, self._space = threading.Lock(), threading.Lock()
        try:
            disk.make_folders(self._folder, 0o700)
        except OSError as error:
            refused = StorageError(f"cannot make {self._folder} for a cache: {error}; give a folder on local disk")
            refused.errno, refused.file = error.errno, str(self._folder)
            raise refused from error

    def list(self, prefix: str, *, deep: bool) -> Listing:
        listing = self.store.list(prefix, deep=deep)
        for key, nbytes, modified, content in listing.files:
            if nbytes >= LARGE and key.rpartition("/")[2] != "manifest.json":
                self._listed[key] = f"{nbytes} {content or repr(modified)}"
        return listing

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self.store.put(key, chunks, nbytes)
        self.forget(key)

    def delete(self, keys: Sequence[str]) -> None:
        self.store.delete(keys)
        for key in keys:
            self.forget(key)

    def forget(self, key: str, begin: int = 0, end: int | None = None) -> None:
        """Keep no bytes ``begin:end`` of a file: they were wrong, and may be right in the store."""
        if begin == 0 and end is None:
            self._listed.pop(key, None)
        try:
            for entry in _entries(self._file(key, "").folder):
                first = int(entry.name) * CHUNK if entry.name.isdecimal() else -CHUNK
                if first + CHUNK > begin and (end is None or first < end):
                    _delete(entry.path)
        except OSError as error:
            self._rest(error)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        version = self._version(key)
        if version is None or time.monotonic() < self._resting or (end is not None and begin >= end):
            return self._from_store(key, begin, end)
        file = self._file(key, version)
        if end is None:  # how long the file is shows with its first chunk
            end = max(self._read(file, begin, begin + 1).nbytes, begin)
        return self._read(file, begin, end)

    def _version(self, key: str) -> str | None:
        """What tells the content of a file from what it may have had before; None if that is not known."""
        from holdfast.ondisk import datafile  # brings torch with it

        return "" if datafile.save_of("/".join(key.split("/")[-2:])) is not None else self._listed.get(key)

    def _file(self, key: str, version: str) -> _File:
        name = xxhash.xxh3_128_hexdigest(f"{self.url}\0{key}".encode())
        return _File(key, self._folder / name, f"{self.url}\0{key}\0{version}".encode())

    def _from_store(self, key: str, begin: int, end: int | None) -> Got:
        answer = self.store.get(key, begin, end)
        with self._lock:
            self.fetched += memoryview(answer.data).nbytes
        return answer

    def _rest(self, fault: OSError) -> None:
        with self._lock:
            self._resting = time.monotonic() + REST
            warned, self._warned = self._warned, True
        text = "the cache in %s cannot be used for now (%s); what is read comes from %s"
        (log.debug if warned else log.warning)(text, self._folder, fault, self.url)

    def _read(self, file: _File, begin: int, end: int) -> Got:
        """Bytes of a file in chunks, those that are on disk from there; waits for what others are fetching."""
        first, stop, until = begin // CHUNK, -(-end // CHUNK), 0.0
        nbytes: int | None = None
        whole, there = memoryview(b""), set[int]()

        def add(numbers: Sequence[int], data: memoryview) -> None:
            nonlocal stop, whole
            there.update(numbers)
            stop = min(stop, -(-(nbytes or 0) // CHUNK))
            alone = numbers[0] == first and len(numbers) >= stop - first  # all that is asked for: no copy
            whole = data if alone else whole or memoryview(bytearray((stop - first) * CHUNK))
            if not alone:
                whole[(numbers[0] - first) * CHUNK :][: len(data)] = data

        def look(numbers: Iterable[int]) -> list[int]:  # reads chunks from the disk; says which are not there
            nonlocal nbytes
            missing = []
            for number in numbers:
                try:
                    nbytes, part = file.read(number)
                except OSError as error:
                    if not isinstance(error, FileNotFoundError):
                        self._rest(error)
                    missing.append(number)
                    continue
                add([number], part)
                with self._lock:
                    self.served += len(part)
            return [number for number in missing if number < stop]

        with _locks(file.folder, self._rest) as take:
            while missing := look(number for number in range(first, stop) if number not in there):
                mine = [number for number in missing if take(number)]
                if not mine:
                    until = until or time.monotonic() + self._patience
                    if time.monotonic() < until:
                        time.sleep(PAUSE)
                        continue
                # What another process has fetched meanwhile is not fetched again. A hanging process is not waited for.
                for _, pairs in groupby(enumerate(look(mine or missing)), lambda pair: pair[1] - pair[0]):
                    run = [number for _, number in pairs]
                    data, nbytes = self._fetch(file, run, nbytes)
                    add(run, data)
        return Got(whole[begin - first * CHUNK : max(min(end, nbytes or 0) - first * CHUNK, 0)], nbytes or 0)

    def _fetch(self, file: _File, run: Sequence[int], known: int | None) -> tuple[memoryview, int]:
        """Neighbouring chunks from the store, which are kept as well, and how long all of the file is."""
        begin, end = run[0] * CHUNK, (run[-1] + 1) * CHUNK
        answer = self._from_store(file.key, begin, end)
        data = memoryview(answer.data).cast("B")
        if known not in (None, answer.nbytes) or len(data) != max(min(end, answer.nbytes) - begin, 0):
            self.forget(file.key)
            before = "" if known is None else f", it had {known} before"
            received = f"{len(data)} bytes were received from byte {begin} on, of {answer.nbytes} in all{before}"
            raise transient(OSError(errno.EIO, f"{self.url}/{file.key} changes while it is read: {received}"))
        try:
            for number in run:
                if not (part := data[number * CHUNK - begin :][:CHUNK]):
                    break  # the file ends before it
                self._reserve(-(-(len(part) + _HEAD.size) // 4096) * 4096)
                file.write(number, part, answer.nbytes)
        except OSError as error:
            self._rest(error)
        return data, answer.nbytes

    def _reserve(self, nbytes: int) -> None:
        """Count bytes that will be written; what was used longest ago goes if that is too much."""
        path = self._folder / "usage"
        with self._space:
            self._uncounted += nbytes
            fd = disk.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if not _taken(lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)):
                    return  # another process counts now: these bytes are counted with the next ones
                noted = disk.read_bytes(fd, 8, 0, path)
                # A process that dies between counting and writing makes it too high; then it is counted again.
                taken = int.from_bytes(noted, "little") if len(noted) == 8 else sum(size for _, size, _ in self._scan())
                free = os.statvfs(self._folder)
                limit = self._limit or min(LIMIT, int(SHARE * (free.f_bavail * free.f_frsize + taken)))
                if taken + self._uncounted > limit:
                    taken = self._evict(limit - limit // 10 - self._uncounted)
                disk.write_all(fd, (taken + self._uncounted).to_bytes(8, "little"), 0, path)
                self._uncounted = 0
            finally:
                os.close(fd)

    def _evict(self, target: int) -> int:
        """Delete what was used longest ago until no more than ``target`` bytes are taken; how many are then."""
        chunks = sorted(self._scan())
        taken = sum(size for _, size, _ in chunks)
        for _, size, path in chunks:
            if taken <= target:
                break
            _delete(path)
            taken -= size
        log.debug("the cache %s now holds %d bytes", self._folder, taken)
        return taken

    def _scan(self) -> Iterator[tuple[int, int, str]]:
        """When it was used last, bytes and path of every chunk; anything else in the folder is none of ours."""
        for folder in _entries(self._folder):
            if _OBJECT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _entries(folder.path):
                    if _CHUNK_FILE.fullmatch(entry.name):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime_ns, status.st_blocks * 512, entry.path


@dataclass(frozen=True)
class _File:
    """A file of a store in one version, which never changes, and the folder of its chunks."""

    key: str
    folder: Path
    identity: bytes

    def read(self, number: int) -> tuple[int, memoryview]:
        """How long all of the file is, and the bytes of a chunk. Raises FileNotFoundError if it is not there whole."""
        path = self.folder / str(number)
        fd = disk.open(path, os.O_RDONLY)
        try:
            data = disk.read_bytes(fd, _HEAD.size + CHUNK, 0, path)
            os.utime(fd)
        finally:
            os.close(fd)
        part = memoryview(data)[_HEAD.size :]
        nbytes, total = _HEAD.unpack(data[: _HEAD.size]) if part else (0, b"")
        if total == self._sum(number, part, nbytes):
            return nbytes, part
        log.warning("%s in the cache is damaged or of another file; it is fetched again", path)
        _delete(path)
        raise FileNotFoundError(path)

    def write(self, number: int, part: memoryview, nbytes: int) -> None:
        """Keep a chunk of this file of ``nbytes``."""
        half = self.folder / f"{number}.{threading.get_native_id()}.tmp"
        fd = disk.open(half, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            disk.write_all(fd, _HEAD.pack(nbytes, self._sum(number, part, nbytes)), 0, half)
            disk.write_all(fd, part, _HEAD.size, half)
            disk.replace(half, self.folder / str(number))
        except BaseException:
            _delete(half)
            raise
        finally:
            os.close(fd)

    def _sum(self, number: int, part: memoryview, nbytes: int) -> bytes:
        total = xxhash.xxh3_64(self.identity + b"\0%d\0%d\0" % (number, nbytes))
        total.update(part)
        return total.digest()


@contextmanager
def _locks(folder: Path, failed: Callable[[OSError], None]) -> Iterator[Callable[[int], bool]]:
    """A function that locks a chunk until the block ends, unless another thread or process has it; never waits.

    If the disk fails, ``failed`` is called, and the chunk counts as locked.
    """
    fds: list[int] = []

    def take(number: int) -> bool:
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            if not fds:
                disk.make_folders(folder, 0o700)
                fds.append(disk.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600))
            # Of the open file description: so it keeps threads apart too.
            return _taken(lambda: fcntl.fcntl(fds[0], fcntl.F_OFD_SETLK, lock))
        except OSError as error:
            failed(error)
            return True

    try:
        yield take
    finally:
        for fd in fds:
            with suppress(OSError):  # not left to closing it: a child that was forked meanwhile has it open too
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
            os.close(fd)


def _taken(lock: Callable[[], object]) -> bool:
    """Whether a lock could be had at once; a file system without locks counts as one that gives it."""
    try:
        lock()
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EAGAIN, errno.EACCES):
            raise
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _delete(path: str | Path) -> None:
    with suppress(FileNotFoundError):
        disk.delete(path)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError):
        return disk.listed(folder)
    return []
