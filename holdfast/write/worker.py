"""Who writes: a file writer in threads of this process, or in a process of its own that outlives it.

A blocking save starts threads for itself; a Saver keeps one worker for all its saves. Never looks at a byte: a process
gets descriptors and places in shared memory over a socket.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast import events
from holdfast.errors import HoldfastError, StorageError, Unsupported
from holdfast.events import log
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store import Store
from holdfast.storage.wrappers.spec import spec_of
from holdfast.write import writer_process
from holdfast.write.file_writer import Fault, FileWriter
from holdfast.write.jobs import Futures, Small, Worker, in_one_store


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


_PACKAGE = str(Path(__file__).parents[1])


class ProcessWorker:
    """Writes in a process of its own, which maps the buffers, and finishes its jobs even if this process dies."""

    shares_memory = True

    def __init__(self) -> None:
        self._futures = Futures()
        self._connection = _Connection(self._futures)
        self._stores: dict[str, int] = {}

    @property
    def pid(self) -> int:
        return self._connection.process.pid

    @property
    def dead(self) -> bool:
        return self._connection.dead is not None

    def map(self, buffer: int, memory: memoryview | None, fd: int = -1) -> None:
        nbytes = 0 if memory is None else len(memory)
        self._connection.send({"verb": "map", "buffer": buffer, "nbytes": nbytes}, fds=[] if memory is None else [fd])

    def open(self, path: Place, fd: int | None, *, direct: bool) -> int:
        file = self._futures.file()
        self._connection.send(
            {"verb": "open", "file": file, "path": os.fspath(path), "direct": direct}, fds=[] if fd is None else [fd]
        )
        return file

    def write(self, file: int, buffer: int, start: int, nbytes: int, offset: int) -> Future[None]:
        job, future = self._futures.new()
        head = {"verb": "write", "job": job, "file": file, "buffer": buffer}
        self._connection.send({**head, "start": start, "nbytes": nbytes, "offset": offset})
        return future

    def finish(self, file: int, header: bytes, size: int) -> Future[None]:
        job, future = self._futures.new()
        self._connection.send({"verb": "finish", "job": job, "file": file, "size": size}, [header])
        return future

    def begin(self, place: Place, header: bytes, size: int) -> int:
        file = self._futures.file()
        target = as_store(place)
        head = {"verb": "begin", "file": file, "store": self._know(target.store), "key": target.key, "size": size}
        self._connection.send(head, [header])
        return file

    def send(self, file: int, memory: memoryview, keep: object) -> Future[None]:
        raise HoldfastError("another process cannot read this one's memory; this is a fault of holdfast")

    def give_up(self, files: Sequence[int]) -> None:
        with suppress(HoldfastError):  # it is dead, and its memory with it
            self._connection.send({"verb": "give_up", "files": list(files)})

    def _know(self, store: Store) -> int:
        """The number of a store that the process has made for itself, from what this one tells of it."""
        spec = spec_of(store)
        if spec is None:
            raise Unsupported(f'{store.url} lives in this process alone: save there with Saver(worker="thread")')
        text = json.dumps(spec, sort_keys=True)
        if text not in self._stores:
            self._stores[text] = len(self._stores) + 1
            made = {"paths": sys.path, "spec": spec}
            self._connection.send({"verb": "store", "store": self._stores[text], "made": made})
        return self._stores[text]

    def leave(self, after: Sequence[int], folders: Sequence[Place], small: Sequence[Small]) -> Future[None]:
        job, future = self._futures.new()
        store, to_sync, paths = in_one_store(folders, small)
        head = {"verb": "leave", "job": job, "after": list(after), "folders": to_sync, "paths": paths}
        if store is not None:
            head["store"] = self._know(store)
        self._connection.send(head, [data for _, data in small])
        return future

    def drop(self, files: Sequence[int]) -> None:
        with suppress(HoldfastError):  # it is dead, and its descriptors are closed
            self._connection.send({"verb": "drop", "files": list(files)})

    def close(self) -> None:
        self._connection.close()


_starting = threading.RLock()
"""Held while a writer process is started: no thread forks meanwhile.

A forked child, as a DataLoader makes them, would keep open what the start has open just then. The start itself would
wait until that child ends, and so would everybody who waits to learn that the writer process has died.
"""
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


class _Connection:
    """The writer process, and the socket over which it gets jobs and answers.

    It is a plain interpreter that runs `write/writer_process.py`. We rejected a fork, because it inherits the locks of
    threads and the contexts of devices. We rejected multiprocessing's spawn, because it imports the user's script and
    torch again. It leads a session of its own, since launchers kill a trainer's whole process group.
    """

    def __init__(self, futures: Futures) -> None:
        with _starting:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                command = [sys.executable, "-I", "-S", "-c", writer_process.COMMAND, _PACKAGE, str(theirs.fileno())]
                try:
                    self.process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, cwd="/"
                    )
                except BaseException:
                    ours.close()
                    raise
        self.dead: str | None = None
        self._socket, self._sending, self._futures = ours, threading.Lock(), futures
        self._hooks: dict[int, disk.Hook] = {}
        self._watched = False
        self._reader = threading.Thread(target=self._read_answers, name="holdfast-answers", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Send no more, and wait until the process has written what it was asked to. Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_WR) if self.dead is None else None
            # It ends once the process has written what it was asked to: with the storage's own patience.
            self.process.wait()
            self._reader.join()
            self._socket.close()

    def send(self, head: dict[str, Any], data: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
        """Tell the process what to do. Raises HoldfastError if it has ended."""
        if self.dead is not None:
            raise HoldfastError(self.dead)
        try:
            with self._sending:
                self._bring_hooks()
                self._bring_watch()
                writer_process.send(self._socket, head, data, fds)
        except OSError:
            self._reader.join()  # it finds the end of the process, and says how it ended
            raise HoldfastError(self.dead or "the writer process does not listen") from None

    def _bring_hooks(self) -> None:
        """Let the process know what is hooked to the disk here, and can be there, and what no longer is."""
        hooks = [hook for hook in disk.installed() if hasattr(hook, "travel")]
        for number in [number for number, hook in self._hooks.items() if hook not in hooks]:
            del self._hooks[number]
            writer_process.send(self._socket, {"verb": "unhook", "hook": number})
        for hook in hooks:
            if hook not in self._hooks.values():
                number = max(self._hooks, default=0) + 1
                self._hooks[number] = hook
                module, message, fds = hook.travel()
                writer_process.send(
                    self._socket, {"verb": "hook", "hook": number, "module": module, "told": message}, fds=fds
                )

    def _bring_watch(self) -> None:
        """Let the process tell of what it does, or no longer, as somebody wants to know it."""
        if self._watched != events.observed():
            self._watched = not self._watched
            writer_process.send(self._socket, {"verb": "watch", "on": self._watched})

    def _read_answers(self) -> None:
        try:
            left = b""
            while data := self._socket.recv(1 << 16):
                *lines, left = (left + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if isinstance(message, dict):
                        name, path, lane, *rest = message["span"]  # by the same clock as here
                        events.record(name, path, f"writer process: {lane}", *rest)
                        continue
                    job, fault = message
                    self._futures.answer(job, None if fault is None else Fault(*fault))
        except OSError:
            pass  # it has ended; how is said below
        except Exception:  # noqa: BLE001 - those who wait for an answer hear below that none will come
            log.exception("the writer process %d gave an answer that makes no sense", self.process.pid)
            self.process.kill()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self.dead = (
            f"the writer process {self.process.pid} {how} (by the system when memory is short? see dmesg); "
            "the next save starts another one"
        )
        if code:
            log.debug("%s", self.dead)
        self._futures.fail_all(self.dead)
