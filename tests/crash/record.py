"""What the library does to the disk below a folder, as a `Trace`: each call of `disk.py` that changes something.

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

from holdfast.storage.local import disk
from tests.crash.model import ROOT, Disk, Enter, Mark, Op, Size, Sync, SyncFolder, Trace, Write, snapshot

Rule = Callable[[int, disk.Call, Callable[[], Any]], Any]
"""Instead of a call, by its number among those that change something: does it, or raises, or both."""

LOOKS = ("open", "read", "list", "stat")
"""Verbs that change nothing."""


class Recorder:
    """Records what happens below ``root``, which holds ``start`` when it begins."""

    def __init__(self, root: Path, rule: Rule | None = None) -> None:
        self.root = root.resolve()
        start, self._files = snapshot(self.root)
        self.trace = Trace(start, self.root)
        self._now: Disk = start.copy()
        self._rule = rule
        self._count = 0
        self._one = threading.RLock()
        self._next = 1 + max([ROOT, *self._now.folders, *self._now.files])

    def mark(self, version: int) -> None:
        """The program has been promised that this version is durable."""
        with self._one:
            self._add(Mark(version), f"promised {version}")

    def hook(self, call: disk.Call, do: Callable[[], Any]) -> Any:
        """What `storage/local/disk.py` asks before each call."""
        if call.verb in LOOKS:
            return do()
        with self._one:
            if not self._is_ours(call):
                return do()
            number, self._count = self._count, self._count + 1
            before = os.path.lexists(call.path)

            def done() -> Any:
                result = do()
                self._note(call, before, result)
                return result

            return done() if self._rule is None else self._rule(number, call, done)

    def _is_ours(self, call: disk.Call) -> bool:
        if call.fd >= 0:
            return os.fstat(call.fd).st_ino in self._files
        return self._below(call.target or call.path) is not None

    def _note(self, call: disk.Call, before: bool, result: Any) -> None:
        path, target = self._below(call.path), self._below(call.target) if call.target else ""
        told = f"{call.verb} {path or '.'}" + (f" as {target}" if target else "")
        match call.verb:
            case "create" if not before:
                self._next += 1
                self._files[os.fstat(result).st_ino] = self._next
                self._now.files[self._next] = b""
                self.trace.made_files.append(self._next)
                self._add(Enter((self._name(call.path, self._next),)), told)
            case "create":  # one that was there, and may have been cut to nothing
                number = self._number(call.path)
                if self._now.files[number] and not os.fstat(result).st_size:
                    self._add(Size(number, 0), told)
            case "write":
                data = bytes(memoryview(call.data).cast("B")[:result])
                number = self._of(call.fd)
                offset = len(self._now.files[number]) if call.offset < 0 else call.offset
                self._add(Write(number, offset, data), f"{told} {offset}+{len(data)}")
            case "cut" | "reserve":
                self._add(Size(self._of(call.fd), call.offset, call.verb == "reserve"), f"{told} {call.offset}")
            case "sync":
                self._add(Sync(self._of(call.fd)), told)
            case "sync folder":
                self._add(SyncFolder(self._number(call.path)), told)
            case "make folder":
                self._next += 1
                self._now.folders[self._next] = {}
                self.trace.made_folders.append(self._next)
                self._add(Enter((self._name(call.path, self._next),)), told)
            case "link":
                self._add(Enter((self._name(call.target, self._number(call.path)),)), told)
            case "exchange" if result:
                one, other = self._number(call.path), self._number(call.target)
                self._add(Enter((self._name(call.path, other), self._name(call.target, one))), told)
            case "replace" | "rename" if result is not False:
                moved = self._number(call.path)
                self._add(Enter((self._name(call.path, None), self._name(call.target, moved))), told)
            case "delete" | "remove folder":
                self._add(Enter((self._name(call.path, None),)), told)
            case "rename" | "exchange":
                pass  # it was not to be had
            case other:
                raise NotImplementedError(f"the model knows no {other!r}")

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

    def _of(self, fd: int) -> int:
        # By its inode: a path may be told that it has only later.
        return self._files[os.fstat(fd).st_ino]


@contextmanager
def recorded(root: Path, rule: Rule | None = None) -> Iterator[Recorder]:
    """Inside, everything that this process does below ``root`` is recorded."""
    recorder = Recorder(root, rule)
    with disk.hooked(recorder.hook):
        yield recorder
    recorder.trace.left = snapshot(recorder.root)[0].tree()
