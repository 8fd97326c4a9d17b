"""Who writes the journal of a run: the manager's first rank, in a thread beside training.

The manager tells a `Journal` what became of its saves, and where training is. Never makes a save or a step wait, nor
fail: what cannot be written is kept for later, and in the end left out.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from holdfast.events import at_exit, log
from holdfast.run import journal
from holdfast.run.journal import Entry, Now
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.storage import JOURNAL
from holdfast.storage.wrappers.layers import with_deadline

WAITING = 1000
"""Entries that are kept in memory while they cannot be written."""

LEAVE = 5.0
"""Seconds to write the last entries of a manager that was not closed, when the interpreter ends."""


class Journal:
    """What the first rank writes. Each start writes files of its own, so no two processes ever change the same one."""

    def __init__(self, root: Place) -> None:
        self.root = root
        self.start = secrets.token_hex(4)
        self._folder = with_deadline(root, journal.ASK) / JOURNAL
        self._beat = journal.BEAT_IN_STORE if root.is_remote else journal.BEAT
        self._changed = threading.Condition()
        self._pending: list[Entry] = []
        self._where: Callable[[], Now] | None = None
        self._told = -math.inf
        self._thread: threading.Thread | None = None
        self._warned = self._closed = self._forked = False
        # Of the thread alone.
        self._file: Place | None = None
        self._lines: list[bytes] = []
        self._torn = False
        _open.add(self)

    def add(self, entry: Entry) -> None:
        """Write an entry, soon. Waits for nothing."""
        stamped = replace(entry, error=journal.printable(entry.error), start=self.start)
        with self._changed:
            self._pending = [*self._pending, stamped][-WAITING:]
            self._begin()

    def tell(self, where: Callable[[], Now], *, news: bool = False) -> None:
        """Write where training is, soon: if it is time again, or if there is ``news``, which on disk costs little.

        Of several such notes the last one counts. Waits for nothing: ``where`` is asked in the thread of the journal,
        as it may have to look at a disk, or to wait for a metric that a device still computes. None after `close`.
        """
        now = time.monotonic()
        if now - self._told >= self._beat or (news and not self._folder.is_remote):
            self._told = now
            with self._changed:
                if not self._closed:  # a save that was given up may end later: training has ended all the same
                    self._where = where
                    self._begin()

    def close(self, where: Callable[[], Now], timeout: float) -> None:
        """Write where training has ended; wait until all is written, or cannot be, or ``timeout`` seconds are over."""
        with self._changed:
            self._closed = True
            self._where = lambda: replace(where(), ended=True)
            self._begin()
        self.settle(timeout)

    def settle(self, timeout: float) -> None:
        """Wait until all is written so far, or cannot be, or ``timeout`` seconds are over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None or self._forked, timeout):
                log.warning("%s is behind: the last entries may be lost", self._folder)

    def _begin(self) -> None:
        if self._thread is not None or self._forked:
            return
        # A daemon that ends when there is nothing to write: it keeps no interpreter, and costs nothing between.
        thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter ends: the next entry tries again
            self._complain(error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                pending, where = self._pending, self._where
                if not pending and where is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._pending, self._where = [], None
            try:
                if pending:
                    self._write(pending)
                    pending = []
                if where is not None:
                    now = replace(where(), start=self.start)
                    self._put(self._folder / journal.NOW, msgspec.json.encode(now))
            except Exception as error:  # noqa: BLE001 - training goes on without a journal, whatever a store raises
                self._complain(error)
                with self._changed:  # what is not written is tried again with the next entry
                    self._pending = [*pending, *self._pending][-WAITING:]
                    self._thread = None
                    self._changed.notify_all()
                return

    def _complain(self, error: Exception) -> None:
        """Once in a warning."""
        level = logging.DEBUG if self._warned else logging.WARNING
        log.log(level, "the journal of %s cannot be written; saves go on without it: %s", self.root, error)
        self._warned = True

    def _write(self, entries: list[Entry]) -> None:
        for at in range(0, len(entries), journal.CHUNK):
            lines = [msgspec.json.encode(entry) + b"\n" for entry in entries[at : at + journal.CHUNK]]
            if self._file is None or len(self._lines) + len(lines) > journal.CHUNK:
                self._file, self._lines, self._torn = self._folder / _new_name(), [], False
            if not self._file.has_descriptors:
                self._file.write_small(b"".join([*self._lines, *lines]))
            else:
                self._append(self._file, b"".join(lines))
            first, self._lines = not self._lines, [*self._lines, *lines]
            if first:
                thin(self._folder)

    def _append(self, path: Place, data: bytes) -> None:
        """Not synced: what a power cut takes of a journal, the steps themselves still tell."""
        with naming(path, "write"):
            disk.make_folders(path.parent)
            fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                view = memoryview(b"\n" + data if self._torn else data)
                self._torn = True
                while view:
                    view = view[disk.append(fd, view, path) :]
                self._torn = False
            finally:
                os.close(fd)

    def _put(self, path: Place, data: bytes) -> None:
        """Replace a file in one step; on disk without waiting until it is durable."""
        if not path.has_descriptors:
            path.write_small(data)
            return
        half = path.with_name(f".{path.name}.tmp")
        with naming(path, "write"):
            disk.make_folders(path.parent)
            fd = disk.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                disk.write_all(fd, data, 0, half)
            finally:
                os.close(fd)
            disk.replace(half, path)


def _new_name(ms: int | None = None) -> str:
    return f"{int(time.time() * 1000) if ms is None else ms:013d}-{secrets.token_hex(4)}.jsonl"


def thin(folder: Place) -> None:
    """Join the older files of a journal that has too many, two to one, and leave out what is too much for one.

    A crash in its middle leaves entries twice, never lost; readers take each once. Raises StorageError.
    """
    names = sorted(name for name in folder.sizes_below() if journal.NAME.fullmatch(name))
    if len(names) <= journal.FILES:
        return
    older = names[: len(names) // 2]
    for one, other in zip(older[::2], older[1::2], strict=False):
        entries = journal.joined(entry for name in (one, other) for entry in journal.entries_in(folder / name))
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in thinned(entries, journal.CHUNK))
        (folder / _new_name(int(one[:13]))).write_small(lines)
        storage.delete(folder / one, folder / other)


def thinned(entries: Sequence[Entry], most: int) -> list[Entry]:
    """At most so many entries: failures are kept first, of the others some, evenly spread."""
    if len(entries) <= most:
        return [*entries]
    failed = [entry for entry in entries if entry.outcome == "failed"][-most // 2 :]
    others = [entry for entry in entries if entry.outcome != "failed"]
    room = min(most - len(failed), len(others))
    return journal.joined([*failed, *(others[n * len(others) // room] for n in range(room))])


_open: weakref.WeakSet[Journal] = weakref.WeakSet()


def _settle_all() -> None:
    """Write the last entries of managers that were not closed before the interpreter ends."""
    for one in list(_open):
        one.settle(LEAVE)


def _after_fork() -> None:
    """The parent process goes on with the journal: a forked child writes nothing and waits for nothing."""
    for one in list(_open):
        one._forked, one._changed = True, threading.Condition()
    _open.clear()


at_exit(_settle_all)
os.register_at_fork(after_in_child=_after_fork)
