"""The writer process: a file writer that gets its jobs over a socket, and finishes it when the trainer is gone.

`write/worker.py` starts it by `COMMAND` and talks to it by `send`. It is up in milliseconds: the standard
library and what uploads to a store, never torch, nor the user's script.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.storage.local import disk
from holdfast.write.file_writer import Fault, FileWriter

if TYPE_CHECKING:
    from holdfast.storage.store import Store

COMMAND = (
    "import sys; package = sys.modules['holdfast'] = type(sys)('holdfast'); package.__path__ = [sys.argv[1]]; "
    "from holdfast.write.writer_process import main; main(int(sys.argv[2]))"
)
"""What a plain interpreter runs, given the folder of the package and a socket: without the package's own start, which
would import torch."""

ORPHANED = 1.0
"""Seconds between two looks whether the parent still lives: a forked child of it may hold the socket open."""


# Messages: each a length, a JSON head and bytes. Answers go back as lines of JSON, and so do spans of time.


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
    """The writer process: does its jobs, and once the trainer is gone finishes those that it has."""
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

    def report(*span: Any) -> None:
        try:
            with lock:
                answers.sendall(json.dumps({"span": span}).encode() + b"\n")
        except OSError:
            pass  # nobody is there to hear it

    answers = source.dup()
    answers.settimeout(None)
    writer = FileWriter(answer)
    stores: dict[int, Store] = {}
    hooks: dict[int, Any] = {}
    while True:
        try:
            head, data, fds = inbox.next()
        except _Gone:
            break
        if head["verb"] in ("hook", "unhook"):
            _hook(hooks, fds, **head)
        elif head["verb"] == "watch":
            writer.activity.report = report if head["on"] else None
        else:
            _obey(writer, stores, head, data, fds)
    writer.close()


def _obey(
    writer: FileWriter, stores: dict[int, Store], head: dict[str, Any], data: list[bytes], fds: list[int]
) -> None:
    verb = head.pop("verb")
    if verb == "map":
        memory = None
        if fds:
            memory = memoryview(mmap.mmap(fds[0], head["nbytes"]))
            os.close(fds[0])
        writer.map(head["buffer"], memory)
    elif verb == "open":
        writer.open(head["file"], head["path"], fds[0] if fds else None, direct=head["direct"])
    elif verb == "write":
        writer.write(**head)
    elif verb == "store":
        stores[head["store"]] = _made(**head["made"])
    elif verb == "begin":
        writer.begin(**{**head, "store": stores[head["store"]]}, header=data[0])
    elif verb == "give_up":
        writer.give_up(head["files"])
    elif verb == "finish":
        writer.finish(**head, header=data[0])
    elif verb == "leave":
        paths, store = head.pop("paths"), stores.get(head.pop("store", 0))
        writer.leave(**head, small=list(zip(paths, data, strict=True)), store=store)
    elif verb == "drop":
        writer.drop(head["files"], close=True)


def _hook(
    hooks: dict[int, Any], fds: list[int], verb: str, hook: int, module: str = "", told: dict[str, Any] | None = None
) -> None:
    """Faults that a test has ordered in the trainer are met here too; see `disk.Hook`."""
    if verb == "hook":
        hooks[hook] = import_module(module).arrive(told, fds)
        disk.install(hooks[hook])
    else:
        disk.remove(hooks[hook])
        hooks.pop(hook).close()


def _made(paths: list[str], spec: dict[str, Any]) -> Store:
    """A store in this process, as the trainer described it."""
    sys.path[:] = paths
    store: Store = import_module("holdfast.storage.wrappers.spec").store_from(spec)
    return store


def _step_back() -> None:
    """Let training have the processor and the disk first."""
    os.nice(10)
    libc = ctypes.CDLL(None)
    # ioprio_set(2) on x86-64 and arm64: this process, best effort, the last of eight classes.
    number = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, 1, 0, 2 << 13 | 7)
