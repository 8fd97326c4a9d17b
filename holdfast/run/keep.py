"""Which steps to keep, and which to upload next: rules that the manager and the uploader ask after each commit.

Pure: sees step numbers and metrics, never a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.ondisk.arguments import Takes, is_whole, or_none
from holdfast.storage.uploads import Upload

Mode = Literal["min", "max"]
"""Whether the best metric is the smallest or the largest."""

_NUMBER = Takes("a whole number", is_whole)


class Kept(NamedTuple):
    """What becomes of the committed steps: those to keep, those of them to keep ``whole``, what the others lose."""

    steps: frozenset[int]
    whole: frozenset[int]
    loses: str | tuple[str, ...] = ()

    def and_whole(self, more: Iterable[int]) -> Kept:
        """The same, and ``more`` steps that stay as they are."""
        more = frozenset(more)
        return self._replace(steps=self.steps | more, whole=self.whole | more)


@dataclass(frozen=True)
class Keep:
    """Which committed steps to keep. A step is kept if any rule keeps it.

    Optimizers take most of a checkpoint, and you need them only to go on training. The last three rules keep steps
    without one; no byte of what stays is written again (see `holdfast.tools.drop`).

    Args:
        last: The newest so many, at least 1.
        every: Every step that is a multiple of it, for good.
        best: So many with the best ``metric`` given to `CheckpointManager.step`.
        mode: ``"min"`` if less is better, ``"max"`` if more is; by default as the run's steps have recorded it, else
            ``"min"``.
        optimizer_last: Of the steps that these rules keep, only the newest so many keep their optimizer.
        model_every: Every step that is a multiple of it is kept for good, without its optimizer once no other rule
            keeps it.
        optimizer: Which sections (first keys of the state) are dropped as the optimizer: a name, a pattern, or several.

    Raises:
        ValueError: A number is too small, or ``mode`` is neither.

    Example:
        >>> holdfast.Keep(last=2, every=10_000, best=1, mode="max").mode
        'max'
    """

    last: int = 2
    every: int | None = None
    best: int = 0
    mode: Mode | None = None
    optimizer_last: int | None = None
    model_every: int | None = None
    optimizer: str | tuple[str, ...] = "optim*"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best", "optimizer_last", "model_every"):
            (_NUMBER if name in ("last", "best") else or_none(_NUMBER)).check(f"Keep.{name}", getattr(self, name))
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): at least the newest checkpoint is always kept")
        for name in ("every", "optimizer_last", "model_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Keep({name}={value}) must be at least 1, or None")
        if self.best < 0 or self.mode not in (None, "min", "max"):
            raise ValueError(f"Keep(best={self.best}, mode={self.mode!r}): best is 0 or more, mode is 'min' or 'max'")

    def kept(self, steps: Mapping[int, float | None]) -> set[int]:
        """Return the steps to keep.

        Args:
            steps: The committed steps and their metrics, None for a step without one.
        """
        models = {s for s in steps if self.model_every is not None and s % self.model_every == 0}
        return self._ruled(steps) | models

    def whole(self, steps: Mapping[int, float | None]) -> set[int]:
        """Return those of the steps to keep that keep their optimizer too.

        Args:
            steps: As for `kept`.
        """
        ruled = self._ruled(steps)
        return ruled if self.optimizer_last is None else set(sorted(ruled)[-self.optimizer_last :])

    def verdict(self, steps: Mapping[int, float | None]) -> Kept:
        """Return both, and what the steps that are not whole lose.

        Args:
            steps: As for `kept`.
        """
        return Kept(frozenset(self.kept(steps)), frozenset(self.whole(steps)), self.optimizer)

    def _ruled(self, steps: Mapping[int, float | None]) -> set[int]:
        newest = sorted(steps)
        kept = set(newest[-self.last :])
        if self.every is not None:
            kept |= {s for s in newest if s % self.every == 0}
        if self.best:
            rated = [(-m if self.mode == "max" else m, -s) for s, m in steps.items() if m is not None and m == m]
            kept |= {-s for _, s in sorted(rated)[: self.best]}
        return kept


def best_of(rated: Mapping[int, float | None], mode: Mode) -> int | None:
    """The step with the best metric, the newest of several; None if none has one. NaN is no metric."""
    metrics = [(m if mode == "min" else -m, -step) for step, m in rated.items() if m is not None and m == m]
    return -min(metrics)[1] if metrics else None


def is_due(upload: Upload, step: int, stored: Collection[int], keep: Keep) -> bool:
    """Whether ``step`` has to go to the store, which holds ``stored`` and keeps what ``keep`` says.

    What the store would not keep does not have to.
    """
    if upload.every is None or step % upload.every:
        return False
    return keep.best > 0 or step in keep.kept(dict.fromkeys({*stored, step}))


def next_upload(
    upload: Upload, lacking: Collection[int], stored: Collection[int], keep: Keep, *, was_due: bool
) -> int | None:  # fmt: skip
    """Of steps that the store is ``lacking`` the one to upload now; ``was_due``: the last one was a due one."""
    due = min((step for step in lacking if is_due(upload, step, stored, keep)), default=None)
    newest = max(lacking, default=None) if upload.newest else None
    if newest is not None and newest < max(stored, default=newest):
        newest = None
    return newest if newest is not None and (due is None or was_due) else due
