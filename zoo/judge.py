"""The judge: runs a case to a checkpoint and on from it, beside torch's own ``load_state_dict`` and beside no stop.

`zoo.forks` calls one of the stages in a process of its own, on one rank or on each of several; what they find goes
back through ``tell``. Nothing here knows which case it is.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from zoo import trees
from zoo.case import Case, Lay, built, plain, steps
from zoo.loading import judge_load, refusal
from zoo.verdict import (
    AGAIN,
    BACKGROUND,
    DEADLINE,
    GATHERED,
    HERE,
    LOCAL,
    MORE,
    RANKS,
    SHARDED,
    SPREAD,
    WARM,
    Facts,
    Tell,
    Unable,
    asking_torch,
    attempt,
    listed,
    named,
    slight,
    steps_of,
)  # fmt: skip


def in_one_process(case: Case, folder: Path, tell: Tell) -> None:
    """All columns of one process."""
    ended: dict[str, str] = {}

    def noting(column: str, verdict: str, text: str) -> None:
        ended[column] = verdict
        tell(column, verdict, text)

    tell("", "", "training")
    try:
        uninterrupted = _trained(case, plain, WARM + MORE)
    except Unable as error:
        for column in LOCAL:
            tell(column, "torch", str(error))
        return
    first: Any = None
    for column in LOCAL:
        with _judged(column, noting):
            path = folder / column.replace(" ", "-")
            if column == AGAIN:
                path = folder / HERE.replace(" ", "-")
                if not path.exists():
                    tell(column, ended[HERE], "as above")
                    continue
                facts = Facts(first, uninterrupted[WARM:])
                judge_load(case, plain, path, facts, column, noting, trained=WARM)
                continue
            saved, note = _save_within(case, plain, path, uninterrupted, column, noting)
            if saved is None:
                continue
            first = saved if column == HERE else first
            judge_load(case, plain, path, Facts(saved, uninterrupted[WARM:]), column, noting, note=note)


def on_ranks(case: Case, folder: Path, tell: Tell) -> None:
    """The column of 2 ranks that save and load; leaves the checkpoint and the whole state to the others."""
    tell("", "", "training")
    try:
        uninterrupted = _trained(case, sharded, WARM + MORE)
    except Unable as error:
        for column in SHARDED:
            tell(column, "torch", str(error))
        return
    with _judged(RANKS, tell):
        path = folder / "ranks"
        saved, note = _save_within(case, sharded, path, uninterrupted, RANKS, tell)
        if saved is None:
            for column in SHARDED[1:]:
                tell(column, "refused", "as above")
            return
        tell("", "", "gathering")
        shapes = {tuple(p.shape) for p in _parameters(saved)}
        try:
            whole = trees.whole(saved, shapes)
            if dist.get_rank() == 0:
                torch.save(whole, folder / "whole.pt")
        except Exception as error:
            for column in SHARDED[1:]:
                tell(column, "torch", f"torch gathers no whole of it: {named(error)}")
        judge_load(case, sharded, path, Facts(saved, uninterrupted[WARM:]), RANKS, tell, note=note)


def gathered(case: Case, folder: Path, tell: Tell) -> None:
    """The column of one process that loads what 2 ranks saved."""
    with _judged(GATHERED, tell):
        facts = Facts(torch.load(folder / "whole.pt", weights_only=False), None)
        judge_load(case, plain, folder / "ranks", facts, GATHERED, tell)


def spread(case: Case, folder: Path, tell: Tell) -> None:
    """The column of 4 ranks that load what 2 ranks saved: their state, gathered, is what was saved."""
    with _judged(SPREAD, tell):
        whole = torch.load(folder / "whole.pt", weights_only=False)
        tell("", "", "building")
        run = built(case, sharded, 2)
        tell("", "", "holdfast.load")
        loaded = []
        error = attempt(lambda: loaded.append(holdfast.load(folder / "ranks", run.state, deadline=DEADLINE)))
        if error is not None:
            tell(SPREAD, *refusal(error, run, None))
            return
        tell("", "", "holdfast: comparing")
        now = trees.own_state(run.state)
        found = list(trees.differences(whole, trees.whole(now, {tuple(p.shape) for p in _parameters(now)})))
        # What an object's own method took otherwise is not said to be restored, as after torch's own load.
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, loaded[0].handed)
        handed = {name.rpartition("/")[2] for names in everyone for name in names}
        found = [d for d in found if d.path.rpartition("/")[2] not in handed]
        unclear = list(trees.differing(whole))
        if unclear:
            tell(SPREAD, "wrong", f"differs between the ranks that saved, and was loaded all the same: {unclear[:3]}")
        elif grave := [d for d in found if not d.slight]:
            tell(SPREAD, "wrong", "after the load " + listed(grave))
        else:
            steps_of(run, WARM, 2)
            tell(SPREAD, "right", slight(found))


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 over all ranks: each child that has parameters, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _trained(case: Case, lay: Lay, count: int) -> list[Any]:
    with asking_torch("does not train"):
        return steps(built(case, lay, 1), 0, count)


def _save_within(
    case: Case, lay: Lay, path: Path, uninterrupted: list[Any], column: str, tell: Tell
) -> tuple[Any, str]:
    """Save a run in its middle; its state then, or None if that ended the column. Training has to go on the same."""
    tell("", "", "training")
    run, note = built(case, lay, 1), ""
    with holdfast.Saver(deadline=DEADLINE) if column == BACKGROUND else contextlib.nullcontext() as saver:
        before = steps_of(run, 0, WARM - 1)
        if saver is not None:
            tell("", "", "Saver.save")
            attempt(lambda: saver.save(run.state, f"{path}-first").wait())
        before += steps_of(run, WARM - 1, 1)
        if list(trees.differences(before, uninterrupted[:WARM])):
            note = "the run itself differs from time to time"
        tell("", "", "state_dict")
        with asking_torch("has no state_dict()"):
            saved = trees.own_state(run.state)
        tell("", "", "holdfast.save")
        save: Callable[[], Any]
        if saver is None:
            save = lambda: holdfast.save(run.state, path, deadline=DEADLINE)  # noqa: E731
        else:
            saving: list[Any] = []
            save = lambda: saving.append(saver.save(run.state, path))  # noqa: E731
        error = attempt(save)
        tell("", "", "holdfast: training on")
        after = steps_of(run, WARM, MORE)
        if saver is not None and error is None:
            error = attempt(saving[0].wait)
            saving[0].hear()
    if list(trees.differences(after, uninterrupted[WARM:])) and not note:
        if _state_dict_disturbs(case, lay, uninterrupted):
            note = "state_dict() itself changes the run"
        else:
            tell(column, "wrong", "the run that was saved goes on otherwise")
            return None, ""
    if error is not None:
        tell(column, *refusal(error, run, None))
        return None, ""
    return saved, note


def _state_dict_disturbs(case: Case, lay: Lay, uninterrupted: list[Any]) -> bool:
    run = built(case, lay, 1)
    steps(run, 0, WARM)
    trees.own_state(run.state)
    return bool(list(trees.differences(steps(run, WARM, MORE), uninterrupted[WARM:])))


def _parameters(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _parameters(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _parameters(value)


@contextlib.contextmanager
def _judged(column: str, tell: Tell) -> Iterator[None]:
    try:
        yield
    except Unable as error:
        tell(column, "torch", str(error))
    except Exception as error:
        traceback.print_exc()
        lost = "gloo" in str(error)  # another rank has failed, and says why
        tell(column, "torch" if lost else "wrong", f"the judge itself failed: {named(error)}")
