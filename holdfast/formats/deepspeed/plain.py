"""DeepSpeed's optimizers for half precision without ZeRO: masters without names, matched to the weights they round to.

`slice` calls `named`. A master is a parameter's only if its ends round to the ends of that parameter, and of no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.events import log
from holdfast.formats.alike import alike
from holdfast.formats.deepspeed.zero import Partitioned, cut_vector, spread
from holdfast.formats.stored import Stored, flat
from holdfast.ondisk import dtypes
from holdfast.storage.place import Place

_END = 16
"""How many elements of a tensor's beginning and end are compared."""


class Named(NamedTuple):
    """The optimizer by parameter, and the tied weights: each with the parameter that has its master."""

    optimizer: Partitioned
    tied: dict[str, str]


def named(
    saved: Mapping[str, Any], module: Mapping[str, Any], buffers: Sequence[str] | frozenset[str], where: Place
) -> Named | None:
    """The optimizer that DeepSpeed wraps for fp16 or bf16, by parameter; None if it is another or does not match."""
    inner, vectors = saved.get("optimizer_state_dict"), saved.get("fp32_groups_flat")
    masters = [[vector] for vector in vectors] if isinstance(vectors, list) else saved.get("fp32_groups")
    if not isinstance(inner, Mapping) or not isinstance(masters, list):
        return None
    weights = {
        name: value
        for name, value in module.items()
        if name not in buffers and isinstance(value, Stored) and value.dtype in ("float16", "bfloat16") and value.pieces
    }
    matching = _Matching(weights)
    groups = [[matching.names_in(master, whole=not isinstance(vectors, list)) for master in group] for group in masters]
    if any(names is None for group in groups for names in group):
        log.warning(
            "%s: its fp32 weights have no names, and several parameters could be theirs: left as they are", where
        )
        return None
    optimizer = Partitioned({}, {}, [], {})
    for group, names, hyper in zip(masters, groups, inner["param_groups"], strict=True):
        for id_, master, held in zip(hyper["params"], group, names, strict=True):
            shapes = {name: weights[name].shape for name in held or ()}
            optimizer.masters.update(cut_vector(shapes, [0] * len(shapes), str(where), [flat(master)]))
            states: dict[str, dict[str, Any]] = {name: {} for name in shapes}
            for key, value in inner["state"].get(id_, {}).items():
                if isinstance(value, Stored) and value.shape == master.shape:
                    for name, tensor in cut_vector(shapes, [0] * len(shapes), str(where), [flat(value)]).items():
                        states[name][key] = tensor
                else:
                    spread(states, key, value, where)
            optimizer.states.update((name, state) for name, state in states.items() if state)
        optimizer.groups.append({**hyper, "params": [name for each in names for name in each or ()]})
    consumed = ("optimizer_state_dict", "fp32_groups_flat", "fp32_groups")
    optimizer.wrapper.update((key, value) for key, value in saved.items() if key not in consumed)
    return Named(optimizer, matching.tied)


class _Matching:
    """Which weights masters round to. A weight is matched once: the next master may have its twin."""

    def __init__(self, weights: Mapping[str, Stored]) -> None:
        self.weights = weights
        self.tied: dict[str, str] = {}
        self._kinds = sorted({tensor.dtype for tensor in weights.values()})
        self._taken: set[str] = set()
        self._by_head: dict[tuple[str, bytes], list[str]] = {}
        for name, tensor in weights.items():
            self._by_head.setdefault((tensor.dtype, tensor.pieces[0][1].read(0, 2)), []).append(name)

    def names_in(self, master: Stored, *, whole: bool) -> list[str] | None:
        """The parameters that follow each other in a master, or the only one (``whole``); None if that is not clear."""
        names: list[str] = []
        at, end = 0, prod(master.shape)
        while at < end:
            fitting = [
                name
                for kind in self._kinds
                for name in self._by_head.get((kind, _rounded(master, at, 1, kind)), ())
                if name not in self._taken and self._fits(name, master, at, whole)
            ]
            # Several of the same bytes are tied weights; if they are not, the next master finds none that is left.
            if not fitting or not all(alike(self.weights[fitting[0]], self.weights[name]) for name in fitting[1:]):
                return None
            self._taken.update(fitting)
            self.tied.update(dict.fromkeys(fitting[1:], fitting[0]))
            names.append(fitting[0])
            at += prod(self.weights[fitting[0]].shape)
        return names

    def _fits(self, name: str, master: Stored, at: int, whole: bool) -> bool:
        weight = self.weights[name]
        numel, stretch = prod(weight.shape), weight.pieces[0][1]
        if at + numel > prod(master.shape) or (whole and weight.shape != master.shape):
            return False
        count = min(numel, _END)
        ends = ((0, stretch.read(0, 2 * count)), (numel - count, stretch.read(2 * (numel - count), 2 * count)))
        return all(_rounded(master, at + begin, count, weight.dtype) == end for begin, end in ends)


def _rounded(master: Stored, begin: int, count: int, kind: str) -> bytes:
    """Some elements of a master in the type of the weights."""
    size = dtypes.itemsize(master.dtype)
    data = bytearray(master.pieces[0][1].read(begin * size, count * size))
    rounded = torch.frombuffer(data, dtype=dtypes.torch_dtype(master.dtype)).to(dtypes.torch_dtype(kind))
    return bytes(rounded.view(torch.uint8).tolist())
