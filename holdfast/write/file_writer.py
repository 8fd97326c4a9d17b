"""The file writer: bytes from memory to files, in threads of this process or of one that outlives it.

`write/worker.py` makes one, or has one made in the writer process. So it imports the standard library alone, and what
uploads to a store when there is one. It sees names, memory and offsets, and never a tensor, a rank or torch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from holdfast.storage.local import disk, durable
from holdfast.write.activity import Activity

if TYPE_CHECKING:
    from holdfast.storage.store import Store
    from holdfast.write.upload import Upload

WRITERS = 2
"""Threads that write: two keep a disk busy while memory is filled (measured: a third adds nothing)."""


class Fault(NamedTuple):
    """What went wrong: doing what, to which file, and how (``errno`` is None for what the system did not refuse)."""

    doing: str
    path: str
    errno: int | None
    text: str


@dataclass
class _File:
    path: str
    fd: int | None  # None: it is opened for each job, so that a save may have more files than descriptors
    direct: bool
    pending: int = 0  # writes that are not done
    fault: Fault | None = None
    idle: threading.Condition = field(default_factory=threading.Condition)

    def wait_idle(self) -> None:
        """Until nothing of it is being written."""
        with self.idle:
            # It ends with the writes to this file: with the storage's own patience, as all waits of this module do.
            self.idle.wait_for(lambda: not self.pending)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor, or one for as long as the block lasts."""
        if self.fd is not None:
            yield self.fd
            return
        fd = disk.open(self.path, os.O_RDWR | os.O_NOFOLLOW | (os.O_DIRECT if self.direct else 0))
        try:
            yield fd
            if not self.direct:
                disk.sync(fd, self.path)  # a failure to write what is cached may show at this descriptor alone
        finally:
            os.close(fd)


class FileWriter:
    """Takes jobs in order and answers each: ``answer(job, None)``, or with the `Fault` that it met.

    Two threads write; a third finishes files, each after all its writes, and leaves small files after whole saves.
    ``activity`` reports what was done, if anybody observes.
    """

    def __init__(self, answer: Callable[[int, Fault | None], None]) -> None:
        self._answer = answer
        self._memory: dict[int, memoryview] = {}
        self._files: dict[int, _File | Upload] = {}
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closings: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.activity = Activity()
        self._queues = [*[self._writes] * WRITERS, self._closings]
        # Daemons: an interpreter that ends waits for saves, by its own exit handler, and not for idle threads.
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name="holdfast-write", daemon=True) for jobs in self._queues
        ]
        for thread in self._threads:
            thread.start()
        # Of one that nobody has closed, as its owner was interrupted on the way there.
        self._last_will = weakref.finalize(self, _stop, self._queues)
        self._last_will.atexit = False

    def end(self) -> None:
        """Take no more. What was asked for is finished, but what is not all there of an upload is given up."""
        for target in self._files.values():
            if not isinstance(target, _File):
                target.give_up()
        self._last_will()

    def close(self) -> None:
        """`end`, and wait until all is finished and the threads are gone."""
        self.end()
        for thread in self._threads:
            thread.join()

    def map(self, buffer: int, memory: memoryview | None) -> None:
        """Know the memory of a buffer from now on; None forgets it."""
        if memory is None:
            self._memory.pop(buffer, None)
        else:
            self._memory[buffer] = memory

    def open(self, file: int, path: str, fd: int | None, *, direct: bool) -> None:
        """Take a file that is there and as long as it will be. Without a descriptor it is opened as it is needed."""
        self._files[file] = _File(path, fd, direct)

    def begin(self, file: int, store: Store, key: str, header: bytes, size: int) -> None:
        """Start to upload a file of ``size`` bytes; what follows the header is written in order of its offsets."""
        upload = import_module("holdfast.write.upload").Upload
        self._files[file] = upload(store, key, header, size)

    def send(self, job: int, file: int, memory: memoryview, keep: object) -> None:
        """The next bytes of an upload, from memory of this process that ``keep`` keeps alive."""
        target = self._files[file]
        if isinstance(target, _File):
            raise ValueError(f"{target.path} is written from a buffer")
        self._add(job, target, memory, keep)

    def _add(self, job: int, upload: Upload, memory: memoryview, keep: object = None) -> None:
        def back(error: BaseException | None, kept: object = keep) -> None:
            self._answer(job, None if error is None else _fault("write", upload.key, error))

        upload.add(memory, back)

    def give_up(self, files: Sequence[int]) -> None:
        """Upload no more of these files."""
        for file in files:
            target = self._files.get(file)
            if target is not None and not isinstance(target, _File):
                target.give_up()

    def write(self, job: int, file: int, buffer: int, start: int, nbytes: int, offset: int) -> None:
        """Write ``nbytes`` of a buffer from ``start`` on to ``offset`` of a file."""
        target = self._files[file]
        if not isinstance(target, _File):
            self._add(job, target, self._memory[buffer][start : start + nbytes])
            return
        # To whole sectors where the write is direct: what follows is padding, of memory and of the file.
        padded = -(-nbytes // disk.SECTOR) * disk.SECTOR
        view = self._memory[buffer][start : start + padded]
        with target.idle:
            target.pending += 1

        def work() -> None:
            began = time.monotonic()
            fault = target.fault or _attempt("write", target.path, lambda: _write(target, view, nbytes, offset))
            self.activity.wrote(target.path, began, nbytes)
            with target.idle:
                target.fault = target.fault or fault  # the first one stays, whatever the other thread writes
                target.pending -= 1
                target.idle.notify_all()
            self._answer(job, target.fault)

        self._writes.put(work)

    def finish(self, job: int, file: int, header: bytes, size: int) -> None:
        """After all its writes: the header, the end of the file, and its bytes made durable."""
        target = self._files[file]

        def work() -> None:
            if isinstance(target, _File):
                target.wait_idle()
            began = time.monotonic()
            fault = _end(target, header, size)
            if isinstance(target, _File):
                self.activity.synced(target.path, began, len(header))
            else:
                self.activity.uploaded(target.key, target.thread, target.began, target.ended or began, size)
            self._answer(job, fault)

        self._closings.put(work)

    def leave(
        self, job: int, after: Sequence[int], folders: Sequence[str], small: Sequence[tuple[str, bytes]],
        store: Store | None = None,
    ) -> None:  # fmt: skip
        """Once the files ``after`` are durable: their folders too, then small files, one after the other.

        In a ``store``, ``small`` has keys instead of paths.
        """
        files = [self._files[file] for file in after]
        write = durable.write_small if store is None else lambda key, data: store.put(key, [data], len(data))

        def work() -> None:
            fault = next((one for f in files if (one := _fault_of(f)) is not None), None)
            began = time.monotonic()
            for folder in folders:
                fault = fault or _attempt("sync the folder", folder, partial(disk.sync_folder, folder))
            for path, data in small:
                fault = fault or _attempt("write", path, partial(write, path, data))
            if small:
                where = small[0][0] if store is None else f"{store.url}/{small[0][0]}"
                self.activity.did("small files", where, began, sum(len(data) for _, data in small))
            self._answer(job, fault)

        self._closings.put(work)

    def drop(self, files: Sequence[int], *, close: bool) -> None:
        """Forget files once nothing of theirs is under way; ``close`` their descriptors."""
        dropped = [self._files.pop(file) for file in files if file in self._files]

        def work() -> None:
            for target in dropped:
                if isinstance(target, _File):
                    target.wait_idle()
                    if close and target.fd is not None:
                        os.close(target.fd)
                else:
                    target.give_up()
                    target.wait()

        self._closings.put(work)


def _stop(queues: Sequence[queue.SimpleQueue[Callable[[], None] | None]]) -> None:
    for jobs in queues:
        jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the memory of a buffer


def _write(file: _File, view: memoryview, nbytes: int, offset: int) -> None:
    with file.opened() as fd:
        _write_to(fd, file, view, nbytes, offset)


def _write_to(fd: int, file: _File, view: memoryview, nbytes: int, offset: int) -> None:
    direct = file.direct  # as it is now: another thread may be refused at the same moment
    at, end = 0, len(view) if direct else nbytes
    view[nbytes:] = bytes(len(view) - nbytes)
    while at < end:
        try:
            at += disk.write(fd, view[at:end], offset + at, file.path)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # Opened directly, but this file system cannot write so (some overlay and network ones).
            file.direct, direct, end = False, False, nbytes
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        if direct:
            at -= at % disk.SECTOR


def _end(target: _File | Upload, header: bytes, size: int) -> Fault | None:
    if isinstance(target, _File):
        target.wait_idle()
        target.fault = target.fault or _finish(target, header, size)
    return _fault_of(target)


def _fault_of(target: _File | Upload) -> Fault | None:
    """What went wrong with a file; of an upload, once it has ended."""
    if isinstance(target, _File):
        return target.fault
    error = target.wait()
    return None if error is None else _fault("write", target.key, error)


def _finish(file: _File, header: bytes, size: int) -> Fault | None:
    aligned = memoryview(mmap.mmap(-1, len(header)))
    aligned[:] = header
    doing = "open"
    try:
        with file.opened() as fd:
            doing = "write"
            _write_to(fd, file, aligned, len(header), 0)
            doing = "cut"
            disk.cut(fd, size, file.path)
            doing = "sync"
            disk.sync(fd, file.path)
    except Exception as error:  # noqa: BLE001 - raised where the job is waited for
        return _fault(doing, file.path, error)
    return None


def _attempt(doing: str, path: str, work: Callable[[], object]) -> Fault | None:
    """Do it, or say what went wrong; a thread that died of it would leave everybody waiting."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised where the job is waited for
        return _fault(doing, path, error)
    return None


def _fault(doing: str, path: str, error: BaseException) -> Fault:
    if isinstance(error, OSError):
        return Fault(doing, path, error.errno, error.strerror or str(error))
    return Fault(doing, path, None, f"{type(error).__name__}: {error}")
