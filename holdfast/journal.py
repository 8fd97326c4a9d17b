"""The journal of a run, beside its steps: what became of each save, and where training is now.

The manager's first rank adds to a `Journal`; `holdfast watch` and the page of a run read. Never makes a save wait or
fail, and never believes what it reads back: a line that is torn, or is no entry, is passed over.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from holdfast.checkpoint import read_manifest
from holdfast.engine import disk, storage
from holdfast.engine.storage import JOURNAL
from holdfast.engine.stores.around import patiently
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.stores.urls import location
from holdfast.errors import HoldfastError
from holdfast.events import log
from holdfast.saving import Saving

CHUNK = 200
"""Entries of one file. In a store a file is rewritten with each entry until it is full."""

FILES = 250
"""Files of a journal; of more, older ones are joined, two to one. So it holds some 50,000 entries."""

LINE, FILE = 1 << 13, 1 << 21
"""Bytes of an entry, and of a file, that are read at the most."""

TOLD = 300
"""Letters of an error's text that are kept."""

ASK = 30.0
"""Seconds for which a store may keep the thread of a journal waiting."""

BEAT, BEAT_IN_STORE = 5.0, 60.0
"""Seconds between two notes of where training is, on disk and in a store, where each is a request."""

WAITING = 1000
"""Entries that are kept in memory while they cannot be written."""

NOW = "now.json"
_NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}\.jsonl")
_ASKERS = 8

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """What became of one save.

    ``began`` and ``committed`` are unix seconds, the latter None unless ``outcome`` is ``"saved"``; ``seconds`` from
    the call to the outcome, ``stall`` those that training waited. ``bytes`` of the checkpoint, ``written`` those that
    this save wrote and did not borrow, of all ranks; of a save that failed, those of the first rank. ``ranks``: how
    many saved. ``metric``: what `CheckpointManager.step` was given. ``phases``: seconds by name (see `Timing`).
    ``backlog``: steps of the fast tier that are still to go to the store, None without one. ``step_seconds``: the
    median of the steps before. ``start``: which start of the training process this was.
    """

    step: Count
    began: float
    committed: float | None
    seconds: float
    stall: float
    bytes: Count
    ranks: Count
    metric: float | None
    outcome: Literal["saved", "failed", "skipped"]
    error: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    backlog: Count | None = None
    written: Count | None = None
    step_seconds: float | None = None
    start: str = ""


@dataclass(frozen=True)
class Now:
    """Where training was ``at`` that unix time: ``step`` is done, and if ``saving``, that step is being saved since
    ``since``. The rest as of `Entry`; ``every`` is the rhythm of saves, ``mode`` says whether a good metric is small or
    large, ``ended`` is True once the manager is closed.
    """

    step: Count
    at: float
    every: Count
    ranks: Count
    saving: Count | None = None
    since: float | None = None
    step_seconds: float | None = None
    metric: float | None = None
    backlog: Count | None = None
    mode: Literal["min", "max"] = "min"
    start: str = ""
    ended: bool = False


class Log(NamedTuple):
    """What a journal tells: its entries, the oldest first, and where training is, if that is known."""

    entries: list[Entry]
    now: Now | None


# Reading


def read(root: str | os.PathLike[str] | Place) -> list[Entry]:
    """The journal of the run whose steps lie in ``root``, a path or a URL; the oldest entry first, empty if none is.

    Raises StorageError.
    """
    return Reader(root).read().entries


class Reader:
    """A journal that is read again and again: what has not changed is not read twice."""

    def __init__(self, root: str | os.PathLike[str] | Place) -> None:
        self._folder = patiently(location(root), ASK) / JOURNAL
        self._known: dict[str, tuple[int, list[Entry]]] = {}

    def read(self) -> Log:
        """All there is now. Raises StorageError."""
        sizes = storage.sizes_below(self._folder)
        names = sorted(name for name in sizes if _NAME.fullmatch(name))[-2 * FILES :]
        self._known = {name: known for name, known in self._known.items() if known[0] == sizes.get(name)}
        lacking = [name for name in names if name not in self._known]
        for name, data in zip(lacking, _get_all([self._folder / name for name in lacking]), strict=True):
            self._known[name] = (sizes[name], _entries(data))
        now = _decoded(_get(self._folder / NOW), Now) if NOW in sizes else None
        if now is not None:
            now = replace(now, start=_told(now.start))
        return Log(joined(entry for name in names for entry in self._known[name][1]), now)


def joined(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order in which their saves began, each once."""
    found = {(entry.began, entry.step): entry for entry in entries}
    return [found[key] for key in sorted(found)]


def _get_all(files: Sequence[Location]) -> list[bytes]:
    """In a store, several at once."""
    if len(files) < 2 or isinstance(files[0], Path):
        return [_get(file) for file in files]
    with ThreadPoolExecutor(min(_ASKERS, len(files)), thread_name_prefix="holdfast-journal") as pool:
        return list(pool.map(_get, files))


def _get(path: Location) -> bytes:
    try:
        return storage.read_start(path, FILE)[0]
    except FileNotFoundError:  # joined with another one meanwhile
        return b""


def _entries(data: bytes) -> list[Entry]:
    found = (_decoded(line, Entry) for line in data.split(b"\n") if 0 < len(line) <= LINE)
    return [
        replace(
            entry, error=_told(entry.error), start=_told(entry.start),
            phases={_told(name): seconds for name, seconds in [*entry.phases.items()][:32]},
        )
        for entry in found
        if entry is not None
    ]  # fmt: skip


def _decoded(data: bytes, kind: type[Result]) -> Result | None:
    """None for what is torn, or was put there by somebody else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _told(text: str) -> str:
    """A short text with nothing in it that moves a terminal's cursor, or turns the direction of what follows."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:TOLD])


# Writing


def as_number(metric: object) -> float | None:
    """A metric as a number; None for what is none, which is no reason to stop training."""
    try:
        return float(metric)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def entry_of(
    saving: Saving, *, metric: float | None, ranks: int, step_seconds: float | None, backlog: int | None
) -> Entry:
    """What there is to tell of a save whose outcome is known."""
    timing, failed = saving.timing, saving.failed
    nbytes = written = timing.bytes
    if failed is None:
        with suppress(HoldfastError):  # another save may have swept it already
            files = read_manifest(saving.path).data_files
            nbytes, written = sum(f.bytes for f in files), sum(f.bytes for f in files if f.save is None)
    return Entry(
        step=saving.step or 0, began=saving.began, committed=saving.began + timing.total if failed is None else None,
        seconds=timing.total, stall=timing.stall, bytes=nbytes, written=written, ranks=ranks,
        metric=as_number(metric), backlog=backlog, step_seconds=step_seconds,
        outcome="skipped" if saving.skipped else "saved" if failed is None else "failed",
        error="" if failed is None else str(failed),
        phases={"staging": timing.staging, "writing": timing.writing, "commit": timing.commit},
    )  # fmt: skip


class Journal:
    """What the first rank writes. Each start writes files of its own, so no two processes ever change the same one."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.start = secrets.token_hex(4)
        self._folder = patiently(root, ASK) / JOURNAL
        self._beat = BEAT_IN_STORE if isinstance(root, Place) else BEAT
        self._changed = threading.Condition()
        self._pending: list[Entry] = []
        self._now: Now | None = None
        self._told = -math.inf
        self._thread: threading.Thread | None = None
        self._warned = False
        # Of the thread alone.
        self._file: Location | None = None
        self._lines: list[bytes] = []
        self._torn = False

    def add(self, entry: Entry) -> None:
        """Write an entry, soon. Waits for nothing."""
        told = replace(entry, error=_told(entry.error), start=self.start)
        with self._changed:
            self._pending = [*self._pending, told][-WAITING:]
            self._begin()

    def tell(self, where: Callable[[], Now], *, news: bool = False) -> None:
        """Write where training is, soon: if it is time again, or if there is ``news``, which on disk costs little.

        Of several such notes the last one counts. Waits for nothing.
        """
        now = time.monotonic()
        if now - self._told >= self._beat or (news and isinstance(self._folder, Path)):
            self._told = now
            with self._changed:
                self._now = replace(where(), start=self.start)
                self._begin()

    def close(self, where: Now, timeout: float) -> None:
        """Write where training has ended; wait until all is written, or cannot be, or ``timeout`` seconds are over."""
        with self._changed:
            self._now = replace(where, start=self.start, ended=True)
            self._begin()
        self.settle(timeout)

    def settle(self, timeout: float) -> None:
        """Wait until all is written so far, or cannot be, or ``timeout`` seconds are over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout):
                log.warning("%s is behind: the last entries may be lost", self._folder)

    def _begin(self) -> None:
        if self._thread is None:
            # A daemon that ends when there is nothing to write: it keeps no interpreter, and costs nothing between.
            self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                pending, now = self._pending, self._now
                if not pending and now is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._pending, self._now = [], None
            try:
                if pending:
                    self._write(pending)
                if now is not None:
                    self._put(self._folder / NOW, msgspec.json.encode(now))
            except Exception as error:  # noqa: BLE001 - training goes on without a journal, whatever a store raises
                told, level = str(error), logging.DEBUG if self._warned else logging.WARNING
                log.log(level, "the journal of %s cannot be written; saves go on without it: %s", self.root, told)
                self._warned = True
                with self._changed:  # what is not written is tried again with the next entry
                    self._pending = [*pending, *self._pending][-WAITING:]
                    self._thread = None
                    self._changed.notify_all()
                return

    def _write(self, entries: list[Entry]) -> None:
        for at in range(0, len(entries), CHUNK):
            lines = [msgspec.json.encode(entry) + b"\n" for entry in entries[at : at + CHUNK]]
            if self._file is None or len(self._lines) + len(lines) > CHUNK:
                self._file, self._lines, self._torn = self._folder / _new_name(), [], False
            if isinstance(self._file, Place):
                storage.write_small(self._file, b"".join([*self._lines, *lines]))
            else:
                self._append(self._file, b"".join(lines))
            first, self._lines = not self._lines, [*self._lines, *lines]
            if first:
                thin(self._folder)

    def _append(self, path: Path, data: bytes) -> None:
        """Not synced: what a power cut takes of a journal, the steps themselves still tell."""
        with storage.naming(path, "write"):
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

    def _put(self, path: Location, data: bytes) -> None:
        """Replace a file in one step; on disk without waiting until it is durable."""
        if isinstance(path, Place):
            storage.write_small(path, data)
            return
        half = path.with_name(f".{path.name}.tmp")
        with storage.naming(path, "write"):
            disk.make_folders(path.parent)
            fd = disk.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                disk.write_all(fd, data, 0, half)
            finally:
                os.close(fd)
            disk.replace(half, path)


def _new_name(ms: int | None = None) -> str:
    return f"{int(time.time() * 1000) if ms is None else ms:013d}-{secrets.token_hex(4)}.jsonl"


def thin(folder: Location) -> None:
    """Join the older files of a journal that has too many, two to one, and leave out what is too much for one.

    A crash in its middle leaves entries twice, never lost; readers take each once. Raises StorageError.
    """
    names = sorted(name for name in storage.sizes_below(folder) if _NAME.fullmatch(name))
    if len(names) <= FILES:
        return
    older = names[: len(names) // 2]
    for one, other in zip(older[::2], older[1::2], strict=False):
        entries = joined(entry for name in (one, other) for entry in _entries(_get(folder / name)))
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in thinned(entries, CHUNK))
        storage.write_small(folder / _new_name(int(one[:13])), lines)
        storage.delete(folder / one, folder / other)


def thinned(entries: Sequence[Entry], most: int) -> list[Entry]:
    """At most so many entries: failures are kept first, of the others some, evenly spread."""
    if len(entries) <= most:
        return [*entries]
    failed = [entry for entry in entries if entry.outcome == "failed"][-most // 2 :]
    others = [entry for entry in entries if entry.outcome != "failed"]
    room = min(most - len(failed), len(others))
    return joined([*failed, *(others[n * len(others) // room] for n in range(room))])
