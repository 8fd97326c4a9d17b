"""What the library does to the disk below a folder, as a `Trace`: each call of `engine/disk.py` that changes something.

Calls are let through one at a time, so their order is the one in which they happened. Never changes what is done, but
for a `Rule` that it is given: a call may be refused, as a file system or a death would.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.engine import disk
from tests.crash.model import ROOT, Disk, Enter, Mark, Op, Size, Sync, SyncFolder, Trace, Write, snapshot

Rule = Callable[[int, disk.Call, Callable[[], Any]], Any]
"""Instead of a call, by its number among those that change something: does it, or raises, or both."""

LOOKS = ("open", "read", "list", "stat")
"""Verbs that change nothing."""


class Recorder:
    """Records what happens below ``root``, which holds ``start`` when it begins."""

    def __init__(self, root: Path, rule: Rule | None = None) -> None:
        self.root = root.resolve()
        self.trace = Trace(snapshot(self.root))
        self._now: Disk = self.trace.start.copy()
        self._rule = rule
        self._count = 0
        self._one = threading.RLock()
        self._next = 1 + max([ROOT, *self._now.folders, *self._now.files])

    def mark(self, version: int) -> None:
        """The program has been promised that this version is durable."""
        with self._one:
            self._add(Mark(version), f"promised {version}")

    def hook(self, call: disk.Call, do: Callable[[], Any]) -> Any:
        if call.verb in LOOKS or self._below(call.target or call.path) is None:
            return do()
        with self._one:
            number, self._count = self._count, self._count + 1
            before = os.path.lexists(call.target if call.verb == "link" else call.path)
            returned: list[Any] = []

            def done() -> Any:
                returned.append(do())
                self._note(call, before, returned[0])
                return returned[0]

            return done() if self._rule is None else self._rule(number, call, done)

    def _note(self, call: disk.Call, before: bool, result: Any) -> None:
        path = self._below(call.path)
        told = f"{call.verb} {path if path is not None else call.path}"
        if call.verb == "create":
            if not before:
                self._add(Enter((self._name(call.path, self._new_file()),)), told)
            elif os.path.getsize(call.path) == 0 and self._now.files[self._number(call.path)]:
                self._add(Size(self._number(call.path), 0), told)
        elif call.verb == "write":
            data = bytes(memoryview(call.data).cast("B")[: result if isinstance(result, int) else None])
            self._add(Write(self._number(call.path), call.offset, data), f"{told} {call.offset}+{len(data)}")
        elif call.verb in ("cut", "reserve"):
            self._add(Size(self._number(call.path), call.offset, call.verb == "reserve"), f"{told} {call.offset}")
        elif call.verb == "sync":
            self._add(Sync(self._number(call.path)), told)
        elif call.verb == "sync folder":
            self._add(SyncFolder(self._number(call.path)), told)
        elif call.verb == "make folder":
            if not before:
                self._add(Enter((self._name(call.path, self._new_folder()),)), told)
        elif call.verb == "link":
            self._add(Enter((self._name(call.target, self._number(call.path)),)), f"{told} as {self._below(call.target)}")
        elif call.verb == "replace":
            moved = self._number(call.path)
            self._add(
                Enter((self._name(call.path, None), self._name(call.target, moved))), f"{told} as {self._below(call.target)}"
            )
        elif call.verb in ("delete", "remove folder"):
            if before:
                self._add(Enter((self._name(call.path, None),)), told)
        else:
            raise NotImplementedError(f"the model knows no {call.verb!r}")

    def _add(self, op: Op, told: str) -> None:
        self._now.apply(op)
        self.trace.ops.append(op)
        self.trace.threads.append(threading.get_ident())
        self.trace.calls.append(told)

    def _below(self, path: str) -> str | None:
        # The folder is resolved, and not the last name: that is what is made, or taken away.
        folder, name = os.path.split(os.path.abspath(path))
        whole = os.path.join(os.path.realpath(folder), name)
        if whole == os.fspath(self.root):
            return ""
        return os.path.relpath(whole, self.root) if whole.startswith(f"{self.root}/") else None

    def _number(self, path: str) -> int:
        below = self._below(path)
        found = None if below is None else self._now.find(below)
        if found is None:
            raise LookupError(f"{path} was used, and the recorder has not seen it made")
        return found

    def _name(self, path: str, target: int | None) -> tuple[int, str, int | None]:
        folder, name = os.path.split(path)
        return self._number(folder), name, target

    def _new_file(self) -> int:
        self._next += 1
        self._now.files[self._next] = b""
        self.trace.made_files.append(self._next)
        return self._next

    def _new_folder(self) -> int:
        self._next += 1
        self._now.folders[self._next] = {}
        self.trace.made_folders.append(self._next)
        return self._next


@contextmanager
def recorded(root: Path, rule: Rule | None = None) -> Iterator[Recorder]:
    """Inside, everything that this process does below ``root`` is recorded."""
    recorder = Recorder(root, rule)
    with disk.hooked(recorder.hook):
        yield recorder
