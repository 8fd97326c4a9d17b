"""Exit codes: one for each reaction that a caller can have.

Every command ends with one of these. They are documented in docs/cli.md, and never change their meaning.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.errors import (
    Damaged,
    HoldfastError,
    Mismatch,
    NotACheckpoint,
    RankLost,
    SaveFailed,
    StorageError,
    Unsupported,
)


class Code(IntEnum):
    """What the command ends with."""

    FINE = 0
    DAMAGED = 1
    DIFFERENT = 1  # of `holdfast diff`, as `diff` has it; that something is damaged is said on standard error
    USAGE = 2
    NOT_A_CHECKPOINT = 3
    STORAGE = 4
    MISMATCH = 5
    RANK_LOST = 6
    FAILED = 7
    INTERRUPTED = 130
    CLOSED = 141


_BY_KIND: tuple[tuple[type[BaseException], Code], ...] = (
    (Damaged, Code.DAMAGED),
    (NotACheckpoint, Code.NOT_A_CHECKPOINT),
    (Mismatch, Code.MISMATCH),
    (Unsupported, Code.MISMATCH),
    (RankLost, Code.RANK_LOST),
    (StorageError, Code.STORAGE),
    (SaveFailed, Code.FAILED),
    (HoldfastError, Code.FAILED),
    (OSError, Code.STORAGE),
    (ValueError, Code.USAGE),
    (KeyboardInterrupt, Code.INTERRUPTED),
)


def code_of(error: BaseException) -> Code | None:
    """The code for an error that a user can cause; None for any other, which is a fault of ours."""
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), None)
