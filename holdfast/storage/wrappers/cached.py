"""A cache of a store on local disk, shared by all processes of a node: one fetches, the others wait for it.

`layers.with_cache` puts it around the store of a `load` or an `open`. Never serves bytes that may have changed in the
store, and never fails because of the disk: then it reads from the store.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.local import disk
from holdfast.storage.store import Buffer, Entry, Got, Listing, Store
from holdfast.storage.wrappers.eviction import CacheFolder
from holdfast.storage.wrappers.extents import EXTENT, PAGE, PAGES, DiskFault, Extent, Run, Version, runs
from holdfast.storage.wrappers.retrying import transient
from holdfast.storage.wrappers.wrapper import Wrapper

PAUSE = 0.005
PATIENCE = 30.0
"""Seconds to wait for bytes that another process is fetching, before they are fetched here as well."""

REST = 60.0
"""Seconds without the cache after an error of its disk: processes would wait in turn for bytes that are not kept."""

SLICE = 64 << 20
"""Bytes of one read: a larger one is split, so that it opens no more files of the cache."""

SMALL = 1 << 20
"""Files of other formats are cached from so many bytes on."""


class Cached(Wrapper):
    """``store`` with a cache in ``folder`` on local disk, which other stores and any number of processes may share.

    Data files of holdfast never change: they are kept in pages of 64 KiB, and exactly one process fetches a page.
    Large files of other formats are kept under the size and time of the last listing through this object, so use a
    `Cached` for one reading. Everything else, manifests above all, always comes from the store.

    ``limit``: bytes on disk, for the whole folder; what was used longest ago goes first. By default 100 GiB, or 80 %
    of what is free and of what the cache has already, if that is less. Raises StorageError if the folder cannot be
    made, ValueError for a limit below 16 MiB.
    """

    def __init__(
        self, store: Store, folder: str | os.PathLike[str], *, limit: int | None = None, patience: float = PATIENCE
    ) -> None:
        if limit is not None and limit < 2 * EXTENT:
            raise ValueError(f"a cache of {limit} bytes is too small to be of use: give {2 * EXTENT} at least")
        super().__init__(store)
        self.fetched = 0
        """Bytes of files that were read from the store."""
        self.served = 0
        """Bytes of files that were read from the disk."""
        self._folder, self._patience = Path(os.path.abspath(os.path.expanduser(os.fspath(folder)))), patience
        _make(self._folder)
        self._files = CacheFolder(self._folder, limit, patience)
        self._listed: dict[str, str] = {}
        self._resting = 0.0
        self._warned = False
        self._lock = threading.Lock()

    # Verbs of the store

    def list(self, prefix: str, *, deep: bool) -> Listing:
        listing = self.store.list(prefix, deep=deep)
        self._listed.update(
            (entry.key, f"{entry.nbytes} {entry.modified!r}") for entry in listing.files if _large(entry)
        )
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
            self._files.drop(Version(self.url, key, ""), begin, end)
        except DiskFault as fault:
            self._rest(fault)

    # Reading

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        version = self._version(key)
        if version is not None and time.monotonic() >= self._resting and (end is None or begin < end):
            try:
                return self._get(Version(self.url, key, version), begin, end)
            except DiskFault as fault:
                self._rest(fault)
        return self._from_store(key, begin, end)

    def _version(self, key: str) -> str | None:
        """What identifies the content of a file, of those it may have had; None if that is not known."""
        from holdfast.ondisk import datafile  # brings torch with it

        if datafile.save_of("/".join(key.split("/")[-2:])) is not None:
            return ""
        return self._listed.get(key)

    def _from_store(self, key: str, begin: int, end: int | None) -> Got:
        answer = self.store.get(key, begin, end)
        with self._lock:
            self.fetched += memoryview(answer.data).nbytes
        return answer

    def _rest(self, fault: DiskFault) -> None:
        with self._lock:
            self._resting = time.monotonic() + REST
            warned, self._warned = self._warned, True
        text = "the cache in %s cannot be used for now (%s); what is read comes from %s"
        (log.debug if warned else log.warning)(text, self._folder, fault, self.url)

    def _get(self, version: Version, begin: int, end: int | None) -> Got:
        # How long the file is may be known only after a first read; a whole extent of it is more than most ask for.
        stop = (begin // EXTENT + 1) * EXTENT if end is None else min(begin + SLICE, end)
        answer = self._slice(version, begin, stop)
        end = answer.nbytes if end is None else min(end, answer.nbytes)
        if stop >= end:
            return answer
        whole = memoryview(bytearray(end - begin))
        whole[: stop - begin] = memoryview(answer.data)
        while stop < end:
            at, stop = stop, min(stop + SLICE, end)
            whole[at - begin : stop - begin] = memoryview(self._slice(version, at, stop).data)
        return Got(whole, answer.nbytes)

    def _slice(self, version: Version, begin: int, end: int) -> Got:
        with _Reading(self._files, version, begin, end) as reading:
            until = 0.0
            while todo := reading.read(reading.missing()):
                mine = reading.lock(todo)
                if not mine:
                    until = until or time.monotonic() + self._patience
                    if time.monotonic() < until:
                        time.sleep(PAUSE)
                        continue
                # What another process has fetched meanwhile is not fetched again. A hanging process is not waited for.
                for run in reading.read(mine or todo):
                    self._fetch(reading, run)
                reading.unlock()
            with self._lock:
                self.served += reading.served
            return reading.result()

    def _fetch(self, reading: _Reading, run: Run) -> None:
        key, known = reading.version.key, reading.nbytes
        answer = self._from_store(key, run[0] * PAGE, run[1] * PAGE)
        data = memoryview(answer.data).cast("B")
        if known not in (None, answer.nbytes) or len(data) != max(min(run[1] * PAGE, answer.nbytes) - run[0] * PAGE, 0):
            self.forget(key)
            raise _changed(f"{self.url}/{key}", run, len(data), answer.nbytes, known)
        reading.nbytes = answer.nbytes
        reading.add(run, data)
        try:
            self._files.reserve(len(data) + PAGE)
            reading.keep(run, data)
        except DiskFault as fault:
            self._rest(fault)


class _Reading:
    """Bytes ``begin:end`` of a file on their way to memory, in pages, and the extents that these lie in."""

    def __init__(self, files: CacheFolder, version: Version, begin: int, end: int) -> None:
        self.version, self.served = version, 0
        self.nbytes: int | None = None
        self._begin, self._end = begin, end
        self._first, self._last = begin // PAGE, -(-end // PAGE)
        self._there = bytearray(self._last - self._first)
        self._memory: memoryview | None = None
        self._extents: dict[int, Extent] = {}
        with ExitStack() as stack:
            for number in range(self._first // PAGES, -(-self._last // PAGES)):
                self._extents[number] = extent = files.opened(version, number)
                stack.callback(extent.close)
                self.nbytes = self.nbytes or extent.nbytes
                if self.nbytes is not None and self.nbytes <= extent.last * PAGE:
                    break  # the file ends here
            self._stack = stack.pop_all()

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _pieces(self, parts: Iterable[Run]) -> Iterator[tuple[Extent, Run]]:
        for first, last in parts:
            while first < last:
                extent = self._extents[first // PAGES]
                yield extent, (first, min(last, extent.last))
                first = extent.last

    def missing(self) -> list[Run]:
        """Pages that are still to be read."""
        return runs(page for page in range(self._first, self._until) if not self._there[page - self._first])

    @property
    def _until(self) -> int:
        return self._last if self.nbytes is None else min(self._last, -(-self.nbytes // PAGE))

    def read(self, parts: Iterable[Run]) -> list[Run]:
        """Read what is on disk; what is not."""
        absent: list[int] = []
        for extent, run in self._pieces(parts):
            lacking = extent.read(run, self.memory)
            self.nbytes = self.nbytes or extent.nbytes
            absent += lacking
            for page in {*range(*run)}.difference(lacking):
                self._there[page - self._first] = True
                self.served += min(PAGE, (self.nbytes or 0) - page * PAGE)
        return runs(absent)

    def lock(self, parts: Iterable[Run]) -> list[Run]:
        """Lock those of these pages that no other process is fetching."""
        return runs(page for extent, run in self._pieces(parts) for held in extent.lock(run) for page in range(*held))

    def unlock(self) -> None:
        for extent in self._extents.values():
            extent.unlock()

    def memory(self, run: Run) -> memoryview:
        """Where these pages go."""
        if self._memory is None:
            self._memory = memoryview(bytearray((self._last - self._first) * PAGE))
        return self._memory[(run[0] - self._first) * PAGE : (run[1] - self._first) * PAGE]

    def add(self, run: Run, data: memoryview) -> None:
        """Add pages that were fetched; without a copy if they are all."""
        if self._memory is None and run[0] == self._first and run[1] >= self._until:
            self._memory = data
        else:
            self.memory(run)[: len(data)] = data
        for page in range(*run):
            self._there[page - self._first] = True

    def keep(self, run: Run, data: memoryview) -> None:
        """Write what was fetched to disk."""
        assert self.nbytes is not None
        at = 0
        for extent, (first, last) in self._pieces([run]):
            extent.write((first, last), data[at : at + (last - first) * PAGE], self.nbytes)
            at += (last - first) * PAGE

    def result(self) -> Got:
        nbytes = self.nbytes or 0
        end, origin = max(min(self._end, nbytes), self._begin), self._first * PAGE
        return Got(self.memory((self._first, self._last))[self._begin - origin : end - origin], nbytes)


def _large(entry: Entry) -> bool:
    return entry.nbytes >= SMALL and entry.key.rpartition("/")[2] != "manifest.json"


def _make(folder: Path) -> None:
    try:
        disk.make_folders(folder, 0o700)
    except OSError as error:
        refused = StorageError(f"cannot make {folder} for a cache: {error}; give a folder on local disk")
        refused.errno, refused.file = error.errno, str(folder)
        raise refused from error


def _changed(file: str, run: Run, length: int, nbytes: int, known: int | None) -> OSError:
    before = "" if known is None else f", it had {known} before"
    received = f"{length} bytes were received from byte {run[0] * PAGE} on, of {nbytes} in all"
    return transient(OSError(errno.EIO, f"{file} changes while it is read: {received}{before}"))
