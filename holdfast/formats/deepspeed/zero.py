"""ZeRO's flat partitions as named tensors: fp32 masters and optimizer state, cut where each parameter lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import ceil, prod
from typing import Any, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.sharded import join_ranks
from holdfast.formats.simplified import PerRank, simplified
from holdfast.formats.sources import Memory, Stretch
from holdfast.formats.stored import Stored, float_scalar, of_bytes
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import flat_boxes
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place

Shapes = Mapping[str, Sequence[int]]
"""Parameters of a group with their shapes, in the order in which they lie in the flat group."""

GEOMETRY = frozenset(
    ["base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
     "optimizer_state_dict", "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count",
     "param_groups", "ds_version"]
)  # fmt: skip
"""Keys of an optimizer's file that say where things are; the rest is the wrapper's own state."""


class Partitioned(NamedTuple):
    """What the optimizer files of all ranks hold, by parameter.

    ``masters``: the weights the optimizer works on. ``states``: its state. ``groups``: its param_groups, with names as
    ``params``. ``wrapper``: loss scaler, overflow and whatever else DeepSpeed's own optimizer keeps.
    """

    masters: dict[str, Stored]
    states: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    wrapper: dict[str, Any]


class _Flat(NamedTuple):
    """One flat group: by rank its masters and its optimizer state, and how a parameter is cut out of such parts.

    ``fits``: the lengths that a rank's part may have.
    """

    names: list[str]
    group: int
    masters: list[Stored]
    states: list[Mapping[str, Any]]
    fits: Sequence[tuple[int, ...]]
    cut: Callable[[Sequence[Stored]], dict[str, Stored]]


def partitioned(
    optims: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes], config: Any, where: Place
) -> Partitioned:
    """What the optimizers of ranks 0, 1, … hold. ``shapes``: of each flat group; ``config``: DeepSpeed's.

    Raises Damaged if partitions and parameters do not fit, Unsupported for a layout that DeepSpeed has given up.
    """
    first = optims[0]
    shapes = [proper(group, where) for group in shapes]
    base = [optim.get("base_optimizer_state", optim.get("optimizer_state_dict")) for optim in optims]
    hyper = _param_groups(base[0], first)
    if "single_partition_of_fp32_groups" in first:
        flats = _stage_1_2(optims, base, shapes, where)
        orders = [saved_order(flat.names, len(optims), config) for flat in flats]
    elif "fp32_flat_groups" in first:
        flats = _stage_3(optims, base, hyper, shapes, where)
        orders = [flat.names for flat in flats]
    else:
        raise Unsupported(
            f"{where}: no flat partitions of a kind that DeepSpeed wrote since 0.5; load it with the DeepSpeed "
            f"{first.get('ds_version', '')} that wrote it and convert it with its zero_to_fp32.py"
        )
    masters: dict[str, Stored] = {}
    states: dict[str, dict[str, Any]] = {}
    unnamed: dict[int, dict[str, Any]] = {}
    groups = hyper or [{} for _ in flats]
    named: list[list[str]] = [[] for _ in groups]
    for index, (flat, order) in enumerate(zip(flats, orders, strict=True)):
        masters.update(flat.cut(flat.masters))
        step = groups[flat.group].get("step", first.get("base_optimizer_state_step"))
        by_name, rest = _states(flat, step, where)
        states.update(by_name)
        if rest:
            unnamed[index] = rest
        named[flat.group] += order
    wrapper = join_ranks([{k: v for k, v in optim.items() if k not in GEOMETRY} for optim in optims], f"{where}: ")
    if isinstance(base[0], Mapping) and base[0].keys() - {"state", "param_groups"}:
        more = [{k: v for k, v in b.items() if k not in ("state", "param_groups")} for b in base]
        wrapper["base_optimizer_state"] = join_ranks(more, f"{where}: ")
    if unnamed:
        wrapper["unnamed_state"] = unnamed
    return Partitioned(masters, states, [{**g, "params": n} for g, n in zip(groups, named, strict=True)], wrapper)


def _param_groups(base: Any, optim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hyperparameters of each group; none in elastic checkpoints, which keep a list of states."""
    groups = optim.get("param_groups") if isinstance(base, list) else base.get("param_groups")
    return [dict(group) for group in groups or ()]


def saved_order(names: list[str], ranks: int, config: Any) -> list[str]:
    """The parameters of a flat group of ZeRO 1 or 2 in the order of the optimizer's group.

    Round-robin gradients deal them out to the ranks like cards.
    """
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return names
    dealt = sorted(range(len(names)), key=lambda i: i % ranks)
    return [name for _, name in sorted(zip(dealt, names, strict=True))]


def _stage_1_2(
    optims: Sequence[Mapping[str, Any]], base: Sequence[Any], shapes: Sequence[Shapes], where: Place
) -> list[_Flat]:
    """ZeRO 1 and 2, and the BF16 optimizer: a group is one flat vector, cut evenly among the ranks."""
    paddings = optims[0].get("group_paddings") or [0] * len(shapes)
    aligned = optims[0].get("param_alignment_paddings") or [None] * len(shapes)
    groups = [b if isinstance(b, list) else b.get("param_groups", ()) for b in base]
    if any(len(by_group) < len(shapes) for by_group in (paddings, aligned, *groups)):
        raise Damaged(
            f"{where}: not every rank has states and paddings of all {len(shapes)} groups of the model's file"
        )
    flats = []
    for g, group in enumerate(shapes):
        masters = [_vector(optim.get("single_partition_of_fp32_groups"), g, len(shapes), where) for optim in optims]
        gaps = aligned[g] or [0] * len(group)
        if len(gaps) != len(group):
            raise Damaged(f"{where}: group {g} has {len(group)} parameters, but its paddings are not those of as many")
        states = [b[g] if isinstance(b, list) else _state_of(b, _first_of(b["param_groups"][g])) for b in base]
        # States are padded as the masters were before they were saved. Only the first rank's padding is reliable:
        # older versions take the padding of all ranks for the last one's.
        fits = [(master.shape[0], masters[0].shape[0] + paddings[g]) for master in masters]
        cutter = partial(cut_vector, group, gaps, f"{where}: group {g}")
        flats.append(_Flat(list(group), g, masters, states, fits, cutter))
    return flats


def _first_of(group: Mapping[str, Any]) -> Any:
    return next(iter(group.get("params", ())), None)


def _state_of(base: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = base.get("state", {}).get(key, {})
    return state


def _stage_3(
    optims: Sequence[Mapping[str, Any]], base: Sequence[Any], hyper: Sequence[Mapping[str, Any]],
    shapes: Sequence[Shapes], where: Place,
) -> list[_Flat]:  # fmt: skip
    """ZeRO 3: every parameter is cut evenly among the ranks, and a rank's pieces follow each other."""
    if any(optim.get("ds_zero_partition_groups") for optim in optims):
        raise Unsupported(f"{where}: its experts are partitioned over other ranks than the rest (AutoEP), {_UNIVERSAL}")
    owner = [(id_, g) for g, group in enumerate(hyper) for id_ in group.get("params", ())]
    if not all(isinstance(b, Mapping) for b in base):
        raise Damaged(f"{where}: a rank's optimizer has a list of states, which ZeRO 3 never writes: it was altered")
    if len(owner) != len(shapes):
        raise Damaged(f"{where}: its optimizer has {len(owner)} flat groups, its model's files {len(shapes)}")
    flats = []
    for k, (group, (id_, g)) in enumerate(zip(shapes, owner, strict=True)):
        masters = [_vector(optim.get("fp32_flat_groups"), k, len(shapes), where) for optim in optims]
        if any(map(prod, group.values())) and all(m.shape == (0,) for m in masters):
            raise Unsupported(
                f"{where}: the masters of group {k} are not in the files: they were swapped to NVMe; {_UNIVERSAL}"
            )
        states = [_state_of(b, id_) for b in base]
        fits = [(m.shape[0],) for m in masters]
        cutter = partial(cut_shares, group, f"{where}: group {k}")
        flats.append(_Flat(list(group), g, masters, states, fits, cutter))
    return flats


_UNIVERSAL = "convert it with DeepSpeed's ds_to_universal.py and open what that writes"


def _vector(groups: Any, index: int, count: int, where: Place) -> Stored:
    if not isinstance(groups, (list, tuple)) or len(groups) != count:
        raise Damaged(f"{where}: a rank does not have the {count} flat groups that the model's file lists")
    vector = groups[index]
    if not isinstance(vector, Stored) or len(vector.shape) != 1:
        raise Damaged(f"{where}: flat group {index} of a rank is no flat tensor")
    return vector


def _states(flat: _Flat, group_step: Any, where: Place) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The optimizer state of each parameter of a group, and what of it cannot be cut at parameters."""
    keys = list(flat.states[0])
    for rank, state in enumerate(flat.states):
        if state.keys() != flat.states[0].keys():
            raise Damaged(f"{where}: the optimizer of rank {rank} keeps {sorted(state)}, that of rank 0 {sorted(keys)}")
    states: dict[str, dict[str, Any]] = {name: {} for name in flat.names}
    loose = []
    for key in keys:
        held = [state[key] for state in flat.states]
        if key != "step" and all(map(_fits, held, flat.fits)):
            for name, tensor in flat.cut(held).items():
                states[name][key] = tensor
        else:
            loose.append(key)
    joint = join_ranks([{key: state[key] for key in loose} for state in flat.states], f"{where}: ")
    if isinstance(joint.get("step"), PerRank):
        raise Damaged(f"{where}: the ranks' optimizers are at different steps: files of different saves lie there")
    rest = {}
    for key, value in joint.items():
        if isinstance(value, (PerRank, dict, list, tuple)) or (isinstance(value, Stored) and prod(value.shape) != 1):
            rest[key] = value
        else:
            spread(states, key, value, where)
    if keys and "step" not in keys and group_step is not None:
        spread(states, "step", group_step, where)
    return {name: state for name, state in states.items() if state}, rest


def _fits(value: Any, lengths: tuple[int, ...]) -> bool:
    return isinstance(value, Stored) and len(value.shape) == 1 and value.shape[0] in lengths


def spread(states: Mapping[str, dict[str, Any]], key: str, value: Any, where: Place) -> None:
    """Give what a flat group has once to each of its parameters: a step, a number.

    A tensor is one of its own for each: were it one and the same, a fused optimizer would count it up for every
    parameter.
    """
    value = simplified(value, where)
    number = step_number(value) if key == "step" else None
    raw = value.pieces[0][1].read() if isinstance(value, Stored) and value.pieces and number is None else None
    for state in states.values():
        if number is not None:
            state[key] = float_scalar(number, where)
        elif raw is not None:
            state[key] = of_bytes(value.dtype, value.shape, raw, where)
        else:
            state[key] = value


def step_number(value: Any) -> float | None:
    """A step, kept as a number or as a tensor of one element."""
    if isinstance(value, Stored) and prod(value.shape) == 1:
        return float(value.read().item())
    return float(value) if type(value) in (int, float) else None


def proper(shapes: Shapes, where: Place) -> dict[str, tuple[int, ...]]:
    """The shapes as tuples. Raises Damaged for one that is no shape."""
    checked = {name: tuple(shape) for name, shape in shapes.items()}
    for name, shape in checked.items():
        if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
            raise Damaged(f"{where}: {str(name)[:200]} is said to have shape {str(shape)[:100]}")
    return checked


def cut_vector(shapes: Shapes, gaps: Sequence[int], what: str, parts: Sequence[Stored]) -> dict[str, Stored]:
    """Parameters out of the parts that follow each other in one vector, ``gaps`` between and padding at the end."""
    starts = [0, *accumulate(part.shape[0] for part in parts)]
    needed, align = sum(map(prod, shapes.values())) + sum(gaps), 2 * len(parts)
    # The padding up to a multiple of twice the ranks is kept or not, and older versions strip too little of it.
    if starts[-1] < needed or ceil(starts[-1] / align) != ceil(needed / align):
        raise Damaged(
            f"{what}: its parameters have {needed} elements, the partitions of {len(parts)} ranks {starts[-1]}: files "
            "of different saves lie there, or one was altered"
        )
    dtype, stretches = _stretches(parts, what)
    tensors, begin, rank = {}, 0, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = begin + prod(shape)
        while rank + 1 < len(parts) and starts[rank + 1] <= begin:
            rank += 1
        runs, at = [], rank
        while at < len(parts) and starts[at] < end:
            low, high = max(begin, starts[at]), min(end, starts[at + 1])
            runs.append(Run(low - begin, high - low, stretches[at], low - starts[at]))
            at += 1
        tensors[name] = _of_runs(dtype, shape, runs)
        begin = end + gap
    return tensors


def cut_shares(shapes: Shapes, what: str, parts: Sequence[Stored]) -> dict[str, Stored]:
    """Parameters out of the parts in which each rank has its equal share of every one, padded at its end."""
    lengths = [ceil(prod(shape) / len(parts)) for shape in shapes.values()]
    for rank, part in enumerate(parts):
        if part.shape[0] != sum(lengths):
            raise Damaged(
                f"{what}: rank {rank} should have {sum(lengths)} elements and has {part.shape[0]}: files of different "
                "saves or numbers of ranks lie there, or one was altered"
            )
    dtype, stretches = _stretches(parts, what)
    tensors, at = {}, 0
    for (name, shape), length in zip(shapes.items(), lengths, strict=True):
        numel = prod(shape)
        firsts = range(0, numel, length or 1)  # a small parameter is not on all ranks
        runs = [Run(first, min(length, numel - first), stretches[rank], at) for rank, first in enumerate(firsts)]
        tensors[name] = _of_runs(dtype, shape, runs)
        at += length
    return tensors


class Run(NamedTuple):
    """Elements ``first:first + numel`` of a flattened parameter: where in a rank's part they begin."""

    first: int
    numel: int
    part: Stretch
    begin: int


def _of_runs(dtype: str, shape: Sequence[int], runs: Sequence[Run]) -> Stored:
    # As `stored.from_flat`, without a tensor for each run: there are as many as ranks times parameters.
    shape, size = tuple(shape), dtypes.itemsize(dtype)
    pieces = []
    for first, numel, part, begin in runs:
        at = begin * size
        for box in flat_boxes(shape, first, first + numel):
            nbytes = box.size * size
            pieces.append((box, part.part(at, nbytes)))
            at += nbytes
    return Stored(dtype, shape, tuple(pieces))


def _stretches(parts: Sequence[Stored], what: str) -> tuple[str, list[Stretch]]:
    """The type of all parts, and the bytes of each."""
    if len({part.dtype for part in parts}) > 1 or any(len(part.pieces) > 1 for part in parts):
        raise Damaged(f"{what}: the ranks' parts are of several types: files of different saves lie there")
    nothing = Stretch(Memory(LocalPlace(what), b""), 0, 0)
    return parts[0].dtype, [part.pieces[0][1] if part.pieces else nothing for part in parts]
