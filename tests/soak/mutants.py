"""Ways to break the library on purpose, one for each thing that the soak has to find.

`--mutant NAME` calls one before any rank is forked. Nothing here is ever called otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from holdfast import checkpoint
from holdfast.commit import folder, settle
from holdfast.errors import HoldfastError
from holdfast.read import examine
from holdfast.run import keep, retention, steps
from holdfast.write import datafiles, filling, write


def _replace(owner: Any, name: str, other: Any) -> None:
    """For good. Raises AttributeError if there is none of that name any more."""
    patch.object(owner, name, other).start()


def commit_before_written() -> None:
    """Ranks report their files while these are still being written."""
    _replace(write.Writing, "wait_written", lambda self: None)
    _replace(write.Writing, "finish", lambda self: None)


def sweep_newest() -> None:
    """The rules keep all but the newest."""
    verdict = keep.Keep.verdict

    def worst(self: Any, there: Any) -> Any:
        kept = verdict(self, there)
        return kept._replace(steps=kept.steps - {max(there, default=0)})

    _replace(keep.Keep, "verdict", worst)
    _replace(keep.Kept, "and_whole", lambda self, more: self)


def restore_oldest() -> None:
    """The oldest whole step counts as the newest."""
    _replace(steps.Steps, "newest", lambda self, refused=(), **_: next(iter(self.committed().values()), None))


def wrong_byte() -> None:
    """One bit of what is saved is another one, before it is summed."""
    copied = filling.copy_bytes

    def copy(tensor: Any, start: int, nbytes: int, address: int) -> None:
        copied(tensor, start, nbytes, address)
        if nbytes > 2000:
            filling.host_view(address, nbytes)[1999] ^= 4

    _replace(filling, "copy_bytes", copy)


def leave_litter() -> None:
    """What dead saves left is never swept."""
    _replace(retention, "sweep_dead", lambda path, cited=None: True)
    _replace(retention, "sweep_beside", lambda path, record, cited=None: True)
    _replace(folder, "is_orphan", lambda path: False)


def keep_descriptors() -> None:
    """Files stay open after their save."""
    _replace(datafiles.OpenFiles, "close", lambda self: None)


def silent_failure() -> None:
    """A save that fails says that it is committed."""
    write_and_commit = settle._write_and_commit

    def quiet(*args: Any) -> None:
        try:
            write_and_commit(*args)
        except HoldfastError:
            return

    _replace(settle, "_write_and_commit", quiet)


def trust_sums() -> None:
    """Altered bytes are not looked for."""
    _replace(examine, "wrong_in", lambda source, job: [])


def swapped_ranks() -> None:
    """Two ranks of a save take each other's values."""
    _replace(checkpoint.Checkpoint, "per_rank", _swapped(checkpoint.Checkpoint.per_rank))


def _swapped(done: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, path, rank: done(self, path, (rank + 1) % self.world_size)


MUTANTS: dict[str, Callable[[], None]] = {
    "commit-before-written": commit_before_written,
    "sweep-newest": sweep_newest,
    "restore-oldest": restore_oldest,
    "wrong-byte": wrong_byte,
    "leave-litter": leave_litter,
    "keep-descriptors": keep_descriptors,
    "silent-failure": silent_failure,
    "trust-sums": trust_sums,
    "swapped-ranks": swapped_ranks,
}
