"""The best step of a Trainer: how long it is kept, and how it is loaded into the model at the end of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.events import log
from holdfast.load import load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import ranks_of
from holdfast.run.keep import Keep
from holdfast.run.options import ResumeOptions, RunOptions
from holdfast.saving import Saving
from holdfast.storage.place import Place


@dataclass(frozen=True, kw_only=True)
class CallbackOptions(RunOptions, ResumeOptions):
    """What `HoldfastCallback` takes."""

    every: int | None = None
    """Save every so many steps of the optimizer. Without it, whenever Trainer would have saved by itself
    (``save_strategy``, ``save_steps``), in place of that."""

    also: Mapping[str, Any] | None = None
    """Objects and values of your own to save, by name."""


@dataclass(frozen=True)
class TotalLimit(Keep):
    """``save_total_limit`` as Trainer counts it: ``last`` steps at most, and the best is one of them."""

    def _ruled(self, steps: Mapping[int, float | None]) -> set[int]:
        newest = sorted(steps)
        best = super()._ruled(steps) - set(newest[-self.last :])
        return best | set(newest[-max(1, self.last - len(best)) :])


@dataclass(frozen=True)
class Retention:
    """What is kept. With ``only_best`` a step gets a metric only if it was the best of the run when it was saved.

    Then the step with the best metric is always the one that Trainer calls the best checkpoint: the first of several
    with equal metrics, and never a better one that was evaluated but not saved.
    """

    keep: Keep
    keep_fast: Keep
    only_best: bool


def retention(args: Any, options: RunOptions) -> Retention:
    """What to keep by the arguments of a Trainer. Raises ValueError if ``keep`` calls another step the best."""
    keep, keep_fast = options.keep, options.keep_fast
    mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
    limit = args.save_total_limit
    has_best = args.metric_for_best_model is not None and args.eval_strategy != "no" and args.save_strategy != "no"
    for rule in (keep, keep_fast):
        if args.load_best_model_at_end and rule.best and rule.mode not in (None, mode):
            raise ValueError(
                f"Keep(best={rule.best}, mode={rule.mode!r}) would delete the step that load_best_model_at_end is to "
                f"load: greater_is_better={args.greater_is_better} asks for mode={mode!r}"
            )
    # The default is known by its identity: ``save_total_limit`` counts only if the user gave no `Keep`.
    limited = keep is RunOptions.keep and limit is not None and limit > 0
    if limited:
        keep = TotalLimit(last=limit, best=1 if has_best else 0, mode=mode)
    if args.load_best_model_at_end:
        keep = replace(keep, best=max(1, keep.best), mode=mode)
        keep_fast = replace(keep_fast, best=max(1, keep_fast.best), mode=mode)
    return Retention(keep, keep_fast, args.load_best_model_at_end or (limited and has_best))


def load_best(model: Any, places: Sequence[Place], otherwise: Callable[[], None], options: CallbackOptions) -> None:
    """Load the best step into the live ``model``, sharded or not, from the first of ``places`` that holds it.

    Called by every rank. If none holds a checkpoint of holdfast, ``otherwise`` is called: Trainer loads one of its own,
    or warns that there is none.
    """

    def first(_: list[None]) -> int:
        return next((number for number, place in enumerate(places) if (place / FILE_NAME).is_file()), -1)

    with ranks_of(None).call("find the best step", deadline=options.deadline) as call:
        number = call.exchange("choose", lambda: None, first, int)
    if number < 0:
        otherwise()
        return
    load(
        places[number], {"model": model}, only="model", deadline=options.deadline, require=options.require,
        other_model=options.other_model,
    )  # fmt: skip


class BestSaves:
    """The saves of this training that were the best when they began. ``before``: what was the best one before it."""

    def __init__(self, before: str | None) -> None:
        self._before, self._saves = before, list[Saving]()

    def begun(self, saving: Saving) -> None:
        """A new best step is being saved."""
        self._saves = [*(one for one in self._saves if one.failed is None), saving]

    def newest(self) -> str | None:
        """The folder of the newest one that is committed: a save may fail, or be skipped. Waits for those under way."""
        lost = [str(one.path) for one in self._saves if not one.settled()]
        if lost:
            log.warning("best steps that were not saved: %s", ", ".join(lost))
        return next((str(one.path) for one in reversed(self._saves) if one.settled()), self._before)


@contextmanager
def nothing_deleted_by(args: Any) -> Iterator[None]:
    """With ``save_total_limit=1`` Trainer deletes every ``checkpoint-*`` of its output folder but the best one."""
    limit = args.save_total_limit
    if limit == 1:
        args.save_total_limit = None
    try:
        yield
    finally:
        args.save_total_limit = limit
