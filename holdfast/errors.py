"""The tree of errors: seven reactions a caller can have, each also the built-in that a reader expects.

Every room raises these, and the package exports them. Never does I/O, and knows of ranks only their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


class HoldfastError(Exception):
    """Root of everything holdfast raises.

    Attributes (each ``None`` where it does not apply): ``rank``, ``host``, ``phase`` and ``file`` say where
    the first failure happened; ``cause`` is that failure's own text. They are equal on every rank. ``settled`` is
    False if it is not known whether a save was committed, because the first rank, the store or the disk died at the
    end: what is there is whole. ``absent`` are the ranks that did not come, of a failure that is a RankLost; ``rank``
    is the first of them.
    """

    rank: int | None = None
    host: str | None = None
    phase: str | None = None
    file: str | None = None
    cause: str | None = None
    settled: bool = True
    absent: tuple[int, ...] = ()


class SaveFailed(HoldfastError, RuntimeError):
    """A save did not commit; the checkpoint before it is untouched and training may go on."""


class NotACheckpoint(HoldfastError, FileNotFoundError):
    """The path holds no committed checkpoint: nothing, something else, or an unfinished save."""


class Mismatch(HoldfastError, ValueError):
    """Checkpoint and target (or two ranks of one save) do not fit; the text lists every name at once."""


class Unsupported(HoldfastError, TypeError):
    """A leaf, dtype or layout that cannot be saved, named by its path."""


class Damaged(HoldfastError, ValueError):
    """Bytes on storage are not the bytes that were written: truncated, altered or of another version."""


class Untrusted(HoldfastError, PermissionError):
    """A checkpoint is not signed by a key that its reader requires, or its signature is not of what is there."""


class StorageError(HoldfastError, OSError):
    """The disk or store refused: full, read-only, no permission, input/output error."""


class RankLost(HoldfastError, TimeoutError):
    """A rank did not come before the deadline; the text names it."""


@dataclass(frozen=True)
class Meaning:
    """What an error of one class says about what happened, and what to do: a row of docs/troubleshooting.md."""

    error: type[HoldfastError]
    happened: str
    do: str


MEANINGS = (
    Meaning(
        SaveFailed,
        "A save did not commit. Older checkpoints are as they were.",
        "Read the cause in the message. Training may continue.",
    ),
    Meaning(
        NotACheckpoint,
        "The path holds no committed checkpoint: nothing, something else, or an unfinished save.",
        "`holdfast ls` the folder above; `holdfast doctor PATH` says what is there.",
    ),
    Meaning(
        Mismatch,
        "Checkpoint and state, or the ranks of a save, do not match. The message lists every name.",
        '`holdfast show PATH` lists the checkpoint\'s names. Use `only=`, `rename=`, `cast=` or `missing="keep"`.',
    ),
    Meaning(
        Unsupported,
        "A value, dtype, layout or format that cannot be saved or read.",
        "Remove the value that is named, save its settings as plain values, or install the extra that is named.",
    ),
    Meaning(
        Damaged,
        "The bytes are not those that were written, or a file is missing.",
        "Take an older step (`manager.restore` does), or repair it: `holdfast repair PATH --from COPY`.",
    ),
    Meaning(
        Untrusted,
        "The checkpoint is not signed by a required key, or its signature is of something else.",
        "Check the key that you passed as `require=`, and where the checkpoint comes from.",
    ),
    Meaning(
        StorageError,
        "The disk or the store refused: full, read-only, no permission, no answer, an I/O error.",
        "Read `errno` and the message; `holdfast doctor PATH` tests the disk or the store.",
    ),
    Meaning(
        RankLost,
        "A rank made no progress for as long as `deadline=` says. The message names it.",
        "Look at that rank's log, and at its stack with `py-spy dump`.",
    ),
)


_KINDS = {HoldfastError.__name__: HoldfastError} | {kind.__name__: kind for kind in HoldfastError.__subclasses__()}


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, in a form that travels to every other rank.

    ``kind`` is the name of a class of this module; ``message`` stands by itself.
    """

    rank: int
    host: str
    phase: str
    kind: str
    message: str
    file: str | None = None
    errno: int | None = None


def failure_of(error: BaseException, *, rank: int, host: str, phase: str) -> Failure:
    """Describe ``error``, raised on ``rank`` during ``phase``; an ``OSError`` becomes a StorageError."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS and k is not SaveFailed), None)
    file = getattr(error, "file", None)
    number = error.errno if isinstance(error, OSError) else None
    if kind is None and isinstance(error, OSError):
        kind = "StorageError"
        file = os.fspath(error.filename) if isinstance(error.filename, (str, os.PathLike)) else None
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    return Failure(rank, host, phase, kind or "HoldfastError", text, file, number)


@lru_cache(maxsize=16)
def _save_failed_as(kind: str) -> type[HoldfastError]:
    # A failed save is a SaveFailed whatever the cause, and the cause's own reaction too: `except OSError` catches
    # a full disk, `except TypeError` a function in the state.
    cause = _KINDS.get(kind, HoldfastError)
    if cause in (SaveFailed, HoldfastError):
        return SaveFailed
    return type("SaveFailed", (SaveFailed, cause), {"__module__": __name__, "__doc__": SaveFailed.__doc__})


def error_from(
    failure: Failure, *, saving: bool, settled: bool = True, absent: Sequence[int] = (), alone: bool = False
) -> HoldfastError:
    """The exception that every rank raises for ``failure``: the same class, text and attributes everywhere.

    ``alone``: there is one rank, which the text need not name.
    """
    where = [] if alone else [f"rank {failure.rank} on {failure.host}"]
    if saving or not alone:
        where.append(f"phase {failure.phase}")
    if failure.file and failure.file not in failure.message:
        where.append(f"file {failure.file}")
    place = f"({', '.join(where)})" if where else ""
    if saving:
        outcome = "Nothing was committed" if settled else "It may be committed all the same: holdfast.open tells"
        text = f"save failed {place}: {failure.message}. {outcome}; earlier checkpoints are untouched."
        error = _save_failed_as(failure.kind)(text)
    else:
        gap = "\n" if "\n" in failure.message else " "  # not behind the last name of a list
        error = _KINDS.get(failure.kind, HoldfastError)(f"{failure.message}{gap}{place}".rstrip())
    error.rank, error.host, error.phase = failure.rank, failure.host, failure.phase
    error.file, error.cause, error.settled = failure.file, failure.message, settled
    error.absent = tuple(absent)
    if failure.errno is not None and isinstance(error, OSError):
        error.errno = failure.errno
    return error


def cause_to_show(errors: Sequence[BaseException]) -> BaseException | None:
    """Return this rank's own error, which its traceback shows above the one that all ranks raise.

    A refusal without a cause gives None: both errors have the same text.
    """
    own = next(iter(errors), None)
    is_refusal = isinstance(own, HoldfastError) and type(own) is not HoldfastError and own.__cause__ is None
    return None if is_refusal else own
