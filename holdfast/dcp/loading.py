"""The story of `dcp.load`: torch's manners over `holdfast.load`'s work.

Programs call `load`. In place and lenient as torch is: what only the checkpoint has is left alone. Never changes a
tensor before every rank knows that everything fits.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.still import wait_for_copies
from holdfast.dcp.arguments import (
    PathLike,
    by_position,
    id_for_torch,
    keeps_missing,
    origin,
    plans_itself,
    stores_itself,
)
from holdfast.dcp.failures import as_torch_raises
from holdfast.dcp.flattened import Description
from holdfast.dcp.opening import open_by_key
from holdfast.dcp.reader import Reader
from holdfast.dcp.states import Target
from holdfast.errors import Mismatch
from holdfast.load import restore
from holdfast.matching.match import UNLIKE_SHAPE, Match, named_ids, saved_names
from holdfast.ondisk import names
from holdfast.ondisk.patterns import near
from holdfast.ranks.ranks import Ranks, ranks_of
from holdfast.read.shared.share import Choice, Offer, who_shares
from holdfast.state import collect
from holdfast.storage.place import Place

_SHOWN = 100


@by_position("storage_reader")
def load(
    state_dict: dict[str, Any], *, checkpoint_id: PathLike | None = None, storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None, process_group: dist.ProcessGroup | None = None, no_dist: bool = False,
) -> None:  # fmt: skip
    """Load the checkpoint at ``checkpoint_id`` into ``state_dict``, in place, as `torch.distributed.checkpoint.load`.

    Tensors are filled where they are, on any mesh; other values are replaced in the nested dicts and lists; objects
    with a state dict get it by ``load_state_dict``. What the checkpoint has beyond that is ignored. A key that it
    lacks is an error, unless ``planner=DefaultLoadPlanner(allow_partial_load=True)``. Tensors of another dtype are
    cast, with a warning. ``no_dist=True``: this process alone, which meets no other rank.

    Reads whatever `holdfast.load` reads. Of torch's own readers the path is taken. A planner of one's own goes with
    torch's engine, over a `Reader`; a storage reader of one's own goes with torch's engine as it is. After the load
    ``planner.metadata`` tells what the checkpoint holds. Raises holdfast's errors (Mismatch with every name that does
    not fit, NotACheckpoint, Damaged, …), the same on every rank, each also torch's CheckpointException.
    """
    if stores_itself(storage_reader):
        state_dict_loader.load(
            state_dict, checkpoint_id=id_for_torch(checkpoint_id), storage_reader=storage_reader, planner=planner,
            process_group=process_group, no_dist=no_dist,
        )  # fmt: skip
        return
    path, verify = origin(checkpoint_id, storage_reader)
    if plans_itself(planner):
        state_dict_loader.load(
            state_dict, storage_reader=Reader(path, verify=verify), planner=planner,
            process_group=process_group, no_dist=no_dist,
        )  # fmt: skip
        return
    keep = keeps_missing(planner)
    group = ranks_of(process_group)  # where tensors lie is told by it, even if nobody is to be met
    meeting = Ranks(0, 1) if no_dist else group
    with (
        as_torch_raises(), events.span("load", path, meeting.rank, whole=True), no_collection(),
        meeting.call(f"load {path}") as call,
    ):  # fmt: skip
        found: list[tuple[Target, Match]] = []

        def compare() -> _Fit:
            target, match, fit = _compare(path, state_dict, group, meeting, keep=keep)
            found.append((target, match))
            fit.offer = match.sharing(meeting).offer(match.spreads)
            return fit

        def hand_back() -> bool:
            for action in found[0][0].then:
                action()
            return True

        with events.span("match", path, meeting.rank):
            choice = call.exchange("match", compare, _judge, Choice)
            match = found[0][1]
            sharing = match.sharing(meeting)
            sharing.agree(call, choice)
        wait_for_copies()  # a save in the background still reads what would change here
        restore(call, match, sharing, path, verify=verify)
        call.settle("load_state_dict", hand_back, lambda notes: True, bool)
        if isinstance(planner, DefaultLoadPlanner):
            planner.metadata = Description(found[0][0].checkpoint)


class _Fit(msgspec.Struct, array_like=True):
    """How checkpoint and target fit on one rank."""

    where: str
    missing: list[str]
    misfits: list[str]
    offer: Offer = Offer()


def _compare(
    path: Place, state_dict: dict[str, Any], group: Ranks, meeting: Ranks, *, keep: bool
) -> tuple[Target, Match, _Fit]:
    """Match every leaf of the target with the checkpoint; nothing is read or changed."""
    if not isinstance(state_dict, dict):
        raise Mismatch(f"a state dict is a dict, not a {type(state_dict).__qualname__}")
    checkpoint = open_by_key(path)
    target = Target(checkpoint).fill(state_dict)
    name_here, values = named_ids(checkpoint, target.name_here, target.tree)
    saved = saved_names(checkpoint, name_here, values, _everything)
    match = Match(checkpoint, name_here, saved, _everything, True, collect(target.tree, group, saved))
    fit = match.compare(keep=False, world_size=meeting.size, early=False)
    known = [*saved.tensors, *saved.values]
    missing, misfits = [], [*target.misfits, *fit.misfits]
    for name in fit.missing:
        if name in saved.tensors:
            misfits.append(f"{name}: saved as a tensor, here a value")
        elif name in match.per_rank:
            misfits.append(f"{name}: every rank saved its own; ask for it with holdfast.PerRank(…) at this place")
        elif not keep:
            missing.append(name + near(name, known))
    for at in target.optimizers if not keep else ():
        misfits += _nothing_found(at, match)
    if match.loaded.cast:
        shown = ", ".join(f"{name} ({saved} to {own})" for name, (saved, own) in list(match.loaded.cast.items())[:5])
        events.log.warning("%s: %d tensors are cast, as torch would: %s", path, len(match.loaded.cast), shown)
    return target, match, _Fit(str(checkpoint.path), missing, misfits)


def _everything(name: str) -> bool:
    return True


def _nothing_found(path: str, match: Match) -> list[str]:
    """What stands against an optimizer that would get nothing although the checkpoint has state for it."""
    prefix = names.child(path, "state")
    saved = [name for name in match.saved.tensors if names.under(name, prefix)]
    own = [group.params for group in match.state.groups.get(path, ())]
    if not saved or not any(own) or any(name in match.claimed for name in saved):
        return []
    return [
        f"{path}: nothing in its state goes by the names that its parameters have here: saved is {saved[0]}, for "
        "example. Put the module that owns the parameters into the state dict as well"
    ]


def _judge(fits: list[_Fit]) -> Choice:
    """On the first rank: raise Mismatch with every name of every rank, unless all fits; else who may share reading."""
    missing = list(dict.fromkeys(text for fit in fits for text in fit.missing))
    misfits = list(dict.fromkeys(text for fit in fits for text in fit.misfits))
    if not (missing or misfits):
        return who_shares([fit.offer for fit in fits])
    text = [f"{fits[0].where} does not fit the state dict it is loaded into; nothing was changed."]
    if misfits:
        sizes = any(UNLIKE_SHAPE in misfit for misfit in misfits)
        text.append(f"{'Size mismatch: ' if sizes else ''}{len(misfits)} differ:" + _listed(misfits))
    if missing:
        text.append(
            f"Missing key in checkpoint state_dict: {len(missing)} missing from the checkpoint "
            "(planner=DefaultLoadPlanner(allow_partial_load=True) leaves them as they are):" + _listed(missing)
        )
    raise Mismatch("\n".join(text))


def _listed(items: list[str]) -> str:
    shown = "".join(f"\n    {item}" for item in items[:_SHOWN])
    return shown + (f"\n    … and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
