"""A mesh that need not exist: its axes by name, and how each tensor of a checkpoint would be cut over it.

The cut is torch's: a DTensor's axis in ceiling-sized chunks, FSDP after tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from holdfast.plan.spread import WHOLE, Placed, Split, Spread

SHARDED = ("fsdp", "shard", "dp_shard", "zero3")
TENSOR = ("tp", "tensor")
REPLICATED = ("ddp", "dp", "replicate", "dp_replicate")
"""Names of mesh axes, as people call them: those over which FSDP cuts, tensor parallelism cuts, and none does."""


MOST = 1 << 16
"""Ranks that a plan is made for: each is looked at."""


class Rule(NamedTuple):
    """Tensors whose names fit ``pattern`` are cut on axis ``dim`` by mesh axes of ``kind``; not at all if it is None.

    ``kind`` is ``"fsdp"`` or ``"tp"``, or empty for both.
    """

    pattern: str
    kind: str
    dim: int | None


# Megatron's way, under the names that most models have: what makes more is cut by its outputs, what takes them by its
# inputs; embeddings and the head over the vocabulary.
_COLUMNS = (
    "q", "k", "v", "qkv", "wq", "wk", "wv", "wqkv", "query_key_value", "in", "c_attn", "c_fc", "gate", "up", "gate_up",
    "fc1", "w1", "w3", "dense_h_to_4h",
)  # fmt: skip
_ROWS = ("o", "wo", "out", "proj", "c", "dense", "down", "fc2", "w2", "dense_4h_to_h")
_VOCABULARY = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "lm_head", "embed_out", "output")
_MODULE = re.compile(r"(?:^|[./])(?P<module>[a-z_0-9]+)[./](?P<kind>weight|bias)(?:$|[./])")


@dataclass(frozen=True)
class Mesh:
    """``names`` and ``sizes`` of its axes, row-major: the last one runs fastest over the ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def kind(self, axis: int) -> str:
        """``"fsdp"``, ``"tp"``, or empty for an axis that replicates."""
        name = self.names[axis]
        return "fsdp" if name in SHARDED else "tp" if name in TENSOR else ""

    def spread(self, name: str, shape: Sequence[int], rules: Sequence[Rule] = ()) -> Spread:
        """How a tensor lies over the ranks, by the first of the ``rules`` that says it, else by what is usual.

        FSDP cuts every tensor on its first axis, and tensor parallelism those that Megatron cuts, known by the names of
        their modules; what has no axis, and what no mesh axis cuts, is whole on every rank. Raises ValueError for a
        rule that names an axis that the tensor does not have.
        """
        dims = [self._dim(name, shape, self.kind(axis), rules) for axis in range(len(self.names))]
        if all(dim is None for dim in dims):
            return WHOLE
        splits: list[Split | None] = []
        for axis, dim in enumerate(dims):
            # FSDP cuts what tensor parallelism has left: torch says so by the strides of the axes to its right.
            later = [n for other, n in zip(dims[axis + 1 :], self.sizes[axis + 1 :], strict=True) if other == dim]
            strides = prod(later) if self.kind(axis) == "fsdp" else 1
            splits.append(None if dim is None else Split(dim, strides))
        return Placed(tuple(range(self.ranks)), self.sizes, tuple(splits))

    def _dim(self, name: str, shape: Sequence[int], kind: str, rules: Sequence[Rule]) -> int | None:
        if not kind or not shape:
            return None
        for rule in rules:
            if rule.kind in ("", kind) and fnmatchcase(name, rule.pattern):
                if rule.dim is not None and not -len(shape) <= rule.dim < len(shape):
                    raise ValueError(f"{name} of shape {list(shape)} has no axis {rule.dim}, as {rule.pattern!r} says")
                return None if rule.dim is None else rule.dim % len(shape)
        return 0 if kind == "fsdp" else _usual(name, shape)


def _usual(name: str, shape: Sequence[int]) -> int | None:
    """The axis on which tensor parallelism cuts a tensor of that name in most models; None if on none."""
    match = _MODULE.search(name)
    if match is None:
        return None
    module, bias = match["module"].removesuffix("_proj"), match["kind"] == "bias"
    if module in _COLUMNS or (module in _VOCABULARY and not bias):
        return 0
    return 1 if module in _ROWS and not bias and len(shape) > 1 else None


def parse_mesh(text: str, ranks: int | None = None) -> Mesh:
    """``"fsdp=32,tp=2"`` as a mesh; if it is empty one of FSDP over all ``ranks``. Raises ValueError, saying why."""
    if not text.strip():
        if ranks is None:
            raise ValueError('say which mesh: --ranks 64, or --mesh "fsdp=32,tp=2"')
        text = f"fsdp={ranks}"
    names, sizes = [], []
    known = (*SHARDED, *TENSOR, *REPLICATED)
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ValueError(
                f"{part.strip()!r} is no axis of a mesh: name=size, of {', '.join(known)}. The stages of a pipeline "
                "load their own layers: plan one at a time with --tensors"
            )
        if not re.fullmatch("[0-9]{1,18}", size) or not int(size):
            raise ValueError(f"mesh axis {name} has size {size!r}, which is no number of ranks")
        if name in names:
            raise ValueError(f"mesh axis {name} is there twice")
        names.append(name)
        sizes.append(int(size))
    mesh = Mesh(tuple(names), tuple(sizes))
    if mesh.ranks > MOST:
        raise ValueError(f"the mesh {mesh} has {mesh.ranks:,} ranks: a plan is made for at most {MOST:,}")
    if ranks is not None and mesh.ranks != ranks:
        raise ValueError(f"the mesh {mesh} has {mesh.ranks} ranks, not {ranks}")
    return mesh


def parse_rule(text: str) -> Rule:
    """``"*.wo.weight*=1"``, ``"*bias=replicate"`` or ``"*.w*=fsdp:1"`` as a rule. Raises ValueError."""
    pattern, _, what = text.rpartition("=")
    kind, _, where = what.rpartition(":")
    if not pattern or kind not in ("", "fsdp", "tp") or not re.fullmatch(r"replicate|-?\d{1,3}", where):
        raise ValueError(
            f"{text!r} is no rule: GLOB=DIM cuts by tensor parallelism on that axis, GLOB=fsdp:DIM by FSDP, "
            "GLOB=replicate (or GLOB=tp:replicate) leaves whole"
        )
    if where == "replicate":
        return Rule(pattern, kind, None)
    return Rule(pattern, kind or "tp", int(where))
