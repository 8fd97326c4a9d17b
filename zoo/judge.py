"""The judge: runs a case to a checkpoint and on from it, beside torch's own ``load_state_dict`` and beside no stop at all.

`zoo.forks` calls one of the stages in a process of its own, on one rank or on each of several; what they find goes
back through ``Told``. Nothing here knows which case it is.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

import holdfast
from zoo import trees
from zoo.case import Case, Lay, Run, built, plain, steps

WARM, MORE, DEADLINE = 3, 10, 30.0
HERE, AGAIN, BACKGROUND, RANKS, GATHERED, SPREAD = (
    "one process", "into a trained one", "background", "2 ranks", "2 ranks to 1", "2 ranks to 4",
)  # fmt: skip
_NOT_AGAIN = "what was loaded cannot be saved again"
LOCAL, SHARDED = (HERE, AGAIN, BACKGROUND), (RANKS, GATHERED, SPREAD)


@dataclass(frozen=True)
class Cell:
    """How a case did in one column: "right", "refused", "wrong" or "torch", and why."""

    verdict: str
    text: str = ""


Tell = Callable[[str, str, str], None]
"""Says how a column ended: its name, verdict and text. With the name "" the text says what is being done."""


class Unable(Exception):
    """torch itself, or the case, does not do what the judge asks of it."""


@dataclass
class Facts:
    """What one column was judged against."""

    saved: Any
    """The state at the save, by the objects' own ``state_dict()``."""
    uninterrupted: list[Any] | None
    """What the steps after it gave where nothing was saved or loaded; None if that cannot be compared."""
    after: int = WARM
    """How many steps the fresh run takes before it loads."""


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
                _judge_load(case, plain, path, facts, column, noting, trained=WARM)
                continue
            saved, note = _save_within(case, plain, path, uninterrupted, column, noting)
            if saved is None:
                continue
            first = saved if column == HERE else first
            _judge_load(case, plain, path, Facts(saved, uninterrupted[WARM:]), column, noting, note=note)


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
                tell(column, "torch", f"torch gathers no whole of it: {_named(error)}")
        _judge_load(case, sharded, path, Facts(saved, uninterrupted[WARM:]), RANKS, tell, note=note)


def gathered(case: Case, folder: Path, tell: Tell) -> None:
    """The column of one process that loads what 2 ranks saved."""
    with _judged(GATHERED, tell):
        facts = Facts(torch.load(folder / "whole.pt", weights_only=False), None)
        _judge_load(case, plain, folder / "ranks", facts, GATHERED, tell)


def spread(case: Case, folder: Path, tell: Tell) -> None:
    """The column of 4 ranks that load what 2 ranks saved: their state, gathered, is what was saved."""
    with _judged(SPREAD, tell):
        whole = torch.load(folder / "whole.pt", weights_only=False)
        tell("", "", "building")
        run = built(case, sharded, 2)
        tell("", "", "holdfast.load")
        error = _attempt(lambda: holdfast.load(folder / "ranks", run.state, deadline=DEADLINE))
        if error is not None:
            tell(SPREAD, *_refusal(error, run, None))
            return
        tell("", "", "holdfast: comparing")
        now = trees.own_state(run.state)
        found = list(trees.differences(whole, trees.whole(now, {tuple(p.shape) for p in _parameters(now)})))
        unclear = list(trees.differing(whole))
        if unclear:
            tell(SPREAD, "wrong", f"differs between the ranks that saved, and was loaded all the same: {unclear[:3]}")
        elif grave := [d for d in found if not d.slight]:
            tell(SPREAD, "wrong", "after the load " + _listed(grave))
        else:
            _steps(run, WARM, 2)
            tell(SPREAD, "right", _slight(found))


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 over all ranks: each child that has parameters, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _trained(case: Case, lay: Lay, count: int) -> list[Any]:
    with _asking_torch("does not train"):
        return steps(built(case, lay, 1), 0, count)


def _save_within(
    case: Case, lay: Lay, path: Path, uninterrupted: list[Any], column: str, tell: Tell
) -> tuple[Any, str]:
    """Save a run in its middle; its state then, or None if that ended the column. Training has to go on the same."""
    tell("", "", "training")
    run, note = built(case, lay, 1), ""
    with holdfast.Saver(deadline=DEADLINE) if column == BACKGROUND else contextlib.nullcontext() as saver:
        before = _steps(run, 0, WARM - 1)
        if saver is not None:
            tell("", "", "Saver.save")
            _attempt(lambda: saver.save(run.state, f"{path}-first").wait())
        before += _steps(run, WARM - 1, 1)
        if list(trees.differences(before, uninterrupted[:WARM])):
            note = "the run itself differs from time to time"
        tell("", "", "state_dict")
        with _asking_torch("has no state_dict()"):
            saved = trees.own_state(run.state)
        tell("", "", "holdfast.save")
        save: Callable[[], Any]
        if saver is None:
            save = lambda: holdfast.save(run.state, path, deadline=DEADLINE)  # noqa: E731
        else:
            saving: list[Any] = []
            save = lambda: saving.append(saver.save(run.state, path))  # noqa: E731
        error = _attempt(save)
        tell("", "", "holdfast: training on")
        after = _steps(run, WARM, MORE)
        if saver is not None and error is None:
            error = _attempt(saving[0].wait)
            saving[0].hear()
    if list(trees.differences(after, uninterrupted[WARM:])) and not note:
        if _state_dict_disturbs(case, lay, uninterrupted):
            note = "state_dict() itself changes the run"
        else:
            tell(column, "wrong", "the run that was saved goes on otherwise")
            return None, ""
    if error is not None:
        tell(column, *_refusal(error, run, None))
        return None, ""
    return saved, note


def _state_or_none(run: Run) -> Any:
    """The state of a run; None if an object of it cannot give one at the moment, as where it has to be gathered first."""
    try:
        return trees.own_state(run.state)
    except Exception:
        return None


def _state_dict_disturbs(case: Case, lay: Lay, uninterrupted: list[Any]) -> bool:
    run = built(case, lay, 1)
    steps(run, 0, WARM)
    trees.own_state(run.state)
    return bool(list(trees.differences(steps(run, WARM, MORE), uninterrupted[WARM:])))


def _judge_load(
    case: Case, lay: Lay, path: Path, facts: Facts, column: str, tell: Tell, *, trained: int = 0, note: str = ""
) -> None:
    """Load into a fresh run (or one that has trained), by torch's own and by holdfast, and compare how both go on.

    A run that goes on is asked for nothing in between: its state is that of a twin.
    """

    def fresh() -> Run:
        run = built(case, lay, 2)
        _steps(run, 20, trained)
        return run

    tell("", "", "torch's own load")
    expected, expected_steps, torch_failed = _by_torch(fresh, facts)
    tell("", "", "building")
    ours, twin = fresh(), fresh()
    tell("", "", "holdfast.load")
    error = _attempt(lambda: holdfast.load(path, ours.state, deadline=DEADLINE))
    if error is not None:
        verdict, text = _refusal(error, ours, twin)
        tell(column, verdict, text + (f" ({torch_failed})" if torch_failed else ""))
        return
    loaded = holdfast.load(path, twin.state, deadline=DEADLINE)
    tell("", "", "holdfast: comparing")
    now = _state_or_none(twin)
    untold = _not_restored(path, loaded, twin.state, path.with_name(f"again-{column}".replace(" ", "-")))
    tell("", "", "holdfast: training on")
    try:
        went: list[Any] = steps(ours, WARM, MORE)
    except Exception as raised:
        if torch_failed:
            tell(column, "torch", torch_failed)
        else:
            tell(column, "wrong", f"after the load a step raises {_named(raised)}")
        return
    verdict, text = _verdict(facts, expected, expected_steps, now, went, torch_failed)
    if untold and verdict == "right":
        free = facts.uninterrupted is not None and not list(trees.differences(facts.uninterrupted, went))
        if untold.startswith(_NOT_AGAIN) or free:
            text = "; ".join(filter(None, [text, untold]))
        else:
            verdict, text = "wrong", f"named in restored, but did not arrive: {untold}"
    tell(column, verdict, "; ".join(filter(None, [text, note])))


def _by_torch(fresh: Callable[[], Run], facts: Facts) -> tuple[Any, list[Any] | None, str]:
    """The state after torch's own load and what the steps after it give, or None and why torch cannot do it."""
    unclear = list(trees.differing(facts.saved))
    failed = f"torch has no whole of {unclear[0]}" if unclear else ""
    theirs, twin = fresh(), fresh()
    if not failed:
        try:
            trees.load_own(theirs.state, facts.saved)
            trees.load_own(twin.state, facts.saved)
        except Exception as error:
            failed = f"torch's own load raises {_named(error)}"
    failed = _told_by_any(failed)
    if failed:
        return None, None, failed
    expected = _state_or_none(twin)
    try:
        return expected, steps(theirs, WARM, MORE), ""
    except Exception as error:
        return expected, None, f"after torch's own load it does not train: {_named(error)}"


def _verdict(
    facts: Facts, expected: Any, expected_steps: list[Any] | None, now: Any, went: list[Any], torch_failed: str
) -> tuple[str, str]:
    free = facts.uninterrupted
    as_free = free is not None and not list(trees.differences(free, went))
    if expected_steps is None:
        if as_free:
            return "right", f"as without a stop; {torch_failed}"
        if free is None:
            return "torch", torch_failed
        return "wrong", f"goes on otherwise than without a stop: {_first(free, went)}; {torch_failed}"
    states = [] if expected is None or now is None else list(trees.differences(expected, now))
    walks = list(trees.differences(expected_steps, went))
    grave = [d for d in states if not d.slight]
    if grave and not [d for d in trees.differences(facts.saved, now) if not d.slight]:
        grave = []  # torch's own load casts or leaves out: what was saved is right, too
    torch_as_free = free is None or not list(trees.differences(free, expected_steps))
    remark = "" if torch_as_free else "torch's own load does not go on as without a stop"
    if not grave and not walks:
        return "right", "; ".join(filter(None, [remark, _slight(states)]))
    if as_free and not torch_as_free:
        return "right", "as without a stop, where torch's own load goes on otherwise"
    if walks:
        where = _first(expected_steps, went)
        return "wrong", f"goes on otherwise: {where}" + (f"; after the load {_listed(grave)}" if grave else "")
    return "wrong", "after the load " + _listed(grave)


def _refusal(error: BaseException, run: Run, twin: Run | None) -> tuple[str, str]:
    """A refusal is a HoldfastError that names a leaf, and changes nothing: the run is as a twin that did not load."""
    if not isinstance(error, holdfast.HoldfastError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"raises {_named(error)} ({Path(where.filename).name}:{where.lineno})"
    text = _short(error.cause or str(error))
    if re.match(r"\w*(Error|Exception): ", text):
        return "wrong", f"fails inside: {text}"
    if twin is not None:
        sides = [(_state_or_none(one), _watched(one.state)) for one in (twin, run)]
        changed = list(trees.differences(*sides))
        if changed:
            return "wrong", f"refused ({text}), but changed before that: {_listed(changed)}"
    if isinstance(error, holdfast.RankLost) or not any(str(key) in str(error) for key in run.state):
        return "wrong", f"refused without the name of a leaf: {text}"
    return "refused", text


def _not_restored(path: Path, loaded: Any, state: dict[str, Any], again: Path) -> str:
    """The names in ``restored`` whose values are not what the checkpoint has, if the state is saved once more."""
    error = _attempt(lambda: holdfast.save(state, again, deadline=DEADLINE))
    if error is not None:
        return f"{_NOT_AGAIN}: {_named(error)}"
    one, other = holdfast.open(path), holdfast.open(again)
    wrong = []
    for name in loaded.restored:
        if "/param_groups/" in name and "/params/" in name:
            continue  # by these the groups were matched
        try:
            if name in one.tensors:
                if name in other.tensors:
                    same = not list(trees.differences(one.read(name), other.read(name)))
                else:
                    same = False
            elif name in one.manifest.values:
                same = name in other.manifest.values and not [
                    d for d in trees.differences(one.value(name), other.value(name)) if not d.slight
                ]
            else:
                same = True
        except (KeyError, holdfast.HoldfastError):
            same = False
        if not same:
            wrong.append(name)
    return ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _watched(node: Any) -> list[Any]:
    """What a refused load must not have touched, beside the state dicts: parameters and buffers."""
    if isinstance(node, nn.Module):
        with contextlib.suppress(Exception):
            found = [t for t in [*node.parameters(), *node.buffers()] if not is_lazy(t)]
            return [trees.copied(t.detach()) for t in found]
    if isinstance(node, dict):
        return [leaf for value in node.values() for leaf in _watched(value)]
    return []


def _parameters(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _parameters(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _parameters(value)


def _steps(run: Run, first: int, count: int) -> list[Any]:
    with _asking_torch("does not train"):
        return steps(run, first, count)


@contextlib.contextmanager
def _asking_torch(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Unable(f"{what}: {_named(error)}") from error


@contextlib.contextmanager
def _judged(column: str, tell: Tell) -> Iterator[None]:
    try:
        yield
    except Unable as error:
        tell(column, "torch", str(error))
    except Exception as error:
        traceback.print_exc()
        lost = "gloo" in str(error)  # another rank has failed, and says why
        tell(column, "torch" if lost else "wrong", f"the judge itself failed: {_named(error)}")


def _attempt(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        traceback.print_exc()
        return error
    return None


def _told_by_any(text: str) -> str:
    """Whether it failed on any rank; the same on all."""
    if not dist.is_initialized():
        return text
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return next(filter(None, everyone), "")


def _first(one: list[Any], other: list[Any]) -> str:
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        found = list(trees.differences(a, b))
        if found:
            return f"step {number + 1} after it gives {found[0].text}"
    return ""


def _slight(found: list[trees.Difference]) -> str:
    slight = [d for d in found if d.slight]
    return _listed(slight) if slight else ""


def _listed(found: list[trees.Difference]) -> str:
    return "; ".join(str(d) for d in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(str(error))}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "…"
