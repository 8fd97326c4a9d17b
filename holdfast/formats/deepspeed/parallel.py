"""Slices of a DeepSpeed run whose layers or tensors are parallel, joined into one.

`ranks` calls `join_slices`. Tensors are joined only along axes that a file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.alike import alike
from holdfast.formats.deepspeed.slice import Slice
from holdfast.formats.deepspeed.zero import Partitioned
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.sharded import join_ranks
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Stored, concatenated, cut
from holdfast.storage.place import Place

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


# Pipelines: each stage has other layers, and files of their own hold these as the module does


def _pipeline(stages: Sequence[Slice], files: Mapping[int, Stretch], where: Place) -> Slice:
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


# Tensor parallelism: patterns of names may say how the shards make up each parameter


def _tensor_parallel(columns: Sequence[Slice], where: Place) -> Slice:
    info = columns[0].others[0].get("universal_checkpoint_info")
    if info is None and columns[0].optimizer is not None:
        info = columns[0].optimizer.wrapper.get("universal_checkpoint_info")
    if not isinstance(info, Mapping):
        raise Unsupported(
            f"{where}: its tensors are parallel over {len(columns)} ranks, and no file says along which axes. Convert "
            "it with DeepSpeed's ds_to_universal.py and open what that writes"
        )
    join = _Joining(info, where)
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


class _Joining:
    """How shards become parameters, by the patterns that DeepSpeed's own converter goes by."""

    def __init__(self, info: Mapping[str, Any], where: Place) -> None:
        def patterns(texts: Any) -> list[re.Pattern[str]]:
            return [_pattern(text, where) for text in texts or ()]

        self.where = where
        self.replicated = patterns(info.get("tp_replicated_parameter_patterns"))
        self.rows = patterns(info.get("parameter_with_row_parallelism_patterns"))
        self.vocabulary = patterns(info.get("vocabulary_parameter_patterns"))
        self.halves = patterns(info.get("parameter_with_2_sub_params_cat_dim_0"))
        self.vocabulary_size = info.get("original_vocab_size")
        self.refused = [
            *patterns(info.get("parameter_to_average_patterns")),
            *patterns(info.get("autotp_unsupported_parameter_patterns")),
            *(p for sub in info.get("parameter_with_sub_params") or () for p in patterns(_patterns_of(sub))),
        ]

    def __call__(self, name: str, shards: Sequence[Any]) -> Any:
        if not all(isinstance(shard, Stored) for shard in shards):
            raise Damaged(f"{self.where}: not every tensor-parallel rank has {name}")
        if _any(self.refused, name):
            raise Unsupported(
                f"{self.where}: {name} is made up from its {len(shards)} shards in a way that is not read (averages, "
                "fused parameters). Convert it with DeepSpeed's ds_to_universal.py and open what that writes"
            )
        if _any(self.replicated, name):
            return shards[0]
        if _any(self.halves, name):
            rows = [shard.shape[0] for shard in shards]
            first = [cut(shard, 0, n // 2) for shard, n in zip(shards, rows, strict=True)]
            return concatenated([*first, *(cut(shard, n // 2, n) for shard, n in zip(shards, rows, strict=True))])
        whole = concatenated(shards, 1 if _any(self.rows, name) else 0)
        if _any(self.vocabulary, name) and type(self.vocabulary_size) is int:
            return cut(whole, 0, self.vocabulary_size)
        return whole


def _patterns_of(sub: Any) -> Any:
    return sub["patterns"] if isinstance(sub, Mapping) else sub.get("patterns")


def _any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.match(name) for pattern in patterns)


_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""A repetition of a group that may itself repeat: such a pattern may take exponential time."""


def _pattern(text: Any, where: Place) -> re.Pattern[str]:
    if not isinstance(text, str) or len(text) > 500 or _REPEATED_GROUP.search(text):
        raise Unsupported(f"{where}: the pattern {str(text)[:100]!r} of parameter names is not one that is tried")
    try:
        return re.compile(text)
    except re.error as error:
        raise Damaged(f"{where}: {text[:100]!r} is no pattern of parameter names: {error}") from None
