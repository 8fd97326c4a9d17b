"""What was read handed back to objects and values: early to objects that may refuse it, the rest when all is there.

`load` calls it, on every rank. The last stage: nothing is read after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from holdfast import events
from holdfast.errors import HoldfastError, Mismatch
from holdfast.matching.compare import Matched, same_bytes
from holdfast.matching.differences import Loaded
from holdfast.matching.names import names_below, tree_of
from holdfast.ranks.ranks import Ranks
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.source import ReadStats
from holdfast.state import Saved, Target
from holdfast.state.per_rank import choose


@dataclass(frozen=True)
class Filled:
    """What reading gave: every tensor of ``matched`` is filled, unless another rank has ``stopped`` it."""

    matched: Matched
    report: Loaded
    stopped: bool = False
    why: str = ""


def hand_over_early(matched: Matched, verify: Verify, undo: list[Callable[[], None]]) -> ReadStats:
    """Read what objects take by methods of their own, and hand it to them; ``undo`` gets what takes it back.

    They may refuse it, and nothing but them has been changed by then.
    """
    checkpoint = matched.checkpoint
    stats = read_boxes(checkpoint.files, matched.early.wanted, verify=checkpoint.reader.verifying(verify))
    for target in matched.early.targets:
        if target.undoing is not None:
            undo.append(target.undoing())
        _put(matched, target, "nothing else was changed")
    return stats


def hand_back(filled: Filled, ranks: Ranks) -> Loaded:
    """Hand all values back, once every byte is there."""
    matched = filled.matched
    names, state, checkpoint = matched.names, matched.state, matched.checkpoint
    for name in filled.report.cleared:
        state.handback.clears[name]()
    for action in state.handback.before:
        action()
    for target in [*matched.rest.targets, *(target for target in matched.early.targets if target.again)]:
        _put(matched, target, "other objects may have been restored by then")
    for path, leaf in state.per_rank.items():
        if path in names.per_rank:
            fetch = partial(checkpoint.per_rank, names.per_rank[path])
            leaf.put(choose(leaf.elsewhere, fetch, checkpoint.world_size, ranks.rank, ranks.size))
    for action in state.handback.after:
        action()
    handed = _handed([*matched.rest.targets, *matched.early.targets], names.saved, matched.fresh)
    restored = [name for name in filled.report.restored if name not in handed]
    events.reached("filled", checkpoint.path, ranks.rank)
    return replace(filled.report, restored=restored, handed=list(handed))


def _put(matched: Matched, target: Target, rest: str) -> None:
    """Hand a target what was saved of it; if it refuses, the error says what became of the ``rest``."""
    try:
        tree = tree_of(target, matched.names.saved, matched.fresh, matched.checkpoint.path)
        some = target.put_some if target.path in matched.names.in_part else None
        (some or target.put)(tree)
    except HoldfastError:
        raise
    except Exception as error:  # whatever the object's own method raises
        raise Mismatch(
            f"{target.path} refused what was saved of it ({type(error).__name__}: {error}); {rest}"
        ) from error


def _handed(targets: Iterable[Target], saved: Saved, fresh: Mapping[str, Any]) -> dict[str, None]:
    """What was handed to methods of an object and does not stand in its state dict as it was saved."""
    handed: dict[str, None] = {}
    for target in targets:
        if target.present is None:
            continue
        present = target.present()
        for name in (n for n in names_below(target, saved) if n in fresh):
            value, part = present.get(name), name.rpartition("/")[0] in present
            if not part and not (isinstance(value, torch.Tensor) and same_bytes(value, fresh[name])):
                handed[name] = None
    return handed
