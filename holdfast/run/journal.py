"""The journal of a run, beside its steps: what became of each save, and where training is now.

The manager's first rank writes it (`journaling`); `holdfast watch` and the page of a run read it here. Never believes
what it reads: a line that is torn, or is no entry, is passed over, and of a file no more is read than it may have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from holdfast.storage.place import Place
from holdfast.storage.storage import JOURNAL
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

CHUNK = 200
"""Entries of one file. In a store a file is rewritten with each entry until it is full."""

FILES = 250
"""Files of a journal; of more, older ones are joined, two to one. So it holds some 50,000 entries."""

MOST = 2 * CHUNK
"""Lines of a file that are read at the most: those of which a disk took a part alone are there twice."""

LINE, FILE = 1 << 13, 1 << 21
"""Bytes of an entry, and of a file, that are read at the most."""

ERROR_LETTERS = 300
"""Letters of an error's text that are kept."""

ASK = 30.0
"""Seconds for which a store may keep the thread of a journal waiting."""

BEAT, BEAT_IN_STORE = 5.0, 60.0
"""Seconds between two notes of where training is, on disk and in a store, where each is a request."""

NOW = "now.json"
NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}\.jsonl")
_ASKERS = 8

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Unix seconds, of which a date can be made."""

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
    began: Moment
    committed: Moment | None
    seconds: Seconds
    stall: Seconds
    bytes: Count
    ranks: Count
    metric: float | None
    outcome: Literal["saved", "failed", "skipped"]
    error: str = ""
    phases: dict[str, Seconds] = field(default_factory=dict)
    backlog: Count | None = None
    written: Count | None = None
    step_seconds: Seconds | None = None
    start: str = ""


@dataclass(frozen=True)
class Now:
    """Where training was ``at`` that unix time: ``step`` is done, and if ``saving``, that step is being saved since
    ``since``. The rest as of `Entry`; ``every`` is the rhythm of saves, ``mode`` says whether a good metric is small or
    large, ``ended`` is True once the manager is closed.
    """

    step: Count
    at: Moment
    every: Count
    ranks: Count
    saving: Count | None = None
    since: Moment | None = None
    step_seconds: Seconds | None = None
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
        self._folder = with_deadline(location(root), ASK) / JOURNAL
        self._known: dict[str, tuple[int, list[Entry]]] = {}

    def read(self) -> Log:
        """All there is now. Raises StorageError."""
        sizes = self._folder.sizes_below()
        names = sorted(name for name in sizes if NAME.fullmatch(name))[-2 * FILES :]
        self._known = {name: known for name, known in self._known.items() if known[0] == sizes.get(name)}
        lacking = [name for name in names if name not in self._known]
        for name, entries in zip(lacking, _from_all([self._folder / name for name in lacking]), strict=True):
            self._known[name] = (sizes[name], entries)
        now = _decoded(_get(self._folder / NOW), Now) if NOW in sizes else None
        if now is not None:
            now = replace(now, start=printable(now.start))
        return Log(joined(entry for name in names for entry in self._known[name][1]), now)


def joined(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order in which their saves began, each once."""
    by_time = {(entry.began, entry.step): entry for entry in entries}
    return [by_time[key] for key in sorted(by_time)]


def _from_all(files: Sequence[Place]) -> list[list[Entry]]:
    """The entries of each file; in a store, several are asked for at once."""
    if len(files) < 2 or not files[0].is_remote:
        return [entries_in(file) for file in files]
    with ThreadPoolExecutor(min(_ASKERS, len(files)), thread_name_prefix="holdfast-journal") as pool:
        return list(pool.map(entries_in, files))


def entries_in(file: Place) -> list[Entry]:
    """The entries of one file of a journal, in its order; none if it is gone. Raises StorageError."""
    return _entries(_get(file))


def _get(path: Place) -> bytes:
    try:
        return path.read_start(FILE)[0]
    except FileNotFoundError:  # joined with another one meanwhile
        return b""


def _entries(data: bytes) -> list[Entry]:
    entries = (_decoded(line, Entry) for line in data.rsplit(b"\n", MOST)[-MOST:] if 0 < len(line) <= LINE)
    return [
        replace(
            entry, error=printable(entry.error), start=printable(entry.start),
            phases={printable(name): seconds for name, seconds in [*entry.phases.items()][:32]},
        )
        for entry in entries
        if entry is not None
    ]  # fmt: skip


def _decoded(data: bytes, kind: type[Result]) -> Result | None:
    """None for what is torn, or is not of ours."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def printable(text: str) -> str:
    """A short text with nothing in it that moves a terminal's cursor, or turns the direction of what follows."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:ERROR_LETTERS])
