"""What one model-parallel rank of a DeepSpeed run holds, and all of these joined into one.

Tensors are joined only along axes that a file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.events import log
from holdfast.formats.alike import alike
from holdfast.formats.deepspeed.zero import Partitioned, Shapes, cut_shares, partitioned, proper
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.sharded import join_ranks
from holdfast.formats.simplified import PerRank
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Stored, concatenated, cut
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
        elif owner in known and (sharded or getattr(value, "shape", None) == known[owner].shape):
            tensors[name] = known[owner]
        elif sharded and isinstance(value, Stored) and 0 in value.shape and name not in buffers:
            log.warning("%s: %s was excluded from the save: only an empty placeholder is left of it", where, name)
        else:
            tensors[name] = value
    return {**tensors, **{name: tensor for name, tensor in known.items() if name not in tensors}}


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


_SUB_PARAMS = "parameter_with_sub_params"
_TIED = "tied_modules."


def join_slices(slices: Sequence[Slice], layers: Mapping[int, Mapping[int, Stretch]], where: Place) -> Slice:
    """All slices as one: stages of a pipeline side by side, shards of tensors joined. ``layers``: files of pipelines.

    Raises Damaged if ranks are missing, Unsupported for tensor parallelism that no file describes.
    """
    if len(slices) == 1 and not layers:
        return slices[0]
    stages, tensors = _degrees(slices, layers, where)
    columns = []
    for t in range(tensors):
        files = {index: by_rank[t] for index, by_rank in sorted(layers.items())}
        columns.append(_pipeline([slices[s * tensors + t] for s in range(stages)], files, where))
    return columns[0] if tensors == 1 else _tensor_parallel(columns, where)


def _degrees(slices: Sequence[Slice], layers: Mapping[int, Mapping[int, Stretch]], where: Place) -> tuple[int, int]:
    """How many pipeline stages and how many tensor-parallel ranks."""
    first = slices[0].others[0]
    saved = first.get("mp_world_size")
    if saved is not None and saved != len(slices):
        raise Damaged(
            f"{where}: there are files of {len(slices)} model-parallel ranks (mp_rank_…), but {saved} saved: some are "
            "missing, or those of an earlier save lie there too"
        )
    degrees = first.get("checkpoint_parallel_dimensions") or {}
    tensors = degrees.get("tp_degree") or max((len(by_rank) for by_rank in layers.values()), default=len(slices))
    if len(slices) % tensors:
        raise Damaged(f"{where}: {len(slices)} model-parallel ranks cannot be {tensors} in each pipeline stage")
    for index in range(max(layers, default=-1) + 1):
        if index in layers and sorted(layers[index]) != list(range(tensors)):
            raise Damaged(f"{where}: of layer {index} the files of {len(layers[index])} of {tensors} ranks are there")
    return len(slices) // tensors, tensors


def _pipeline(stages: Sequence[Slice], files: Mapping[int, Stretch], where: Place) -> Slice:
    """All stages as one: each has other layers, and files of their own hold these as the module does."""
    model: dict[str, Any] = {}
    for stage in reversed(stages):  # of tied weights, which several stages hold, the first stage's
        model.update(stage.model)
    buffers = frozenset().union(*(stage.buffers for stage in stages))
    part = _side_by_side([stage.optimizer for stage in stages if stage.optimizer], where)
    masters = part.masters if part else {}
    weights: dict[str, Any] = {}
    module: dict[str, Any] = {}
    for index, file in files.items():
        layer = load_file(file)
        if not isinstance(layer, dict):
            raise Damaged(f"{file.source.path} holds no layer's state dict")
        prefix = _prefix(index, layer, {*model, *buffers})
        for key, value in layer.items():
            name = f"{prefix}{key}"
            master = masters.get(name)
            weights[name] = value if master is None else master
            if master is not None and isinstance(value, Stored) and value.dtype != master.dtype:
                module[name] = value
    return Slice(
        {**weights, **{name: value for name, value in model.items() if name not in weights}},
        module or {k: v for stage in reversed(stages) for k, v in stage.module.items()},
        part,
        {} if part else {key: saved for stage in stages for key, saved in stage.plain.items()},
        [other for stage in stages for other in stage.others],
        {},
        buffers,
    )


def _prefix(index: int, layer: Mapping[str, Any], known: set[str]) -> str:
    """What stands before a layer's keys in the module: its number, or the name under which tied layers are kept."""
    own = f"{index}."
    if any(f"{own}{key}" in known for key in layer):
        return own
    tied: dict[str, set[str]] = {}
    for name in known:
        if name.startswith(_TIED):
            key, _, rest = name.removeprefix(_TIED).partition(".")
            tied.setdefault(key, set()).add(rest)
    fitting = [key for key, names in tied.items() if names <= layer.keys()]
    return f"{_TIED}{fitting[0]}." if len(fitting) == 1 else own


def _side_by_side(parts: Sequence[Partitioned], where: Place) -> Partitioned | None:
    if not parts:
        return None
    masters: dict[str, Stored] = {}
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in parts[0].groups]
    for part in parts:
        if len(part.groups) != len(groups):
            raise Damaged(f"{where}: the stages' optimizers have {len(groups)} and {len(part.groups)} param_groups")
        for group, more in zip(groups, part.groups, strict=True):
            group["params"] += [name for name in more["params"] if name not in masters]
        masters.update((name, tensor) for name, tensor in part.masters.items() if name not in masters)
        states.update((name, state) for name, state in part.states.items() if name not in states)
    wrapper = join_ranks([part.wrapper for part in parts], f"{where}: ")
    return Partitioned(masters, states, groups, wrapper)


def _tensor_parallel(columns: Sequence[Slice], where: Place) -> Slice:
    info = columns[0].others[0].get("universal_checkpoint_info")
    if info is None and columns[0].optimizer is not None:
        info = columns[0].optimizer.wrapper.get("universal_checkpoint_info")
    if not isinstance(info, Mapping):
        raise Unsupported(
            f"{where}: its tensors are parallel over {len(columns)} ranks, and no file says along which axes. Convert "
            "it with DeepSpeed's ds_to_universal.py and open what that writes"
        )
    join = _joiner(info, where)
    first = columns[0]
    trained = first.optimizer.masters if first.optimizer else {}
    model = {}
    for name, value in first.model.items():
        held = [column.model.get(name) for column in columns]
        model[name] = join(name, held) if name in trained or not all(alike(value, v) for v in held[1:]) else value
    part = first.optimizer
    if part is not None:
        others = [column.optimizer for column in columns if column.optimizer is not None]
        states = {
            name: {
                key: join(name, [o.states[name][key] for o in others])
                if isinstance(value, Stored) and value.shape
                else value
                for key, value in state.items()
            }
            for name, state in part.states.items()
        }
        wrapper = join_ranks([o.wrapper for o in others], f"{where}: ")
        part = Partitioned({}, states, part.groups, wrapper)
    return Slice(
        model,
        {name: join(name, [column.module[name] for column in columns]) for name in first.module},
        part,
        {key: saved for column in columns for key, saved in column.plain.items()},
        [other for column in columns for other in column.others],
        {},
        first.buffers,
    )


_PATTERNS = (
    "tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns",
    "parameter_with_2_sub_params_cat_dim_0", "parameter_to_average_patterns", "autotp_unsupported_parameter_patterns",
)  # fmt: skip


def _joiner(info: Mapping[str, Any], where: Place) -> Callable[[str, Sequence[Any]], Any]:
    """How shards become parameters, by the patterns that DeepSpeed's own converter goes by."""
    sub = [s["patterns"] if isinstance(s, Mapping) else s.get("patterns") for s in info.get(_SUB_PARAMS) or ()]
    lists = [*(info.get(key) for key in _PATTERNS), [text for texts in sub for text in texts or ()]]
    replicated, rows, vocabulary, halves, *refused = [_matcher(texts or (), where) for texts in lists]

    def join(name: str, shards: Sequence[Any]) -> Any:
        if not all(isinstance(shard, Stored) for shard in shards):
            raise Damaged(f"{where}: not every tensor-parallel rank has {name}")
        if any(matches(name) for matches in refused):
            raise Unsupported(
                f"{where}: {name} is made up from its {len(shards)} shards in a way that is not read (averages, "
                "fused parameters). Convert it with DeepSpeed's ds_to_universal.py and open what that writes"
            )
        if replicated(name):
            return shards[0]
        if halves(name):
            middles = [(shard, shard.shape[0] // 2) for shard in shards]
            first = [cut(shard, 0, middle) for shard, middle in middles]
            return concatenated([*first, *(cut(shard, middle, shard.shape[0]) for shard, middle in middles)])
        whole = concatenated(shards, 1 if rows(name) else 0)
        size = info.get("original_vocab_size")
        if isinstance(size, int) and vocabulary(name):
            return cut(whole, 0, size)
        return whole

    return join


_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""A repetition of a group that may itself repeat: such a pattern may take exponential time."""


def _matcher(texts: Sequence[Any], where: Place) -> Callable[[str], bool]:
    for text in texts:
        if not isinstance(text, str) or len(text) > 500 or _REPEATED_GROUP.search(text):
            raise Unsupported(f"{where}: the pattern {str(text)[:100]!r} of parameter names is not one that is tried")
    try:
        patterns = [re.compile(text) for text in texts]
    except re.error as error:
        raise Damaged(f"{where}: a pattern of parameter names is none: {error}") from None
    return lambda name: any(pattern.match(name) for pattern in patterns)
