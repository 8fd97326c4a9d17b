"""Random arrangements of elements for property tests, and what they are, computed by torch on whole tensors."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st

from holdfast.ondisk.box import Box
from holdfast.remap.boxes import Fill, parts_of
from holdfast.remap.nodes import Cast, Cut, Filled, Joined, Node, Permuted, Saved, cut, joined, permuted, reshaped

Tensors = dict[str, torch.Tensor]


def evaluated(node: Node, tensors: Tensors) -> torch.Tensor:
    """The tensor that a node stands for."""
    if isinstance(node, Saved):
        return tensors[node.name]
    if isinstance(node, Filled):
        return torch.full(node.shape, node.value, dtype=torch.int64)
    if isinstance(node, Joined):
        return torch.cat([evaluated(part, tensors) for part in node.parts], node.dim)
    inner = evaluated(node.of, tensors)
    if isinstance(node, Cut):
        return inner.narrow(node.dim, node.start, node.stop - node.start)
    if isinstance(node, Permuted):
        return inner.permute(node.dims)
    return inner if isinstance(node, Cast) else inner.reshape(node.shape)


def by_boxes(node: Node, box: Box, tensors: Tensors) -> torch.Tensor:
    """A box of the tensor that a node stands for, filled part by part."""
    out = torch.full(box.lengths, -7, dtype=torch.int64)
    for part in parts_of(node, box, out):
        if isinstance(part, Fill):
            part.view.fill_(part.value)
        else:
            part.view.copy_(narrowed(tensors[part.saved.name].reshape(part.shape), part.box))
    return out


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def tensors_of(nodes: list[Saved]) -> Tensors:
    return {n.name: torch.arange(i * 1000, i * 1000 + prod(n.shape)).reshape(n.shape) for i, n in enumerate(nodes)}


def factors_of(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high + 1 - low for low, high in spans))


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[Node, Tensors]:
    """A node, and the tensors that it is made of."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    saved = [Saved(f"s{i}", "int64", shape) for i in range(draw(st.integers(1, 3)))]
    node = joined(saved, draw(st.integers(0, len(shape) - 1)))
    for step in draw(st.lists(st.sampled_from("cprrpj"), max_size=6)):
        ndim = len(node.shape)
        if prod(node.shape) > 2000 or not ndim:
            break
        dim = draw(st.integers(0, ndim - 1))
        if step == "c":
            part = draw(boxes(node.shape))
            node = cut(node, dim, part.offsets[dim], part.ends[dim])
        elif step == "p":
            node = permuted(node, draw(st.permutations(range(ndim))))
        elif step == "r":
            factors = draw(st.permutations([*factors_of(prod(node.shape)), 1]))
            cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
            node = reshaped(node, [prod(factors[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)])
        else:
            node = joined([node, Filled("int64", node.shape, -3), node], dim)
    return node, tensors_of(saved)
