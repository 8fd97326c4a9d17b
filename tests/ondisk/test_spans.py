"""File numbers as text: every list comes back, meshes are short whichever way they are turned, lies are refused."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ondisk.spans import PLAIN, expand, ranges, read
from tests.format_reader import indices_of


def mesh_numbers(sizes: tuple[int, ...], order: tuple[int, ...], kept: int, start: int = 0) -> list[int]:
    """The numbers of a row-major mesh, walked in another order of its axes; of the last axis ``kept`` only."""
    weights = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    walked = [range(sizes[axis] if axis != order[-1] else kept) for axis in order]
    return [start + sum(i * weights[axis] for i, axis in zip(at, order)) for at in product(*walked)]


@st.composite
def walks(draw: st.DrawFn) -> list[int]:
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    order = tuple(draw(st.permutations(range(len(sizes)))))
    return mesh_numbers(sizes, order, draw(st.integers(1, sizes[order[-1]])), draw(st.integers(0, 9999)))


lists = st.one_of(
    st.lists(st.integers(0, 300), max_size=200), walks(), st.tuples(walks(), walks()).map(lambda w: sum(w, []))
)


@given(lists)
def test_every_list_comes_back(numbers: list[int]) -> None:
    text = ranges(numbers)
    assert expand(text) == tuple(numbers) == tuple(indices_of(text))
    found = read(text)
    assert found.count == len(numbers) and found.largest == max(numbers, default=-1)
    assert [found.at(place) for place in range(found.count)] == numbers


@pytest.mark.parametrize("sizes, order", [
    ((128, 8), (1, 0)), ((256, 64), (1, 0)), ((16, 128, 8), (2, 0, 1)), ((4, 8, 16, 32), (3, 1, 2, 0)),
    ((16384,), (0,)),
])  # fmt: skip
def test_a_mesh_is_a_few_characters_whichever_way_it_is_walked(sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    for kept in (sizes[order[-1]], sizes[order[-1]] - 1):
        assert len(ranges(mesh_numbers(sizes, order, kept, 7))) < 40


def test_short_lists_are_left_in_plain_ranges() -> None:
    numbers = mesh_numbers((4, 4), (1, 0), 4)
    assert ranges(numbers) == ",".join(map(str, numbers)) and len(ranges(numbers)) <= PLAIN
    assert ranges([0, 2, 4, 5, 6]) == "0,2,4-6"


@pytest.mark.parametrize("text", [
    "x", "-", "1-", "-1", "3-1", "0+", "0+3", "0+3x", "0+x3", "0+0x3", "0+3x0", "+3x1", "0+3x1+", "0-3+2x1", "0+3x-1",
    "0+2x2-9", "0,", ",", " 0", "0 ", "0+2 x2", "٣", "0+٣x1", "0x2", "0\n",
])  # fmt: skip
def test_text_that_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of ranges"):
        read(text)


def test_a_list_without_end_costs_nothing_until_it_is_laid_out() -> None:
    found = read("7+999999999999x1+999999999999x3,5")
    assert found.count == 999999999999**2 + 1 and found.largest == 7 + 4 * 999999999998
    assert found.at(0) == 7 and found.at(1) == 10 and found.at(found.count - 1) == 5
