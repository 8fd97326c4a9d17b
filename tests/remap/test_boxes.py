"""A box of any arrangement of tensors is filled from boxes of them, as torch would arrange the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk.box import Box, whole
from holdfast.remap.boxes import Part, parts_of
from holdfast.remap.nodes import Saved, cast, cut, groups_of, joined, permuted, reshaped
from tests.remap.arrangements import Node, Tensors, arrangements, boxes, by_boxes, evaluated, narrowed


@given(arrangements(), st.data())
def test_any_box_of_any_arrangement(made: tuple[Node, Tensors], data: st.DataObject) -> None:
    node, tensors = made
    tensor = evaluated(node, tensors)
    assert node.shape == tuple(tensor.shape)
    for box in (whole(node.shape), data.draw(boxes(node.shape))):
        assert torch.equal(by_boxes(node, box, tensors), narrowed(tensor, box)), (node, box)


def test_a_whole_rotary_permutation_is_one_box() -> None:
    """Heads of two halves become pairs: what is read is one run, however many heads there are."""
    saved = Saved("q", "float32", (32 * 64, 512))
    node = reshaped(permuted(reshaped(saved, (32, 2, 32, 512)), (0, 2, 1, 3)), (32 * 64, 512))
    (part,) = parts_of(node, whole(node.shape), torch.empty(node.shape, device="meta"))
    assert isinstance(part, Part) and part.box.size == 32 * 64 * 512


def test_a_box_of_a_stack_touches_its_own_tensors_alone() -> None:
    experts = [reshaped(Saved(f"e{i}", "float32", (4, 8)), (1, 4, 8)) for i in range(64)]
    stack = joined(experts, 0)
    parts = [*parts_of(stack, Box((10, 0, 2), (3, 4, 2)), torch.empty((3, 4, 2), device="meta"))]
    assert [part.saved.name for part in parts if isinstance(part, Part)] == ["e10", "e11", "e12"]


def test_nodes_fold() -> None:
    a, b = Saved("a", "float32", (4, 6)), Saved("b", "float32", (2, 6))
    both = joined([a, b], 0)
    assert cut(both, 0, 0, 4) is a and cut(both, 0, 4, 6) is b
    assert joined([cut(a, 0, 0, 1), cut(a, 0, 1, 4)], 0) is a
    assert permuted(permuted(a, (1, 0)), (1, 0)) is a
    assert reshaped(reshaped(a, (2, 2, 6)), (4, 6)) is a
    assert cast(a, "float32") is a


def test_shapes_without_common_factors_go_by_one_axis() -> None:
    assert groups_of((6, 4), (8, 3)) is None
    node = reshaped(Saved("a", "int64", (6, 4)), (8, 3))
    tensors = {"a": torch.arange(24).reshape(6, 4)}
    assert torch.equal(by_boxes(node, whole((8, 3)), tensors), tensors["a"].reshape(8, 3))


def test_what_does_not_fit_is_named() -> None:
    a, b = Saved("a", "float32", (4, 6)), Saved("b", "bfloat16", (2, 6))
    with pytest.raises(Mismatch, match=r"b \(bfloat16 \[2, 6\]\) cannot be concatenated with a"):
        joined([a, b], 0)
    with pytest.raises(Mismatch, match=r"a \(float32 \[4, 6\]\) has no elements 2:5 on axis 0"):
        cut(a, 0, 2, 5)
    with pytest.raises(Mismatch, match="has 24 elements, which is not what shape"):
        reshaped(a, (5, -1))
    with pytest.raises(Mismatch, match="does not name each axis"):
        permuted(a, (0, 0))
    with pytest.raises(Mismatch, match="has no axis 2"):
        cut(a, 2, 0, 1)
    with pytest.raises(Unsupported, match="leave out one of the casts"):
        cast(cast(a, "bfloat16"), "float16")
