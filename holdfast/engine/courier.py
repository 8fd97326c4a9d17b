"""The courier: bytes from memory to files, in threads of its own; in this process, or alone in one that outlives it.

`engine/worker.py` starts it, and runs this very file as the writer process. So it imports the standard library alone,
and what uploads to a store when there is one: it sees names, memory and offsets, and never a tensor, a rank or torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import queue
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from holdfast.engine.stores.store import Store
    from holdfast.engine.upload import Upload

SECTOR = 4096
"""Direct I/O moves multiples of this many bytes between addresses and offsets that are multiples of it."""

WRITERS = 2
"""Threads that write: two keep a disk busy while memory is filled (measured: a third adds nothing)."""

ORPHANED = 1.0
"""Seconds between two looks whether the parent still lives: a forked child of it may hold the socket open."""


class Fault(NamedTuple):
    """What went wrong: doing what, to which file, and how (``errno`` is None for what the system did not refuse)."""

    doing: str
    path: str
    errno: int | None
    text: str


@dataclass
class _File:
    path: str
    fd: int
    direct: bool
    pending: int = 0  # writes that are not done
    fault: Fault | None = None
    idle: threading.Condition = field(default_factory=threading.Condition)

    def wait_idle(self) -> None:
        """Until nothing of it is being written."""
        with self.idle:
            # It ends with the writes to this file: with the storage's own patience, as all waits of this module do.
            self.idle.wait_for(lambda: not self.pending)


class Courier:
    """Takes jobs in order and answers each: ``answer(job, None)``, or with the `Fault` that it met.

    Two threads write; a third finishes files, each after all its writes, and leaves small files after whole saves.
    """

    def __init__(self, answer: Callable[[int, Fault | None], None]) -> None:
        self._answer = answer
        self._memory: dict[int, memoryview] = {}
        self._files: dict[int, _File | Upload] = {}
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closings: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        queues = [*[self._writes] * WRITERS, self._closings]
        # Daemons: an interpreter that ends waits for saves, by its own exit handler, and not for idle threads.
        self._threads = [threading.Thread(target=_work, args=(q,), name="holdfast-write", daemon=True) for q in queues]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finish what was asked for, then end the threads. What is not all there of an upload is given up."""
        for target in self._files.values():
            if not isinstance(target, _File):
                target.give_up()
        for _ in range(WRITERS):
            self._writes.put(None)
        for thread in self._threads[:WRITERS]:
            thread.join()
        self._closings.put(None)
        self._threads[-1].join()

    def map(self, slot: int, memory: memoryview | None) -> None:
        """Know the memory of a slot from now on; None forgets it."""
        if memory is None:
            self._memory.pop(slot, None)
        else:
            self._memory[slot] = memory

    def open(self, file: int, path: str, fd: int, *, direct: bool) -> None:
        """Take a file that is open already and as long as it will be."""
        self._files[file] = _File(path, fd, direct)

    def begin(self, file: int, store: Store, key: str, header: bytes, size: int) -> None:
        """Start to upload a file of ``size`` bytes; what follows the header is written in order of its offsets."""
        upload = import_module("holdfast.engine.upload").Upload
        self._files[file] = upload(store, key, header, size)

    def send(self, job: int, file: int, memory: memoryview, keep: object) -> None:
        """The next bytes of an upload, from memory of this process that ``keep`` keeps alive."""
        target = self._files[file]
        if isinstance(target, _File):
            raise ValueError(f"{target.path} is written from a slot")
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

    def write(self, job: int, file: int, slot: int, start: int, nbytes: int, offset: int) -> None:
        """Write ``nbytes`` of a slot from ``start`` on to ``offset`` of a file."""
        target = self._files[file]
        if not isinstance(target, _File):
            self._add(job, target, self._memory[slot][start : start + nbytes])
            return
        # To whole sectors where the write is direct: what follows is padding, of memory and of the file.
        padded = -(-nbytes // SECTOR) * SECTOR
        view = self._memory[slot][start : start + padded]
        with target.idle:
            target.pending += 1

        def work() -> None:
            fault = target.fault or _attempt("write", target.path, lambda: _write(target, view, nbytes, offset))
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
            self._answer(job, _end(target, header, size))

        self._closings.put(work)

    def leave(
        self, job: int, after: Sequence[int], folders: Sequence[str], small: Sequence[tuple[str, bytes]],
        store: Store | None = None,
    ) -> None:  # fmt: skip
        """Once the files ``after`` are durable: their folders too, then small files, one after the other.

        In a ``store``, ``small`` has keys instead of paths.
        """
        files = [self._files[file] for file in after]
        write = write_small if store is None else partial(_put_small, store)

        def work() -> None:
            fault = next((found for f in files if (found := _fault_of(f)) is not None), None)
            for folder in folders:
                fault = fault or _attempt("sync the folder", folder, partial(sync_folder, folder))
            for path, data in small:
                fault = fault or _attempt("write", path, partial(write, path, data))
            self._answer(job, fault)

        self._closings.put(work)

    def drop(self, files: Sequence[int], *, close: bool) -> None:
        """Forget files once nothing of theirs is under way; ``close`` their descriptors."""
        dropped = [self._files.pop(file) for file in files if file in self._files]

        def work() -> None:
            for target in dropped:
                if isinstance(target, _File):
                    target.wait_idle()
                    if close:
                        os.close(target.fd)
                else:
                    target.give_up()
                    target.wait()

        self._closings.put(work)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the memory of a slot


def _write(file: _File, view: memoryview, nbytes: int, offset: int) -> None:
    at, end = 0, len(view) if file.direct else nbytes
    view[nbytes:] = bytes(len(view) - nbytes)
    while at < end:
        try:
            at += os.pwrite(file.fd, view[at:end], offset + at)
        except OSError as error:
            if error.errno != errno.EINVAL or not file.direct:
                raise
            # Opened directly, but this file system cannot write so (some overlay and network ones).
            file.direct, end = False, nbytes
            fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        if file.direct:
            at -= at % SECTOR


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


def _put_small(store: Store, key: str, data: bytes) -> None:
    store.put(key, [data], len(data))


def _finish(file: _File, header: bytes, size: int) -> Fault | None:
    aligned = memoryview(mmap.mmap(-1, len(header)))
    aligned[:] = header
    return (
        _attempt("write", file.path, lambda: _write(file, aligned, len(header), 0))
        or _attempt("cut", file.path, lambda: os.ftruncate(file.fd, size))
        or _attempt("sync", file.path, lambda: os.fsync(file.fd))
    )


def _attempt(doing: str, path: str, work: Callable[[], object]) -> Fault | None:
    """Do it, or say what went wrong; a thread that died of it would leave everybody waiting."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - stored, told to whoever waits for the job, and raised there
        return _fault(doing, path, error)
    return None


def _fault(doing: str, path: str, error: BaseException) -> Fault:
    if isinstance(error, OSError):
        return Fault(doing, path, error.errno, error.strerror or str(error))
    return Fault(doing, path, None, f"{type(error).__name__}: {error}")


# Small files, durably. `engine/storage.py` uses these too and names what fails.


def write_durably(path: str, data: bytes) -> None:
    """Write a file and sync its bytes, though not its name."""
    with open(path, "wb") as file:  # noqa: PTH123 - this file is started in milliseconds, pathlib is not
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_small(path: str, data: bytes) -> None:
    """Write a small file whole and durably under its name, in a folder that is made if need be.

    An older file of that name is replaced in one step.
    """
    folder, name = os.path.split(path)
    make_folder(folder)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def make_folder(path: str) -> None:
    """Create a folder and its parents, durably: each new entry is synced into its own parent."""
    missing = []
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Somebody else made it; if it is gone again, that is what the caller hears: ENOENT.
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise OSError(errno.ENOTDIR, f"{folder} is not a folder") from None
        sync_folder(os.path.dirname(folder))


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(fd)


# The process: messages come over a socket, each a length, a JSON head and bytes; answers go back as lines of JSON.


def send(to: socket.socket, head: dict[str, Any], data: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
    """Send one message; ``data`` follows the head, ``fds`` travel with its first byte."""
    text = json.dumps({**head, "data": [len(d) for d in data]}).encode()
    first = len(text).to_bytes(8, "little")
    sent = socket.send_fds(to, [first], list(fds))
    to.sendall(b"".join([first[sent:], text, *data]))


class _Gone(Exception):
    """The trainer closed the socket, or died."""


class _Inbox:
    """Whole messages from a socket."""

    def __init__(self, source: socket.socket) -> None:
        self._source, self._parent = source, os.getppid()
        source.settimeout(ORPHANED)

    def next(self) -> tuple[dict[str, Any], list[bytes], list[int]]:
        first, fds, *_ = self._patiently(lambda: socket.recv_fds(self._source, 8, 4))
        head = json.loads(self._exactly(int.from_bytes(first + self._exactly(8 - len(first)), "little")))
        return head, [self._exactly(n) for n in head.pop("data")], list(fds)

    def _exactly(self, nbytes: int) -> bytes:
        parts = []
        while nbytes:
            part = self._patiently(partial(self._receive, min(nbytes, 1 << 20)))[0]
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def _receive(self, nbytes: int) -> tuple[bytes]:
        return (self._source.recv(nbytes),)

    def _patiently(self, receive: Callable[[], Any]) -> Any:
        while True:
            try:
                got = receive()
            except TimeoutError:
                if os.getppid() != self._parent:
                    raise _Gone from None
                continue
            except OSError:
                raise _Gone from None
            if not got[0]:
                raise _Gone
            return got


def main(fd: int) -> None:
    """The writer process: does what it is told, and once the trainer is gone finishes what it was told before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, which says what becomes of a save
    _step_back()
    source = socket.socket(fileno=fd)
    inbox, lock = _Inbox(source), threading.Lock()

    def answer(job: int, fault: Fault | None) -> None:
        try:
            with lock:
                answers.sendall(json.dumps([job, fault]).encode() + b"\n")
        except OSError:
            pass  # nobody is there to hear it; what was asked for is done all the same

    answers = source.dup()
    answers.settimeout(None)
    courier = Courier(answer)
    stores: dict[int, Store] = {}
    while True:
        try:
            head, data, fds = inbox.next()
        except _Gone:
            break
        _obey(courier, stores, head, data, fds)
    courier.close()


def _obey(courier: Courier, stores: dict[int, Store], head: dict[str, Any], data: list[bytes], fds: list[int]) -> None:
    verb = head.pop("verb")
    if verb == "map":
        memory = None
        if fds:
            memory = memoryview(mmap.mmap(fds[0], head["nbytes"]))
            os.close(fds[0])
        courier.map(head["slot"], memory)
    elif verb == "open":
        courier.open(head["file"], head["path"], fds[0], direct=head["direct"])
    elif verb == "write":
        courier.write(**head)
    elif verb == "store":
        stores[head["store"]] = _made(**head["made"])
    elif verb == "begin":
        courier.begin(**{**head, "store": stores[head["store"]]}, header=data[0])
    elif verb == "give_up":
        courier.give_up(head["files"])
    elif verb == "finish":
        courier.finish(**head, header=data[0])
    elif verb == "leave":
        paths, store = head.pop("paths"), stores.get(head.pop("store", 0))
        courier.leave(**head, small=list(zip(paths, data, strict=True)), store=store)
    elif verb == "drop":
        courier.drop(head["files"], close=True)


def _made(package: str, paths: list[str], spec: dict[str, Any]) -> Store:
    """A store in this process. What makes it is imported without the package's own start, which would import torch."""
    if "holdfast" not in sys.modules:
        stub = ModuleType("holdfast")
        stub.__path__ = [package]
        sys.modules["holdfast"] = stub
        sys.path[:] = paths
    store: Store = import_module("holdfast.engine.stores.shipping").store_from(spec)
    return store


def _step_back() -> None:
    """Let training have the processor and the disk first."""
    os.nice(10)
    libc = ctypes.CDLL(None)
    # ioprio_set(2) on x86-64 and arm64: this process, best effort, the last of eight classes.
    number = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, 1, 0, 2 << 13 | 7)


if __name__ == "__main__":
    main(int(sys.argv[1]))
