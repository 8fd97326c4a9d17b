"""States of many ranks that are not here: names, shapes and spreads of large models, as `collect` would find them.

Called by the simulator for any rank of any mesh; a test holds them against torch's own DTensors.
Never allocates an element: every tensor lies on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from holdfast.ondisk.box import Box, whole
from holdfast.ondisk.dtypes import itemsize, torch_dtype
from holdfast.plan.layout import Layout
from holdfast.plan.spread import WHOLE, Placed, Split, placed_runs
from holdfast.state.leaves import Collected, Entry, Group, View, layout_of

Shape = tuple[int, ...]

SETTINGS = {
    "lr": 0.001, "betas": {"$": "tuple", "v": [0.9, 0.999]}, "eps": 1e-08, "weight_decay": 0.01, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


class Parameter(NamedTuple):
    """A parameter: ``cut`` is the axis that tensor parallelism cuts; ``expert`` has the experts as its first axis."""

    name: str
    shape: Shape
    layer: int
    cut: int | None = None
    expert: bool = False


@dataclass(frozen=True)
class Model:
    """Parameters of ``dtype`` in ``depth`` layers, with both moments of AdamW in float32 and its step."""

    name: str
    depth: int
    parameters: tuple[Parameter, ...]
    dtype: str = "float32"

    @property
    def tensors(self) -> int:
        """Of the whole state: each parameter, its two moments and its step."""
        return 4 * len(self.parameters)

    @property
    def nbytes(self) -> int:
        elements = sum(prod(p.shape) for p in self.parameters)
        return elements * (itemsize(self.dtype) + 8) + 4 * len(self.parameters)


def llama(name: str, *, depth: int, width: int, inner: int, kv: int, vocabulary: int, dtype: str = "float32") -> Model:
    """A dense transformer, its parameters named as in torchtitan; ``kv`` is the width of keys, all heads together."""

    def layer(i: int) -> Iterator[Parameter]:
        at = f"layers.{i}."
        for part, shape, cut in (
            ("attention.wq.weight", (width, width), 0),
            ("attention.wk.weight", (kv, width), 0),
            ("attention.wv.weight", (kv, width), 0),
            ("attention.wo.weight", (width, width), 1),
            ("feed_forward.w1.weight", (inner, width), 0),
            ("feed_forward.w2.weight", (width, inner), 1),
            ("feed_forward.w3.weight", (inner, width), 0),
            ("attention_norm.weight", (width,), None),
            ("ffn_norm.weight", (width,), None),
        ):
            yield Parameter(at + part, shape, i, cut)

    return Model(name, depth, (
        Parameter("tok_embeddings.weight", (vocabulary, width), 0, 0),
        *(parameter for i in range(depth) for parameter in layer(i)),
        Parameter("norm.weight", (width,), depth - 1),
        Parameter("output.weight", (vocabulary, width), depth - 1, 0),
    ), dtype)  # fmt: skip


def mixture(
    name: str, *, depth: int, width: int, experts: int, hidden: int, dense: int, query: int, heads: int,
    vocabulary: int, dtype: str = "bfloat16",
) -> Model:  # fmt: skip
    """A mixture of experts with latent attention, one shared expert, the first layer dense; experts in one tensor."""

    def layer(i: int) -> Iterator[Parameter]:
        at = f"layers.{i}."
        parts: list[tuple[str, Shape, bool]] = [
            ("attention.wq_a.weight", (query, width), False),
            ("attention.q_norm.weight", (query,), False),
            ("attention.wq_b.weight", (heads * 192, query), False),
            ("attention.wkv_a.weight", (576, width), False),
            ("attention.kv_norm.weight", (512,), False),
            ("attention.wkv_b.weight", (heads * 256, 512), False),
            ("attention.wo.weight", (width, heads * 128), False),
            ("attention_norm.weight", (width,), False),
            ("ffn_norm.weight", (width,), False),
        ]
        if i == 0:
            parts += [
                (f"feed_forward.w{n}.weight", (width, dense) if n == 2 else (dense, width), False) for n in (1, 2, 3)
            ]
        else:
            parts += [
                ("moe.router.gate.weight", (experts, width), False),
                ("moe.experts.w1", (experts, hidden, width), True),
                ("moe.experts.w2", (experts, width, hidden), True),
                ("moe.experts.w3", (experts, hidden, width), True),
                ("moe.shared_experts.w1.weight", (hidden, width), False),
                ("moe.shared_experts.w2.weight", (width, hidden), False),
                ("moe.shared_experts.w3.weight", (hidden, width), False),
            ]
        for part, shape, expert in parts:
            yield Parameter(at + part, shape, i, expert=expert)

    return Model(name, depth, (
        Parameter("tok_embeddings.weight", (vocabulary, width), 0),
        *(parameter for i in range(depth) for parameter in layer(i)),
        Parameter("norm.weight", (width,), depth - 1),
        Parameter("output.weight", (vocabulary, width), depth - 1),
    ), dtype)  # fmt: skip


LLAMA = llama("Llama 3 405B", depth=126, width=16384, inner=53248, kv=1024, vocabulary=128256)
MIXTURE = mixture(
    "MoE 1T", depth=61, width=7168, experts=384, hidden=2048, dense=18432, query=1536, heads=64, vocabulary=163840
)


@dataclass(frozen=True)
class Sharding:
    """How ``world`` ranks share a model, the outermost axis first: stages, replicas, shards, tensor or experts.

    Meshes and placements are those of FSDP2, of torch's tensor parallelism under it and of torchtitan's experts:
    cut by ``experts`` on their first axis, by the rest of the shards on their second.
    """

    name: str
    world: int
    stages: int = 1
    replicas: int = 1
    tensor: int = 1
    experts: int = 1

    @property
    def stage_size(self) -> int:
        return self.world // self.stages

    @property
    def shards(self) -> int:
        return self.stage_size // self.replicas // self.tensor

    def stage_of(self, layer: int, depth: int) -> int:
        """Layers go to stages in equal runs, as near as can be."""
        return layer * self.stages // depth

    def placed(self, parameter: Parameter, stage: int) -> Placed:
        """The spread of a parameter of one stage."""
        first = stage * self.stage_size
        axes: list[tuple[int, Split | None]] = [(self.replicas, None)] if self.replicas > 1 else []
        if parameter.expert:
            axes += [(self.shards // self.experts, Split(1)), (self.experts, Split(0))]
        elif self.tensor > 1:
            strides = self.tensor if parameter.cut == 0 else 1
            axes += [
                (self.shards, Split(0, strides)),
                (self.tensor, None if parameter.cut is None else Split(parameter.cut)),
            ]
        else:
            axes += [(self.shards, Split(0))]
        ranks = tuple(range(first, first + self.stage_size))
        return Placed(ranks, tuple(n for n, _ in axes), tuple(split for _, split in axes))

    def extents(self, parameter: Parameter, position: int) -> Shape:
        """How much of each axis the rank at this place of its stage holds: which of them hold nothing is told apart."""
        lengths = list(parameter.shape)
        if parameter.expert:
            shard = position % self.shards
            lengths[0] = _chunk(lengths[0], self.experts, shard % self.experts)
            lengths[1] = _chunk(lengths[1], self.shards // self.experts, shard // self.experts)
            return tuple(lengths)
        shard, tensor = divmod(position % (self.shards * self.tensor), self.tensor)
        if parameter.cut is not None:
            lengths[parameter.cut] = _chunk(lengths[parameter.cut], self.tensor, tensor)
        lengths[0] = _chunk(lengths[0], self.shards, shard)
        return tuple(lengths)


def _chunk(length: int, parts: int, index: int) -> int:
    size = -(-length // parts)
    return max(min(size * (index + 1), length) - size * index, 0)


def fsdp(world: int) -> Sharding:
    return Sharding("FSDP", world)


def hsdp(world: int) -> Sharding:
    """Shards over up to 256 ranks, and as many replicas as there are such groups; at least two."""
    return Sharding("HSDP", world, replicas=max(world // 256, 2))


def three_d(world: int) -> Sharding:
    """Tensor parallelism inside of a node of 8, up to 16 pipeline stages, FSDP over the rest."""
    return Sharding("TP × PP × FSDP", world, stages=min(16, max(world // 16, 1)), tensor=min(8, world))


def expert(world: int) -> Sharding:
    """Experts over up to 64 ranks, FSDP over up to 2,048, replicas beyond."""
    return Sharding("EP × HSDP", world, replicas=max(world // 2048, 1), experts=min(64, world))


View_ = Callable[[Shape, torch.dtype], torch.Tensor]


def _on_meta(lengths: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(lengths, dtype=dtype, device="meta")


@dataclass
class World:
    """A model on all ranks of a sharding: what each of them would collect, and tell the others."""

    model: Model
    sharding: Sharding
    _spreads: dict[tuple[object, ...], Placed] = field(default_factory=dict)
    _boxes: dict[tuple[Shape, int, int], list[Box]] = field(default_factory=dict)

    def stage(self, rank: int) -> int:
        return rank // self.sharding.stage_size

    def parameters(self, stage: int) -> list[Parameter]:
        """Those of one stage."""
        sharding, depth = self.sharding, self.model.depth
        return [p for p in self.model.parameters if sharding.stage_of(p.layer, depth) == stage]

    def _spread(self, parameter: Parameter, stage: int) -> Placed:
        # One object for all tensors that are placed alike, as `tensors.placed` hands it out.
        key = (stage, parameter.expert, parameter.cut)
        if key not in self._spreads:
            self._spreads[key] = self.sharding.placed(parameter, stage)
        return self._spreads[key]

    def boxes(self, parameter: Parameter, rank: int) -> list[Box]:
        """What a rank of the parameter's stage holds of it."""
        spread = self._spread(parameter, self.stage(rank))
        key = (parameter.shape, id(spread), rank)
        if key not in self._boxes:
            axes = placed_runs(parameter.shape, spread, rank - spread.ranks[0])
            found = [Box(tuple(r.start for r in runs), tuple(r.length for r in runs)) for runs in product(*axes)]
            self._boxes[key] = [box for box in found if box.size]
        return self._boxes[key]

    def collected(self, rank: int, memory: View_ = _on_meta) -> Collected:
        """The leaves of a rank's state, as `collect` finds them; ``memory`` makes its views."""
        stage, state = self.stage(rank), Collected()
        parameters = self.parameters(stage)

        def add(name: str, dtype: str, parameter: Parameter) -> None:
            kind = torch_dtype(dtype)
            views = [View(box, memory(box.lengths, kind)) for box in self.boxes(parameter, rank)]
            state.entries[name] = Entry(name, dtype, parameter.shape, self._spread(parameter, stage), views)

        for parameter in parameters:
            add(f"model/{parameter.name}", self.model.dtype, parameter)
        for parameter in parameters:
            at = f"optimizer/state/{parameter.name}"
            step = View(whole(()), memory((), torch.float32))
            state.entries[f"{at}/step"] = Entry(f"{at}/step", "float32", (), WHOLE, [step])
            add(f"{at}/exp_avg", "float32", parameter)
            add(f"{at}/exp_avg_sq", "float32", parameter)
        state.values["step"] = 1000
        state.groups["optimizer"] = [Group(dict(SETTINGS), [p.name for p in parameters])]
        return state

    @cached_property
    def layout_of(self) -> list[int]:
        """For each rank the number of its layout: ranks of one stage differ only in what they hold nothing of."""
        known: dict[tuple[object, ...], int] = {}
        kinds = [
            list({(p.shape, p.cut, p.expert): p for p in self.parameters(stage)}.values())
            for stage in range(self.sharding.stages)
        ]
        size, found = self.sharding.stage_size, []
        for rank in range(self.sharding.world):
            stage, position = divmod(rank, size)
            empty = tuple(0 in self.sharding.extents(p, position) for p in kinds[stage])
            found.append(known.setdefault((stage, empty), len(known)))
        return found

    @cached_property
    def tellers(self) -> list[int]:
        """The first rank of each layout."""
        first: dict[int, int] = {}
        for rank, index in enumerate(self.layout_of):
            first.setdefault(index, rank)
        return list(first.values())

    @cached_property
    def layouts(self) -> list[Layout]:
        """All distinct layouts."""
        return [layout_of(self.collected(rank)) for rank in self.tellers]
