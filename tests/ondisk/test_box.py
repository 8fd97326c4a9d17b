"""Boxes against brute force: every claim is checked on arrays of element numbers."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ondisk import box as boxes
from holdfast.ondisk.box import Box, Grid, flat_boxes, grid_of, intersect, parse, runs, tiling_fault, whole
from tests.marks import examples

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...], smallest: int = 1) -> Box:
    """A box inside of ``shape``, at least ``smallest`` long on every axis."""
    starts, lengths = [], []
    for n in shape:
        start = draw(st.integers(0, n - smallest))
        starts.append(start)
        lengths.append(draw(st.integers(smallest, n - start)))
    return Box(tuple(starts), tuple(lengths))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int, smallest: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(box_in(shape, smallest)) for _ in range(count)]


@st.composite
def cut_points(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted({0, n, *draw(st.lists(st.integers(1, n - 1), max_size=3))})) if n > 1 else (0, n) for n in shape
    )


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it, made by cutting boxes in two; in any order."""
    shape = draw(shapes)
    pieces = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        index = draw(st.integers(0, len(pieces) - 1))
        piece = pieces[index]
        axes = [d for d, n in enumerate(piece.lengths) if n > 1]
        if not axes:
            continue
        d = draw(st.sampled_from(axes))
        at = draw(st.integers(1, piece.lengths[d] - 1))
        first = (*piece.lengths[:d], at, *piece.lengths[d + 1 :])
        second = (*piece.lengths[:d], piece.lengths[d] - at, *piece.lengths[d + 1 :])
        moved = (*piece.offsets[:d], piece.offsets[d] + at, *piece.offsets[d + 1 :])
        pieces[index : index + 1] = [Box(piece.offsets, first), Box(moved, second)]
    return shape, draw(st.permutations(pieces))


def cut_out(array: np.ndarray, box: Box) -> np.ndarray:
    """The elements of ``box``."""
    return array[(*(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)), ...)]


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """An array in which every element is its own row-major number."""
    return np.arange(prod(shape)).reshape(shape)


def counted(shape: tuple[int, ...], found: list[Box]) -> np.ndarray:
    """How many of the boxes hold each element."""
    times = np.zeros(shape, dtype=int)
    for box in found:
        cut_out(times, box)[...] += 1
    return times


@given(shape_and_boxes(1, smallest=0))
def test_text_and_back(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, [box] = case
    assert parse(str(box)) == box


def test_text_is_as_the_format_says() -> None:
    assert str(Box((1024, 0), (1024, 4096))) == "[1024:2048,0:4096]"
    assert parse("[]") == Box((), ())


@given(st.one_of(st.text(max_size=12), st.text("[]:,0123456789- _", max_size=12)))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        box = parse(text)
    except ValueError:
        return
    assert str(box) == text and all(n >= 0 for n in box.lengths)


@pytest.mark.parametrize(
    "text", ["[5:2]", "[ 1:2]", "[1_0:20]", "[-1:2]", "[01:2]", "[1:2,]", "[1:2:3]", "[1]", "[٣:٤]", "[1:2]\n", "1:2"]
)
def test_near_boxes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@given(shape_and_boxes(2))
def test_intersect_and_relative(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [a, b] = case
    numbers = numbered(shape)
    common = set(cut_out(numbers, a).flat) & set(cut_out(numbers, b).flat)
    found = intersect(a, b)
    if not common:
        assert found is None
        return
    assert found is not None and set(cut_out(numbers, found).flat) == common
    inner = cut_out(cut_out(numbers, a), boxes.relative(found, a))
    assert np.array_equal(inner, cut_out(numbers, found))


@given(shapes, st.data())
def test_inside_and_covers(shape: tuple[int, ...], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(-1, n)) for n in shape)
    lengths = tuple(data.draw(st.integers(-1, n + 1)) for n in shape)
    box = Box(offsets, lengths)
    assert boxes.inside(box, shape) == all(o >= 0 <= n and o + n <= s for o, n, s in zip(offsets, lengths, shape))
    assert not boxes.inside(box, (*shape, 3))
    assert boxes.covers(whole(shape), shape)
    assert boxes.covers(box, shape) == (lengths == shape)


@settings(max_examples=examples(300))
@given(shapes, st.data())
def test_flat_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = flat_boxes(shape, start, stop)
    numbers = numbered(shape)
    met = [n for box in found for n in cut_out(numbers, box).flat]
    assert met == list(range(start, stop)), "in row-major order, each contiguous"
    assert all(box.size for box in found)
    assert len(found) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=examples(300))
@given(shape_and_boxes(1), st.data())
def test_runs(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, [outer] = case
    offsets, lengths = [], []
    for o, n in zip(outer.offsets, outer.lengths, strict=True):
        at = data.draw(st.integers(0, n - 1))
        offsets.append(o + at)
        lengths.append(data.draw(st.integers(1, n - at)))
    inner = Box(tuple(offsets), tuple(lengths))
    numbers = numbered(shape)
    place = {number: at for at, number in enumerate(cut_out(numbers, outer).flat)}
    expected = [place[number] for number in cut_out(numbers, inner).flat]
    run, starts = runs(outer, inner)
    assert [s + i for s in starts for i in range(run)] == expected
    breaks = sum(b != a + 1 for a, b in zip(expected, expected[1:]))
    assert len(starts) == breaks + 1, "runs are as long as can be"


def test_runs_of_whole_rows_are_one() -> None:
    assert runs(whole((8, 3, 5)), Box((2, 0, 0), (4, 3, 5))) == (60, [30])
    assert runs(whole((8, 3, 5)), Box((2, 1, 0), (2, 2, 5))) == (10, [35, 50])
    assert runs(whole((8, 3, 5)), Box((2, 1, 1), (1, 1, 2))) == (2, [36])
    assert runs(whole(()), whole(())) == (1, [0])


@given(shapes, st.data())
def test_grid_and_what_touches_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Grid(data.draw(cut_points(shape)))
    cells = list(grid.boxes())
    assert (counted(shape, cells) == 1).all()
    assert len(cells) == prod(grid.counts)
    assert cells == sorted(cells, key=lambda b: b.offsets), "counted row-major"
    box = data.draw(box_in(shape, smallest=0))
    met = dict(grid.touching(box))
    assert all(cells[number] == cell for number, cell in met.items())
    numbers = numbered(shape)
    wanted = set(cut_out(numbers, box).flat)
    expected = {number for number, cell in enumerate(cells) if wanted & set(cut_out(numbers, cell).flat)}
    assert set(met) == expected


@given(shapes, st.data())
def test_grid_of_finds_every_grid_in_any_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Grid(data.draw(cut_points(shape)))
    assert grid_of(shape, data.draw(st.permutations(list(grid.boxes())))) == grid


@given(tilings())
def test_grid_of_is_none_or_exact(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, pieces = case
    grid = grid_of(shape, pieces)
    starts = [{p.offsets[d] for p in pieces} for d in range(len(shape))]
    if grid is not None:
        assert sorted(grid.boxes()) == sorted(pieces)
    else:
        assert len(pieces) != prod(map(len, starts)), "a tiling with as many boxes as starts allow is a grid"


@given(st.integers(0, 40), st.integers(1, 50))
def test_regular_cuts(length: int, cell: int) -> None:
    cuts = boxes.regular_cuts(length, cell)
    lengths = [b - a for a, b in zip(cuts, cuts[1:])]
    assert sum(lengths) == length and cuts[0] == 0
    assert all(n == cell for n in lengths[:-1]) and all(0 < n <= cell for n in lengths)


@settings(max_examples=examples(300))
@given(tilings(), st.data())
def test_tiling_fault_against_counting(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, pieces = case
    assert tiling_fault(shape, pieces) is None
    spoiled = list(pieces)
    match data.draw(st.sampled_from(["drop", "double", "move", "add", "grow"])):
        case "drop":
            spoiled.pop(data.draw(st.integers(0, len(pieces) - 1)))
        case "double":
            spoiled.append(data.draw(st.sampled_from(pieces)))
        case "add":
            spoiled.append(data.draw(box_in(shape)))
        case "grow":
            index = data.draw(st.integers(0, len(pieces) - 1))
            spoiled[index] = whole(shape)
        case "move":
            index = data.draw(st.integers(0, len(pieces) - 1))
            offsets = tuple(o + data.draw(st.integers(-1, 1)) for o in pieces[index].offsets)
            spoiled[index] = Box(offsets, pieces[index].lengths)
    fault = tiling_fault(shape, spoiled)
    if not all(boxes.inside(b, shape) for b in spoiled):
        assert fault is not None and "outside" in fault
        return
    times = counted(shape, spoiled)
    if (times > 1).any():
        assert fault is not None and "overlap" in fault
    elif (times < 1).any():
        assert fault is not None and f"{int((times < 1).sum())} of {prod(shape)} elements" in fault
    else:
        assert fault is None


def test_tilings_of_nothing_and_of_one_number() -> None:
    assert tiling_fault((0, 3), []) is None
    assert tiling_fault((0, 3), [Box((0, 0), (0, 3))]) is None
    assert tiling_fault((), [whole(())]) is None
    assert tiling_fault((), []) is not None
    assert "overlap" in str(tiling_fault((), [whole(()), whole(())]))
    assert "outside" in str(tiling_fault((2,), [Box((0, 0), (2, 1))]))


def test_a_flat_tensor_shared_by_thousands_tiles() -> None:
    """Shares of a flat tensor begin and end in the middle of rows: thousands of boxes, and no grid."""
    shape, ranks = (128, 256, 1000), 3997
    ends = [prod(shape) * i // ranks for i in range(ranks + 1)]
    shares = [box for start, stop in pairwise(ends) for box in flat_boxes(shape, start, stop)]
    assert len(shares) > 2 * ranks
    assert tiling_fault(shape, shares) is None
    assert "in no box" in str(tiling_fault(shape, shares[1:]))
    assert "overlap" in str(tiling_fault(shape, [*shares, Box((7, 7, 7), (1, 1, 1))]))


def test_what_does_not_come_apart_is_compared() -> None:
    """Five boxes around each other, which no cut from edge to edge divides."""
    pinwheel = [Box(*b) for b in (((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)))]
    middle = Box((1, 1), (1, 1))
    assert tiling_fault((3, 3), [*pinwheel, middle]) is None
    assert tiling_fault((3, 3), pinwheel) == "1 of 9 elements are in no box"
    assert "overlap" in str(tiling_fault((3, 3), [*pinwheel, Box((1, 1), (2, 1))]))
