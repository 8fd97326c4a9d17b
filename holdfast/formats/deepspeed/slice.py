"""What one model-parallel rank of a DeepSpeed run holds, put together from the files of its data-parallel ranks.

`ranks` and `universal` make slices; `parallel` joins them. Never reads a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.formats.deepspeed.plain import named
from holdfast.formats.deepspeed.zero import Partitioned, Shapes, cut_shares, partitioned, proper
from holdfast.formats.sharded import join_ranks
from holdfast.formats.simplified import PerRank
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

_CONSUMED = frozenset(
    ["module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
     "frozen_param_fragments"]
)  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """The state of one model-parallel rank: all of it, unless tensors or layers are parallel.

    ``model``: masters, buffers and frozen weights. ``module``: the weights as the module held them, where those differ
    from masters. ``optimizer``: by parameter. ``plain``: the optimizer of a run without ZeRO, for each model-parallel
    rank. ``others``: the rest of the model files. ``buffers_by_rank``: buffers of which each rank has another.
    ``buffers``: names of all buffers.
    """

    model: dict[str, Any]
    module: dict[str, Any] = field(default_factory=dict)
    optimizer: Partitioned | None = None
    plain: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)
    buffers_by_rank: dict[str, PerRank] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()


def slice_of(
    mp: int, models: Sequence[Mapping[str, Any]], optims: Sequence[Mapping[str, Any]], shared: Mapping[str, str],
    where: Place,
) -> Slice:  # fmt: skip
    """The slice of model-parallel rank ``mp`` from what its model and its optimizer files hold, by data-parallel rank.

    Several model files, or none of the weights in one, are ZeRO 3. ``shared``: tied parameters, each with the name that
    its weight is kept under. Raises Damaged.
    """
    first = models[0]
    part = None
    if optims:
        shapes = first.get("param_shapes") or _shapes_from(optims, first.get("module") or {}, where)
        part = partitioned([o["optimizer_state_dict"] for o in optims], shapes, first.get("ds_config"), where)
    elif first.get("param_shapes") is not None:
        raise Damaged(
            f"{where} is of a run with ZeRO, but none of its optimizer files (*_optim_states.pt) is there: with them "
            "went the fp32 weights. Bring them back; the weights as the module held them can be had by opening "
            "mp_rank_00_model_states.pt itself"
        )
    buffers = frozenset(first.get("buffer_names") or ())
    plain = first.get("optimizer") if part is None else None
    by_weights = named(plain, first.get("module") or {}, buffers, where) if isinstance(plain, Mapping) else None
    if by_weights is not None:
        part, plain, shared = by_weights.optimizer, None, by_weights.tied
    sharded = bool(optims) and "fp32_flat_groups" in optims[0]["optimizer_state_dict"]
    model = weights(models, part.masters if part else {}, shared, where, sharded=sharded)
    return Slice(
        model,
        module_weights(first.get("module") or {}, part.masters if part and not sharded else {}, shared),
        part,
        {f"mp_rank_{mp:02d}": plain} if plain else {},
        [others(m) for m in models],
        _buffers_by_rank(models, buffers) if len(models) > 1 else {},
        buffers,
    )


def others(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model file holds beside the model: scheduler, counters, configuration, the client's state."""
    return {key: value for key, value in model.items() if key not in _CONSUMED}


def _shapes_from(optims: Sequence[Mapping[str, Any]], module: Mapping[str, Any], where: Place) -> list[Shapes]:
    # The BF16 optimizer without ZeRO: the model's file has no shapes, but each rank lists its fragments of parameters
    # in order.
    mappings = [optim["optimizer_state_dict"].get("param_slice_mappings") for optim in optims]
    if None in mappings:
        raise Damaged(f"{where}: neither the model's file nor the optimizers' list the parameters")
    shapes: list[Shapes] = []
    for by_rank in zip(*mappings, strict=True):
        names = dict.fromkeys(name for group in by_rank for name in group)
        shapes.append({name: module[name].shape for name in names})
    return shapes


def weights(
    models: Sequence[Mapping[str, Any]], masters: Mapping[str, Stored], shared: Mapping[str, str], where: Place, *,
    sharded: bool,
) -> dict[str, Any]:  # fmt: skip
    """The model's parameters and buffers, in its order. ``sharded``: the module's own are placeholders (ZeRO 3)."""
    first = models[0]
    module = first.get("module") or {}
    known: dict[str, Any] = {**_frozen(models, where, sharded=sharded), **masters}
    buffers = frozenset(first.get("buffer_names") or ())
    tensors = {}
    for name, value in module.items():
        owner = shared.get(name)
        if name in known:
            tensors[name] = known[name]
        elif owner in known and (sharded or _shape(value) == _shape(known[owner])):
            tensors[name] = known[owner]
        elif sharded and isinstance(value, Stored) and 0 in value.shape and name not in buffers:
            log.warning("%s: %s was excluded from the save: only an empty placeholder is left of it", where, name)
        else:
            tensors[name] = value
    return {**tensors, **{name: tensor for name, tensor in known.items() if name not in tensors}}


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Stored) else None


def _frozen(models: Sequence[Mapping[str, Any]], where: Place, *, sharded: bool) -> dict[str, Any]:
    shapes = proper(models[0].get("frozen_param_shapes") or {}, where)
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    if not sharded:  # each rank has them whole, and the module too
        return {name: fragments[0][name] for name in shapes if name not in (models[0].get("module") or {})}
    tensors = {}
    for name, shape in shapes.items():
        parts = [fragment[name] for fragment in fragments]
        if prod(shape):
            tensors.update(cut_shares({name: shape}, f"{where}: frozen {name}", parts))
        else:
            tensors[name] = Stored(parts[0].dtype, shape, ())
    return tensors


def module_weights(
    module: Mapping[str, Any], masters: Mapping[str, Stored], shared: Mapping[str, str]
) -> dict[str, Any]:
    """The weights as the module held them, if not in their masters' type: then they are the masters, rounded."""
    rounded: dict[str, Any] = {}
    for name, value in module.items():
        owner = shared.get(name, name)
        master = masters.get(name, masters.get(owner))
        if master is not None and isinstance(value, Stored) and value.dtype != master.dtype:
            rounded[name] = module[owner] if name not in masters and owner in module else value
    return rounded


def _buffers_by_rank(models: Sequence[Mapping[str, Any]], names: frozenset[str]) -> dict[str, PerRank]:
    joint = join_ranks([{name: model["module"].get(name) for name in sorted(names)} for model in models])
    return {name: value for name, value in joint.items() if isinstance(value, PerRank)}
