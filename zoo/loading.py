"""One load, judged: by holdfast and by torch's own ``load_state_dict`` into equal fresh runs, and how both go on.

Called by `zoo.judge`. Knows neither which case it is nor how it lies on ranks.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

import holdfast
from zoo import trees
from zoo.case import Case, Lay, Run, built, steps
from zoo.verdict import (
    DEADLINE,
    MORE,
    WARM,
    Facts,
    Tell,
    attempt,
    first_difference,
    listed,
    named,
    short,
    slight,
    state_or_none,
    steps_of,
    told_by_any,
)  # fmt: skip

_NOT_AGAIN = "what was loaded cannot be saved again"


def judge_load(
    case: Case, lay: Lay, path: Path, facts: Facts, column: str, tell: Tell, *, trained: int = 0, note: str = ""
) -> None:
    """Load into a fresh run (or one that has trained), by torch's own and by holdfast, and compare how both go on.

    A run that goes on is asked for nothing in between: its state is that of a twin.
    """

    def fresh() -> Run:
        run = built(case, lay, 2)
        steps_of(run, 20, trained)
        return run

    tell("", "", "torch's own load")
    expected, expected_steps, torch_failed = _by_torch(fresh, facts)
    tell("", "", "building")
    ours, twin = fresh(), fresh()
    tell("", "", "holdfast.load")
    error = attempt(lambda: holdfast.load(path, ours.state, deadline=DEADLINE))
    if error is not None:
        verdict, text = refusal(error, ours, twin)
        if torch_failed.startswith("torch's own load raises") and isinstance(error, holdfast.HoldfastError):
            verdict = "torch"  # nothing to compare with; by then, as after torch's own load, tensors may be filled
        tell(column, verdict, text + (f" ({torch_failed})" if torch_failed else ""))
        return
    loaded = holdfast.load(path, twin.state, deadline=DEADLINE)
    tell("", "", "holdfast: comparing")
    now = state_or_none(twin)
    untold = _not_restored(path, loaded, twin.state, path.with_name(f"again-{column}".replace(" ", "-")))
    tell("", "", "holdfast: training on")
    try:
        went: list[Any] = steps(ours, WARM, MORE)
    except Exception as raised:
        if torch_failed:
            tell(column, "torch", torch_failed)
        else:
            tell(column, "wrong", f"after the load a step raises {named(raised)}")
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
            failed = f"torch's own load raises {named(error)}"
    failed = told_by_any(failed)
    if failed:
        return None, None, failed
    expected = state_or_none(twin)
    try:
        return expected, steps(theirs, WARM, MORE), ""
    except Exception as error:
        return expected, None, f"after torch's own load it does not train: {named(error)}"


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
        return "wrong", f"goes on otherwise than without a stop: {first_difference(free, went)}; {torch_failed}"
    states = [] if expected is None or now is None else list(trees.differences(expected, now))
    walks = list(trees.differences(expected_steps, went))
    grave = [d for d in states if not d.slight]
    if grave and not [d for d in trees.differences(facts.saved, now) if not d.slight]:
        grave = []  # torch's own load casts or leaves out: what was saved is right, too
    torch_as_free = free is None or not list(trees.differences(free, expected_steps))
    remark = "" if torch_as_free else "torch's own load does not go on as without a stop"
    if not grave and not walks:
        return "right", "; ".join(filter(None, [remark, slight(states)]))
    if as_free and not torch_as_free:
        return "right", "as without a stop, where torch's own load goes on otherwise"
    if walks:
        where = first_difference(expected_steps, went)
        return "wrong", f"goes on otherwise: {where}" + (f"; after the load {listed(grave)}" if grave else "")
    return "wrong", "after the load " + listed(grave)


def refusal(error: BaseException, run: Run, twin: Run | None) -> tuple[str, str]:
    """A refusal is a HoldfastError that names a leaf, and changes nothing: the run is as a twin that did not load."""
    if not isinstance(error, holdfast.HoldfastError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"raises {named(error)} ({Path(where.filename).name}:{where.lineno})"
    text = short(error.cause or str(error))
    if re.match(r"\w*(Error|Exception): ", text):
        return "wrong", f"fails inside: {text}"
    if twin is not None:
        sides = [(state_or_none(one), _watched(one.state)) for one in (twin, run)]
        changed = list(trees.differences(*sides))
        if changed:
            return "wrong", f"refused ({text}), but changed before that: {listed(changed)}"
    if isinstance(error, holdfast.errors.RankLost) or not any(str(key) in str(error) for key in run.state):
        return "wrong", f"refused without the name of a leaf: {text}"
    return "refused", text


def _not_restored(path: Path, loaded: Any, state: dict[str, Any], again: Path) -> str:
    """The names in ``restored`` whose values are not what the checkpoint has, if the state is saved once more."""
    error = attempt(lambda: holdfast.save(state, again, deadline=DEADLINE))
    if error is not None:
        return f"{_NOT_AGAIN}: {named(error)}"
    one, other = holdfast.open(path), holdfast.open(again)
    wrong = []
    for name in loaded.restored:
        if "/param_groups/" in name and "/params/" in name:
            continue  # by these the groups were matched
        try:
            if name in one.tensors:
                same = name in other.tensors and not list(trees.differences(one.read(name), other.read(name)))
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
