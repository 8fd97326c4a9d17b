"""What a disk or a store can do, bare and through holdfast; and how often to save on it. Leaves nothing behind."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from holdfast import events
from holdfast.checkpoint import open_checkpoint
from holdfast.errors import StorageError
from holdfast.load import load
from holdfast.run.interval import Advice, advise
from holdfast.run.orphans import BENCH
from holdfast.saver import Saver
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

DEADLINE = 600.0
"""Seconds to wait for any one answer of a store."""

CHUNK = 8 << 20
THREADS = 4
ASKERS = 16
SMALL, SMALL_FILES = 4096, 64
TENSOR = 64 << 20


@dataclass(frozen=True)
class Row:
    """One thing that was measured: ``what``, the bytes moved and files made, and the seconds it took."""

    what: str
    nbytes: int
    files: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Benched:
    """What `bench` measured. ``stall``: seconds that training waits for a save of ``nbytes`` in the background at most:
    until all is copied. ``direct``: whether the raw rows went past the page cache."""

    root: str
    nbytes: int
    rows: tuple[Row, ...]
    stall: float
    direct: bool

    def advice(self, state: int, mtbf: float, step: float) -> Advice:
        """How often to save a state of so many bytes on one rank. ``mtbf``: mean seconds between failures; ``step``:
        seconds of a training step. Raises ValueError for a ``mtbf`` that is not positive."""
        save = next(row for row in self.rows if row.what == "save")
        return advise(mtbf, stall=self.stall * state / self.nbytes, save=state / save.rate, step=step)


def bench(
    root: str | os.PathLike[str] | Place,
    nbytes: int,
    *,
    rounds: int = 2,
    tell: Callable[[Row], None] = lambda row: None,
) -> Benched:
    """Write and read about ``nbytes`` below ``root``, bare and as a checkpoint, in a folder that is gone afterwards.

    Of ``rounds`` the quickest counts. ``tell`` is called with each row as it is known. Host memory: twice ``nbytes``.
    Raises StorageError, also if there is too little room or memory.
    """
    place = with_deadline(location(root), DEADLINE)
    nbytes = max(nbytes // CHUNK, 1) * CHUNK
    _check_room(place, nbytes)
    rows: list[Row] = []

    def measured(what: str, count: int, files: int, seconds: float) -> None:
        rows.append(Row(what, count, files, seconds))
        tell(rows[-1])

    with _folder(place) as work:
        raw = _Store(as_store(work), nbytes) if work.is_remote else _Disk(work, nbytes)
        measured("raw write", nbytes, 1, min(_timed(raw.write) for _ in range(rounds)))
        measured("raw read", nbytes, 1, min(_timed(raw.read) for _ in range(rounds)))
        raw.delete()
        measured("small files", SMALL * SMALL_FILES, SMALL_FILES, _timed(lambda: _write_small(work)))
        state = _state(nbytes)
        stall, save = _saved(state, work, rounds)
        measured("save", nbytes, 1, save)
        for section in state.values():
            for tensor in section.values():
                tensor.zero_()
        measured("load", nbytes, 1, min(_timed(lambda: load(str_of(work / "step"), state)) for _ in range(rounds)))
    return Benched(str(place), nbytes, tuple(rows), stall, raw.direct)


def str_of(path: Place) -> str | Place:
    """A location as users give it."""
    return path if path.is_remote else str(path)


def _timed(do: Callable[[], object]) -> float:
    began = perf_counter()
    do()
    return perf_counter() - began


def _check_room(place: Place, nbytes: int) -> None:
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < 2.2 * nbytes:
        raise _too_small(f"{memory} bytes of memory are free, and {int(2.2 * nbytes)} are needed", errno.ENOMEM)
    if place.has_folders:
        above = next(path for path in [place, *place.parents] if path.exists())
        free = shutil.disk_usage(above).free
        if free < 1.2 * nbytes:
            raise _too_small(f"{above} has {free} bytes free, and {int(1.2 * nbytes)} are needed", errno.ENOSPC)


def _too_small(text: str, number: int) -> StorageError:
    error = StorageError(f"{text}; measure less with --size")
    error.errno = number
    return error


@contextmanager
def _folder(place: Place) -> Iterator[Place]:
    """A folder of its own, which is gone afterwards, and those above that were made for it."""
    made = [path for path in [place, *place.parents] if not path.exists()] if place.has_folders else []
    work = place / f"{BENCH}{secrets.token_hex(4)}"
    work.make_folder()
    (work / "lock").write_small(b"a benchmark is under way\n")
    lock = (work / "lock").open_locked() if work.has_locks else -1
    try:
        yield work
    finally:
        if work.has_folders:
            os.close(lock)
            with naming(work, "delete"):
                disk.delete_all(work)
            for path in made:
                path.delete_if_empty()
        else:
            storage.delete(*(work / path for path in work.files_below()))


class _Disk:
    """One file, past the page cache where the file system can do that."""

    def __init__(self, work: Place, nbytes: int) -> None:
        self._path, self._nbytes, self.direct = work / "raw", nbytes, True
        self._memory = mmap.mmap(-1, CHUNK)
        self._memory[:] = secrets.token_bytes(CHUNK)

    def write(self) -> None:
        self.delete()
        fd, self.direct = self._path.open_to_write(self._nbytes)
        try:
            with naming(self._path, "write"):
                _each("raw write", self._path, self._nbytes, lambda at: self._put(fd, at))
                disk.sync(fd, self._path)
        finally:
            os.close(fd)

    def _put(self, fd: int, at: int) -> None:
        disk.write_all(fd, self._memory, at, self._path)

    def read(self) -> None:
        cached, direct = self._path.open_to_read()
        self.direct &= direct is not None
        spare = [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]

        def get(at: int) -> None:
            memory = spare.pop()
            disk.read(cached if direct is None else direct, memory, at, self._path)
            spare.append(memory)

        try:
            with naming(self._path, "read"):
                _each("raw read", self._path, self._nbytes, get)
        finally:
            for fd in (cached, direct):
                if fd is not None:
                    os.close(fd)

    def delete(self) -> None:
        self._path.delete()


class _Store:
    """One file of a store, uploaded in parts and read in ranges."""

    direct = True

    def __init__(self, work: StorePlace, nbytes: int) -> None:
        self._file, self._nbytes, self._data = work / "raw", nbytes, secrets.token_bytes(CHUNK)

    def write(self) -> None:
        with events.task("raw write", str(self._file), total=self._nbytes) as task:

            def chunks() -> Iterator[bytes]:
                for _ in range(self._nbytes // CHUNK):
                    yield self._data
                    task.advance(CHUNK)

            with naming(self._file, "write"):
                self._file.store.put(self._file.key, chunks(), self._nbytes)

    def read(self) -> None:
        def get(at: int) -> None:
            self._file.store.get(self._file.key, at, at + CHUNK)

        with naming(self._file, "read"):
            _each("raw read", self._file, self._nbytes, get, ASKERS)

    def delete(self) -> None:
        self._file.delete()


def _each(name: str, path: Place, nbytes: int, do: Callable[[int], None], threads: int = THREADS) -> None:
    """``do`` for each chunk, in threads; an interrupt ends it after the chunks that are under way."""
    stop = threading.Event()
    with events.task(name, str(path), total=nbytes) as task, ThreadPoolExecutor(threads) as pool:

        def one(at: int) -> None:
            if not stop.is_set():
                do(at)
                task.advance(CHUNK)

        try:
            for done in [pool.submit(one, at) for at in range(0, nbytes, CHUNK)]:
                done.result()
        except BaseException:
            stop.set()
            raise


def _write_small(work: Place) -> None:
    """Small files, each durable before it counts; in a store many at once, as holdfast writes them there."""
    (work / "small").make_folder()
    paths = [work / "small" / f"{number:04d}" for number in range(SMALL_FILES)]
    data = secrets.token_bytes(SMALL)
    with ThreadPoolExecutor(ASKERS if work.is_remote else 1) as pool:
        list(pool.map(lambda path: path.write_small(data), paths))


def _state(nbytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two sections of tensors that differ, so that a file system that compresses gains nothing."""
    noise = torch.empty(min(TENSOR, nbytes), dtype=torch.uint8, device="cpu").random_()
    state: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    at = 0
    while at < nbytes:
        count = min(TENSOR, nbytes - at)
        state["model" if at < nbytes // 3 else "optimizer"][f"w{at // TENSOR}"] = noise[:count] ^ (at // TENSOR % 251)
        at += count
    return state


def _saved(state: dict[str, dict[str, torch.Tensor]], work: Place, rounds: int) -> tuple[float, float]:
    """Seconds until training may go on, and until a save is committed."""
    best = (float("inf"), float("inf"))
    with Saver() as saver:
        saver.prepare(state)
        for _ in range(rounds):
            saving = saver.save(state, str_of(work / "step"), overwrite=True)
            saving.wait()
            best = min(best[0], saving.timing.stall), min(best[1], saving.timing.total)
    open_checkpoint(str_of(work / "step"))
    return best
