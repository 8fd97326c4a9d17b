"""Spreads against torch: the boxes that we say a rank holds are the elements that torch's own placements give it."""

from __future__ import annotations

from itertools import product
from math import prod
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.ondisk.box import Box, tiling_fault, whole
from holdfast.plan.spread import WHOLE, Boxes, Placed, Split, axis_runs, boxes_held, coordinate, placed_runs
from tests.marks import examples

Case = tuple[tuple[int, ...], Placed, list[Placement]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, a spread over a mesh of up to three axes, and torch's placements for the same."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    splits: list[Split | None] = []
    placements: list[Placement] = []
    for _ in mesh:
        kind = draw(st.sampled_from(["split", "split", "strided", "replicate"]))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "replicate":
            splits.append(None)
            placements.append(Replicate())
        elif kind == "split":
            splits.append(Split(dim))
            placements.append(Shard(dim))
        else:
            factor = draw(st.integers(2, 4))
            splits.append(Split(dim, factor))
            placements.append(_StridedShard(dim, split_factor=factor))
    ranks = tuple(draw(st.permutations(range(10, 10 + prod(mesh)))))
    return shape, Placed(ranks, mesh, tuple(splits)), placements


def local_numbers(shape: tuple[int, ...], spread: Placed, placements: list[Placement], position: int) -> torch.Tensor:
    """The local tensor that torch's own placements cut out of a tensor of element numbers.

    Strides that torch itself decodes as an order of cutting (FSDP over tensor parallel) are cut in that order.
    """
    local = torch.arange(prod(shape)).reshape(shape)
    where = coordinate(spread.shape, position)
    for axis, placement in ordered(spread.shape, placements):
        local = placement._split_tensor(local, spread.shape[axis], with_padding=False)[0][where[axis]]
    return local


def ordered(mesh_shape: tuple[int, ...], placements: list[Placement]) -> list[tuple[int, Placement]]:
    found: list[tuple[int, Placement]] = []
    for dim in sorted({p.dim for p in placements if not isinstance(p, Replicate)}):
        # Each tensor axis by itself: torch decodes all of a tensor's axes or none.
        alone = [p if not isinstance(p, Replicate) and p.dim == dim else Replicate() for p in placements]
        mesh = SimpleNamespace(size=lambda axis: mesh_shape[axis], ndim=len(mesh_shape), shape=mesh_shape)
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(alone), mesh)
        if order is None:
            found += [(axis, p) for axis, p in enumerate(alone) if not isinstance(p, Replicate)]
        else:
            found += [(axis, Shard(dim)) for entry in order for axis in entry.mesh_dims]
    return found


def cut_out(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    numbers = torch.arange(prod(shape)).reshape(shape)
    return numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]


@settings(max_examples=examples(300))
@given(cases())
def test_every_rank_holds_what_torch_gives_it(case: Case) -> None:
    shape, spread, placements = case
    for position, rank in enumerate(spread.ranks):
        local = local_numbers(shape, spread, placements, position)
        held = boxes_held(shape, spread, rank)
        assert all(box.size for box in held)
        found = sorted(n for box in held for n in cut_out(shape, box).flatten().tolist())
        assert found == sorted(local.flatten().tolist())


@settings(max_examples=examples(200))
@given(cases())
def test_runs_say_where_each_box_lies_in_the_local_tensor(case: Case) -> None:
    shape, spread, placements = case
    for position in range(len(spread.ranks)):
        local = local_numbers(shape, spread, placements, position)
        axes = placed_runs(shape, spread, position)
        assert tuple(sum(run.length for run in axis) for axis in axes) == tuple(local.shape)
        for runs in product(*axes):
            box = Box(tuple(r.start for r in runs), tuple(r.length for r in runs))
            part = local[tuple(slice(r.local, r.local + r.length) for r in runs)]
            assert torch.equal(part, cut_out(shape, box))


@settings(max_examples=examples(200))
@given(cases())
def test_shape_and_offset_are_those_of_torch(case: Case) -> None:
    few, spread, placements = case
    # Even cuts alone: of uneven strided ones this function of torch says other boxes than torch itself cuts
    # (11 rows over 3 x 3: it gives row 10 to the third shard of the first part, torch cuts it off for the last).
    shape = tuple(n * prod(spread.shape) for n in few)
    for position in range(len(spread.ranks)):
        where = list(coordinate(spread.shape, position))
        lengths, offsets = _compute_local_shape_and_global_offset(shape, spread.shape, where, placements)
        axes = placed_runs(shape, spread, position)
        assert tuple(sum(run.length for run in axis) for axis in axes) == tuple(lengths)
        if 0 not in lengths:
            assert tuple(axis[0].start for axis in axes) == tuple(offsets)


@settings(max_examples=examples(200))
@given(cases())
def test_all_ranks_together_hold_the_tensor(case: Case) -> None:
    shape, spread, _ = case
    holders: dict[Box, int] = {}
    for rank in spread.ranks:
        for box in boxes_held(shape, spread, rank):
            holders[box] = holders.get(box, 0) + 1
    assert tiling_fault(shape, list(holders)) is None
    replicas = prod(n for n, split in zip(spread.shape, spread.splits, strict=True) if split is None)
    assert set(holders.values()) <= {replicas}


@given(cases())
def test_coordinates_are_row_major(case: Case) -> None:
    _, spread, _ = case
    table = torch.arange(len(spread.ranks)).reshape(spread.shape)
    for position in range(len(spread.ranks)):
        assert int(table[coordinate(spread.shape, position)]) == position


def test_tensor_parallel_under_fsdp() -> None:
    """The example of torch's own text: 8 rows over dp x tp, cut by tp first."""
    spread = Placed((0, 1, 2, 3), (2, 2), (Split(0, 2), Split(0)))
    rows = [[(b.offsets[0], b.lengths[0]) for b in boxes_held((8, 8), spread, rank)] for rank in range(4)]
    assert rows == [[(0, 2)], [(4, 2)], [(2, 2)], [(6, 2)]]


def test_a_strided_axis_alone_leaves_several_boxes() -> None:
    spread = Placed((5, 7), (2,), (Split(0, 2),))
    assert boxes_held((8, 3), spread, 5) == [Box((0, 0), (2, 3)), Box((4, 0), (2, 3))]
    assert boxes_held((8, 3), spread, 7) == [Box((2, 0), (2, 3)), Box((6, 0), (2, 3))]
    assert [(r.start, r.length, r.local) for r in axis_runs(8, ((2, 1, 2),))] == [(2, 2, 0), (6, 2, 2)]


def test_neighbouring_runs_are_one() -> None:
    assert [(r.start, r.length, r.local) for r in axis_runs(8, ((1, 0, 4),))] == [(0, 8, 0)]


@given(cases(), st.integers(0, 30))
def test_ranks_outside_of_the_mesh_hold_nothing(case: Case, rank: int) -> None:
    shape, spread, _ = case
    if rank not in spread.ranks:
        assert boxes_held(shape, spread, rank) == []


def test_whole_and_explicit() -> None:
    assert boxes_held((3, 4), WHOLE, 99) == [whole((3, 4))]
    assert boxes_held((), WHOLE, 0) == [whole(())]
    assert boxes_held((3, 0), WHOLE, 0) == []
    spread = Boxes(((1, (((0, 0), (2, 4)), ((2, 0), (0, 4)))), (4, (((2, 0), (1, 4)),))))
    assert boxes_held((3, 4), spread, 1) == [Box((0, 0), (2, 4))]
    assert boxes_held((3, 4), spread, 4) == [Box((2, 0), (1, 4))]
    assert boxes_held((3, 4), spread, 0) == []
