"""`dcp.load`: torch's signature over `holdfast.load`, in place and as lenient as torch is."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as _with_their_reader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.stable import wait_for_copies
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
from holdfast.load import keeping, restore
from holdfast.matching.compare import Matched, compare
from holdfast.matching.differences import UNLIKE_SHAPE, listed
from holdfast.matching.names import names_of, with_named_ids
from holdfast.ondisk import names
from holdfast.ondisk.patterns import near
from holdfast.ranks.ranks import Ranks, ranks_of
from holdfast.read.shared.demand import Choice, Demand, Offer, demand_of
from holdfast.read.shared.share import agree, offer, who_shares
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
    group = ranks_of(process_group)  # it says where tensors lie, even if no rank is to be met
    meeting = Ranks(0, 1) if no_dist else group
    with (
        as_torch_raises(), events.span("load", path, meeting.rank, whole=True), no_collection(),
        meeting.call(f"load {path}") as call,
    ):  # fmt: skip

        def compare_here() -> tuple[tuple[Target, Matched, Demand], _Fit]:
            target, matched, fit = _compare(path, state_dict, group, meeting, keep=keep)
            manifest, rest = target.checkpoint.manifest, matched.rest
            demand = demand_of(rest.wanted, rest.spreads, manifest, meeting.rank, shares=meeting.size > 1)
            fit.offer = offer(demand, meeting, target.checkpoint.files)
            return (target, matched, demand), fit

        with events.span("match", path, meeting.rank):
            (target, matched, demand), choice = keeping(call, "match", compare_here, _judge, Choice)
            shared = agree(call, demand, choice)
        with closing(shared):
            wait_for_copies()  # a save in the background still reads what would change here
            restore(call, matched, shared, path, verify=verify)

        def hand_back() -> bool:
            for action in target.then:
                action()
            return True

        call.settle("load_state_dict", hand_back, lambda notes: True, bool)
        if isinstance(planner, DefaultLoadPlanner):
            planner.metadata = Description(target.checkpoint)


class _Fit(msgspec.Struct, array_like=True):
    """How checkpoint and target fit on one rank."""

    where: str
    missing: list[str]
    misfits: list[str]
    offer: Offer = Offer()


def _compare(
    path: Place, state_dict: dict[str, Any], group: Ranks, meeting: Ranks, *, keep: bool
) -> tuple[Target, Matched, _Fit]:
    """Match every leaf of the target with the checkpoint; nothing is read or changed."""
    if not isinstance(state_dict, dict):
        raise Mismatch(f"a state dict is a dict, not a {type(state_dict).__qualname__}")
    checkpoint = open_by_key(path)
    target = Target(checkpoint).fill(state_dict)
    called, values = with_named_ids(checkpoint, target.name_here, target.tree)
    here = names_of(checkpoint, called, values, _everything)
    state = collect(target.tree, group, here.saved)
    matched, differences = compare(here, state, cast=True, keep=False, world_size=meeting.size, early=False)
    known = [*here.saved.tensors, *here.saved.values]
    missing, misfits = [], [*target.misfits, *differences.misfits]
    for name in differences.missing:
        if name in here.saved.tensors:
            misfits.append(f"{name}: saved as a tensor, here a value")
        elif name in here.per_rank:
            misfits.append(f"{name}: every rank saved its own; ask for it with holdfast.PerRank(…) at this place")
        elif not keep:
            missing.append(name + near(name, known))
    for at in target.optimizers if not keep else ():
        misfits += _nothing_found(at, matched)
    if casts := matched.report.cast:
        shown = ", ".join(f"{name} ({saved} to {own})" for name, (saved, own) in list(casts.items())[:5])
        events.log.warning("%s: %d tensors are cast, as torch would: %s", path, len(casts), shown)
    return target, matched, _Fit(str(checkpoint.path), missing, misfits)


def _everything(name: str) -> bool:
    return True


def _nothing_found(path: str, matched: Matched) -> list[str]:
    """What stands against an optimizer that would get nothing although the checkpoint has state for it."""
    prefix = names.child(path, "state")
    saved = [name for name in matched.names.saved.tensors if names.under(name, prefix)]
    own = [group.params for group in matched.state.groups.get(path, ())]
    if not saved or not any(own) or any(name in matched.claimed for name in saved):
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
        text.append(f"{'Size mismatch: ' if sizes else ''}{len(misfits)} differ:" + listed(misfits, _SHOWN))
    if missing:
        text.append(
            f"Missing key in checkpoint state_dict: {len(missing)} missing from the checkpoint "
            "(planner=DefaultLoadPlanner(allow_partial_load=True) leaves them as they are):" + listed(missing, _SHOWN)
        )
    raise Mismatch("\n".join(text))


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any], optimizer_key: str, storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As torch's function of this name. Of torch's own readers the path is taken, and read by a `Reader`."""
    if not stores_itself(storage_reader):
        path, verify = origin(None, storage_reader)
        storage_reader = Reader(path, verify=verify)
    loaded: dict[str, Any] = _with_their_reader(model_state_dict, optimizer_key, storage_reader, planner)
    return loaded
