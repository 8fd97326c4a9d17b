"""Who writes: a file writer in threads of this process, or in a process of its own that outlives it.

A blocking save starts threads for itself; a Saver keeps one worker for all its saves. Never looks at a byte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future

from holdfast import events
from holdfast.errors import StorageError
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.write.file_writer import FileWriter
from holdfast.write.jobs import Futures, Small, Worker, in_one_store
from holdfast.write.process_worker import ProcessWorker


class ThreadWorker:
    """A file writer in threads of this process."""

    shares_memory = False

    def __init__(self) -> None:
        self._futures = Futures()
        self._writer = FileWriter(self._futures.answer)
        self._closed = False

    @property
    def dead(self) -> bool:
        return self._closed

    def map(self, buffer: int, memory: memoryview | None, fd: int = -1) -> None:
        self._writer.map(buffer, memory)

    def open(self, path: Place, fd: int | None, *, direct: bool) -> int:
        self._writer.activity.report = events.record if events.observed() else None
        file = self._futures.file()
        self._writer.open(file, os.fspath(path), fd, direct=direct)
        return file

    def write(self, file: int, buffer: int, start: int, nbytes: int, offset: int) -> Future[None]:
        job, future = self._futures.new()
        self._writer.write(job, file, buffer, start, nbytes, offset)
        return future

    def finish(self, file: int, header: bytes, size: int) -> Future[None]:
        job, future = self._futures.new()
        self._writer.finish(job, file, header, size)
        return future

    def begin(self, place: Place, header: bytes, size: int) -> int:
        self._writer.activity.report = events.record if events.observed() else None
        file, target = self._futures.file(), as_store(place)
        self._writer.begin(file, target.store, target.key, header, size)
        return file

    def send(self, file: int, memory: memoryview, keep: object) -> Future[None]:
        job, future = self._futures.new()
        self._writer.send(job, file, memory, keep)
        return future

    def give_up(self, files: Sequence[int]) -> None:
        self._writer.give_up(files)

    def leave(self, after: Sequence[int], folders: Sequence[Place], small: Sequence[Small]) -> Future[None]:
        job, future = self._futures.new()
        store, to_sync, paths = in_one_store(folders, small)
        data = [(path, data) for path, (_, data) in zip(paths, small, strict=True)]
        self._writer.leave(job, after, to_sync, data, store)
        return future

    def drop(self, files: Sequence[int]) -> None:
        self._writer.drop(files, close=False)

    def close(self) -> None:
        if not self._closed:
            with interrupts_wait():
                self._writer.end()
            self._writer.close()  # an interrupt leaves it to end by itself
            self._closed = True


def start(kind: str) -> Worker:
    """A worker of this kind: ``"thread"`` or ``"process"``. Raises StorageError if no process can be started."""
    if kind == "thread":
        return ThreadWorker()
    try:
        return ProcessWorker()
    except OSError as error:
        refused = StorageError(f'no writer process can be started ({error}); Saver(worker="thread") needs none')
        refused.errno = error.errno
        raise refused from error
