"""Random maps over random models: the way back, the proof by counting, boxes against whole tensors, and JSON.

The reference below applies each rule with torch alone, to tensors in which every element has its own number.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ondisk.box import Box, whole
from holdfast.remap import (
    Cast,
    Concatenate,
    Constant,
    Crop,
    Drop,
    Flatten,
    Pad,
    PermuteBlocks,
    Remap,
    Rename,
    Reorder,
    Split,
    Stack,
    Tie,
    Transpose,
    Unflatten,
    Unstack,
    Untie,
)  # fmt: skip
from holdfast.remap.nodes import Saved
from tests.marks import examples
from tests.remap.arrangements import Tensors, boxes, by_boxes, factors_of, narrowed

MADE_UP = -5
"""The number of elements that are in no source."""


def _at(name: str, index: int) -> str:
    return name.replace("{i}", str(index))


def _layers(pattern: str, tensors: Tensors) -> list[tuple[str, int]]:
    """The names that fit a pattern, each with its number."""
    if "{i}" not in pattern:
        return [(pattern, 0)] if pattern in tensors else []
    before, after = pattern.split("{i}")
    return [
        (name, int(name[len(before) : len(name) - len(after)]))
        for name in tensors
        if name.startswith(before) and name.endswith(after) and name[len(before) : len(name) - len(after)].isdigit()
    ]


def by_torch(rule: Any, tensors: Tensors) -> Tensors:
    """What one rule makes, by whole tensors."""
    left = dict(tensors)
    if isinstance(rule, Rename):
        for name, i in _layers(rule.source, tensors):
            left[_at(rule.target, i)] = left.pop(name)
    elif isinstance(rule, Concatenate):
        for _, i in _layers(rule.sources[0], tensors):
            left[_at(rule.target, i)] = torch.cat([left.pop(_at(one, i)) for one in rule.sources], rule.dim)
    elif isinstance(rule, Split):
        for name, i in _layers(rule.source, tensors):
            tensor = left.pop(name)
            sizes = list(rule.sizes) or [tensor.shape[rule.dim] // len(rule.targets)] * len(rule.targets)
            for target, part in zip(rule.targets, tensor.split(sizes, rule.dim), strict=True):
                left[_at(target, i)] = part
    elif isinstance(rule, Stack):
        there = sorted(_layers(rule.source, tensors), key=lambda pair: pair[1])
        if there:
            left[rule.target] = torch.stack([left.pop(name) for name, _ in there], rule.dim)
    elif isinstance(rule, Unstack):
        if rule.source in left:
            left |= {_at(rule.target, i): part for i, part in enumerate(left.pop(rule.source).unbind(rule.dim))}
    elif isinstance(rule, Reorder):
        there = {i: name for name, i in _layers(rule.name, tensors)}
        for name in there.values():
            del left[name]
        left |= {_at(rule.name, k): tensors[there[i]] for k, i in enumerate(rule.order)}
    elif isinstance(rule, Tie):
        left |= {_at(rule.target, i): tensors[name] for name, i in _layers(rule.source, tensors)}
    elif isinstance(rule, Untie):
        for name, _ in _layers(rule.target, tensors):
            del left[name]
    elif isinstance(rule, Drop):
        for name, _ in _layers(rule.name, tensors):
            del left[name]
    elif isinstance(rule, Constant):
        left[rule.name] = torch.full(rule.shape, MADE_UP)
    else:
        left |= {name: _changed(rule, tensors[name]) for name, _ in _layers(rule.name, tensors)}
    return left


def _changed(rule: Any, tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.shape
    if isinstance(rule, Transpose):
        return tensor.transpose(rule.dim0, rule.dim1)
    if isinstance(rule, PermuteBlocks):
        order = [rule.dim + k for k in rule.order]
        cut_up = tensor.unflatten(rule.dim, rule.blocks)
        rest = range(rule.dim + len(order), cut_up.dim())
        return cut_up.permute(*range(rule.dim), *order, *rest).reshape(shape)
    if isinstance(rule, Unflatten):
        return tensor.unflatten(rule.dim, rule.sizes)
    if isinstance(rule, Flatten):
        return tensor.flatten(rule.dim, rule.dim + len(rule.sizes) - 1)
    if isinstance(rule, Crop):
        return tensor.narrow(rule.dim, rule.before, shape[rule.dim] - rule.before - rule.after)
    if isinstance(rule, Pad):
        ends = [torch.full((*shape[: rule.dim], n, *shape[rule.dim + 1 :]), MADE_UP) for n in (rule.before, rule.after)]
        return torch.cat([ends[0], tensor, ends[1]], rule.dim)
    assert isinstance(rule, Cast)
    return tensor


@st.composite
def _sources(draw: st.DrawFn) -> Tensors:
    """Some families of tensors; those of layers have equal shapes."""
    tensors, at = {}, 0
    for family in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, 6]), max_size=3)))
        layers = draw(st.integers(1, 4))
        for name in [f"f{family}.{i}.w" for i in range(layers)] if draw(st.booleans()) else [f"f{family}.w"]:
            tensors[name] = torch.arange(at, at + prod(shape)).reshape(shape)
            at += prod(shape)
    return tensors


def _families(tensors: Tensors) -> dict[str, list[str]]:
    """Patterns, each with its names."""
    families: dict[str, list[str]] = {}
    for name in tensors:
        words = ["{i}" if word.isdigit() else word for word in name.split(".")]
        families.setdefault(".".join(words), []).append(name)
    return families


@st.composite
def _rule(draw: st.DrawFn, tensors: Tensors, fresh: str, *, invertible: bool) -> Any:
    """A rule that fits; None if the one drawn does not."""
    families = _families(tensors)
    pattern = draw(st.sampled_from(sorted(families)))
    names = families[pattern]
    shapes = {tuple(tensors[name].shape) for name in names}
    layered, shape = "{i}" in pattern, next(iter(shapes))
    new = f"{fresh}.{{i}}.w" if layered else f"{fresh}.w"
    whole_numbers = sorted(i for _, i in _layers(pattern, tensors)) == list(range(len(names)))
    kinds = ["rename", "tie"] if not invertible else ["rename"]
    if len(shapes) == 1:
        kinds += ["stack", "reorder"] if layered and whole_numbers else []
        kinds += ["transpose", "permute", "unflatten", "flatten", "split", "concatenate"] if shape else []
        kinds += [] if layered or not shape else ["unstack"]
        kinds += ["crop"] if shape and not invertible else []
        kinds += ["pad"] if shape else []
    kinds += [] if invertible else ["drop", "constant"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    if kind == "rename":
        return Rename(pattern, new)
    if kind == "tie":
        return Tie(pattern, new)
    if kind == "drop":
        return Drop(pattern) if len(families) > 1 else None
    if kind == "constant":
        return Constant(f"{fresh}.c", tuple(draw(st.lists(st.integers(0, 3), max_size=2))), "int64", MADE_UP)
    if kind == "stack":
        return Stack(pattern, f"{fresh}.w", draw(st.integers(0, len(shape))))
    if kind == "unstack":
        return Unstack(pattern, f"{fresh}.{{i}}.w", dim) if shape[dim] else None
    if kind == "reorder":
        if invertible:
            return Reorder(pattern, tuple(draw(st.permutations(range(len(names))))))
        return Reorder(pattern, tuple(draw(st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=5))))
    if kind == "transpose":
        return Transpose(pattern, dim, draw(st.integers(0, len(shape) - 1)))
    if kind == "permute":
        blocks = draw(st.permutations([*factors_of(shape[dim]), 1])) if shape[dim] else [0, 2]
        return PermuteBlocks(pattern, dim, tuple(blocks), tuple(draw(st.permutations(range(len(blocks))))))
    if kind == "unflatten":
        return Unflatten(
            pattern, dim, tuple(draw(st.permutations([*factors_of(shape[dim]), 1])) if shape[dim] else (2, 0))
        )
    if kind == "flatten":
        return Flatten(pattern, dim, shape[dim : dim + draw(st.integers(1, len(shape) - dim))])
    if kind == "split":
        cut = draw(st.integers(0, shape[dim]))
        return Split(
            pattern, [f"{fresh}a{new[len(fresh) :]}", f"{fresh}b{new[len(fresh) :]}"], dim, (cut, shape[dim] - cut)
        )
    if kind == "crop":
        before = draw(st.integers(0, shape[dim]))
        return Crop(pattern, dim, before, draw(st.integers(0, shape[dim] - before)))
    if kind == "pad":
        return Pad(pattern, dim, draw(st.integers(0, 2)), draw(st.integers(0, 2)), MADE_UP)
    others = [p for p, theirs in families.items() if p != pattern and _joins(tensors, names, theirs, pattern, p, dim)]
    if not others:
        return None
    other = draw(st.sampled_from(sorted(others)))
    sizes = tuple(tensors[families[p][0]].shape[dim] for p in (pattern, other))
    return Concatenate([pattern, other], new, dim, sizes)


def _joins(tensors: Tensors, names: list[str], theirs: list[str], pattern: str, other: str, dim: int) -> bool:
    if {i for _, i in _layers(pattern, tensors)} != {i for _, i in _layers(other, tensors)} or len(names) != len(
        theirs
    ):
        return False
    if ("{i}" in pattern) != ("{i}" in other) or len({tuple(tensors[name].shape) for name in theirs}) > 1:
        return False
    one, two = tuple(tensors[names[0]].shape), tuple(tensors[theirs[0]].shape)
    return len(one) == len(two) and one[:dim] + one[dim + 1 :] == two[:dim] + two[dim + 1 :]


@st.composite
def maps(draw: st.DrawFn, *, invertible: bool) -> tuple[Remap, Tensors, Tensors]:
    """A map, tensors, and what torch makes of them."""
    tensors = source = draw(_sources())
    rules = []
    for number in range(draw(st.integers(0, 6))):
        rule = draw(_rule(tensors, f"r{number}", invertible=invertible))
        if rule is None or sum(tensor.numel() for tensor in tensors.values()) > 3000:
            continue
        after = by_torch(rule, tensors)
        if any(tensor.dim() > 8 for tensor in after.values()):
            continue
        rules.append(rule)
        tensors = after
    return Remap(rules), source, tensors


def check_the_way_back(case: tuple[Remap, Tensors, Tensors]) -> None:
    remap, source, made = case
    nodes = remap.resolve(source)
    assert {name: node.shape for name, node in nodes.items()} == {name: tuple(t.shape) for name, t in made.items()}
    assert Remap.from_json(remap.to_json()) == remap
    assert remap.inverse().inverse() == remap
    back = (remap.inverse() @ remap).resolve(source)
    assert back.keys() == source.keys()
    for name, node in back.items():
        if node != Saved(name, "int64", tuple(source[name].shape)):
            assert torch.equal(by_boxes(node, whole(node.shape), source), source[name])


def check_boxes_and_proof(case: tuple[Remap, Tensors, Tensors], data: st.DataObject) -> None:
    remap, source, made = case
    assert Remap.from_json(remap.to_json()) == remap
    nodes = remap.resolve(source)
    assert nodes.keys() == made.keys()
    for name, tensor in made.items():
        assert nodes[name].shape == tuple(tensor.shape)
        assert torch.equal(by_boxes(nodes[name], whole(tensor.shape), source), tensor)
        if tensor.numel():
            box = data.draw(boxes(tuple(tensor.shape)))
            assert torch.equal(by_boxes(nodes[name], box, source), narrowed(tensor, box))
    proof = remap.check(source, made)
    total = sum(tensor.numel() for tensor in source.values())
    every = [tensor.reshape(-1) for tensor in made.values()]
    everything = torch.cat(every) if every else torch.empty(0, dtype=torch.int64)
    counts = torch.bincount(everything[everything >= 0], minlength=total)
    assert set(proof.made_up) == {name for name, tensor in made.items() if bool((tensor == MADE_UP).any())}
    assert set(proof.repeated) == {
        name for name, tensor in source.items() if bool((counts[tensor.reshape(-1)] > 1).any())
    }
    lost = torch.zeros(total, dtype=torch.int64)
    for text in proof.left_over:
        name, bracket, box = text.partition("[")
        if not bracket:
            lost[source[name].reshape(-1)] += 1
            continue
        spans = [tuple(map(int, span.split(":"))) for span in box[:-1].split(",") if span]
        part = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        lost[narrowed(source[name], part).reshape(-1)] += 1
    assert torch.equal(lost, (counts == 0).long())
    assert not proof.cast


@given(maps(invertible=True))
@settings(max_examples=examples(300))
def test_the_way_back(case: tuple[Remap, Tensors, Tensors]) -> None:
    check_the_way_back(case)


@given(maps(invertible=False), st.data())
@settings(max_examples=examples(300))
def test_boxes_and_proof(case: tuple[Remap, Tensors, Tensors], data: st.DataObject) -> None:
    check_boxes_and_proof(case, data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(maps(invertible=True))
@settings(max_examples=10_000)
def test_the_way_back_of_ten_thousand_maps(case: tuple[Remap, Tensors, Tensors]) -> None:
    check_the_way_back(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(maps(invertible=False), st.data())
@settings(max_examples=10_000)
def test_boxes_and_proof_of_ten_thousand_maps(case: tuple[Remap, Tensors, Tensors], data: st.DataObject) -> None:
    check_boxes_and_proof(case, data)
