"""What a worker is: jobs that are taken in order, each with a future that ends when it is done.

Both kinds of `worker` keep their `Futures`. Never looks at a byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.storage.naming import storage_error
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store import Store
from holdfast.write.file_writer import Fault

Small = tuple[Place, bytes]
"""A small file: where it goes, and its bytes."""


class Worker(Protocol):
    """Takes jobs in order; the future of each ends when it is done, or with a StorageError that names the file."""

    shares_memory: bool
    """Whether buffers must be memory that another process can map."""

    @property
    def dead(self) -> bool:
        """Whether it has ended, so that another one is needed."""

    def map(self, buffer: int, memory: memoryview | None, fd: int = -1) -> None:
        """Make the memory of a buffer known (None: forget it); ``fd`` where it is shared."""

    def open(self, path: Place, fd: int | None, *, direct: bool) -> int:
        """The number of a file from now on; the descriptor stays the caller's. Without one it is opened as needed."""

    def begin(self, place: Place, header: bytes, size: int) -> int:
        """Start to upload a file; its number. What follows the header is written in order."""

    def send(self, file: int, memory: memoryview, keep: object) -> Future[None]:
        """The next bytes of an upload, from memory of this process that ``keep`` keeps alive; no buffer is needed."""

    def give_up(self, files: Sequence[int]) -> None:
        """Upload no more of files that are not all there yet, so that their memory comes back."""

    def write(self, file: int, buffer: int, start: int, nbytes: int, offset: int) -> Future[None]:
        """Write a stretch of a buffer, padded to whole sectors, to ``offset`` of a file."""

    def finish(self, file: int, header: bytes, size: int) -> Future[None]:
        """After all writes of a file: its header, its end, its bytes durable."""

    def leave(self, after: Sequence[int], folders: Sequence[Place], small: Sequence[Small]) -> Future[None]:
        """Once the files ``after`` are finished: make their folders durable, then write small files."""

    def drop(self, files: Sequence[int]) -> None:
        """Forget files, once nothing of theirs is under way."""

    def close(self) -> None:
        """Finish everything, then end. Idempotent."""


class Futures:
    """The jobs that wait for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs, self._files = 0, 0
        self._waiting: dict[int, Future[None]] = {}

    def file(self) -> int:
        with self._lock:
            self._files += 1
            return self._files

    def new(self) -> tuple[int, Future[None]]:
        future: Future[None] = Future()
        with self._lock:
            self._jobs += 1
            self._waiting[self._jobs] = future
            return self._jobs, future

    def answer(self, job: int, fault: Fault | None) -> None:
        with self._lock:
            future = self._waiting.pop(job)
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(storage_error(fault.doing, fault.path, fault.errno, fault.text))

    def fail_all(self, why: str) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(HoldfastError(why))


def in_one_store(folders: Sequence[Place], small: Sequence[Small]) -> tuple[Store | None, list[str], list[str]]:
    """The store of small files and their keys; or None, local folders and paths. A save lies in one place."""
    places = [as_store(path) for path, _ in small if path.is_remote]
    if places:
        return places[0].store, [], [place.key for place in places]
    return None, [str(f) for f in folders if not f.is_remote], [str(path) for path, _ in small]
