"""Cutting: every byte of every tensor in exactly one unit and one share, and blocks that are whole where it matters."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.export import draft
from holdfast.export.draft import Draft, Span, packed, share_of, slabs, units_of
from holdfast.export.selection import Leaf
from holdfast.ondisk.box import Box, flat_boxes, whole
from holdfast.ondisk.cells import TensorRecord, cells_for

_SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "BLOCK", 64)
    monkeypatch.setattr(draft, "WINDOW", 128)


@given(_SHAPES, st.integers(1, 40))
def test_slabs_are_runs_in_order(shape: tuple[int, ...], limit: int) -> None:
    at = 0
    for box in slabs(shape, limit):
        assert box.size <= limit and flat_boxes(shape, at, at + box.size) == [box]
        at += box.size
    assert at == prod(shape)


def _record(shape: tuple[int, ...], dtype: str, rows: int) -> TensorRecord:
    """A tensor saved in cells of so many rows."""
    if not shape:
        return TensorRecord(dtype, shape, None, "0")
    starts = range(0, shape[0], rows)
    boxes = [Box((a, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - a), *shape[1:])) for a in starts]
    cells, order = cells_for(shape, boxes)
    return TensorRecord(dtype, shape, cells, ",".join("0" for _ in order))


@st.composite
def _drafts(make: Any) -> Draft:
    pick = make
    sums = pick(st.sampled_from(["blocks", "crc32", "none"]))
    spans: list[Span] = []
    sizes: dict[str, int] = {}
    for number in range(pick(st.integers(1, 6))):
        path = f"file {pick(st.integers(0, 1)) or 0}"
        if spans and path < spans[-1].path:
            path = spans[-1].path
        shape = pick(_SHAPES)
        saved, dtype = pick(st.sampled_from(["uint8", "float32", "float64"])), None
        dtype = pick(st.sampled_from([saved, "float32"]))
        record = _record(shape, saved, pick(st.integers(1, 9)))
        leaf = Leaf(f"t{number}", f"t{number}", record, dtype, pick(st.booleans()))
        for box in slabs(shape, pick(st.integers(30, 200))) if sums == "crc32" else [whole(shape)]:
            begin = sizes.get(path, 0) + pick(st.integers(0, 20))
            spans.append(Span(leaf, box, path, begin))
            sizes[path] = begin + spans[-1].nbytes
    return Draft(sizes, spans, sums, lambda sums: iter(()))


@given(_drafts(), st.integers(1, 5))
def test_units_and_shares_cover_every_span_once(plan: Draft, size: int) -> None:
    units = units_of(plan)
    assert [u.number for u in units] == list(range(len(units)))
    at = {n: (span.start, span.offset) for n, span in enumerate(plan.spans)}
    for unit in units:
        assert {atom.path for atom in unit.atoms} == {unit.path}
        assert unit.atoms[-1].end - unit.atoms[0].offset <= draft.WINDOW
        assert unit.nbytes == sum(atom.nbytes for atom in unit.atoms)
        for atom in unit.atoms:
            assert at[atom.span] == (atom.start, atom.offset) and atom.stop > atom.start
            at[atom.span] = (atom.stop, atom.end)
    for n, span in enumerate(plan.spans):
        assert at[n] == (span.start + span.box.size, span.offset + span.nbytes)
    shares = [share_of(units, rank, size) for rank in range(size)]
    assert [u for share in shares for u in share] == units


@given(_drafts())
def test_atoms_end_where_blocks_end(plan: Draft) -> None:
    for unit in units_of(plan):
        for atom in unit.atoms:
            span, leaf = plan.spans[atom.span], atom.leaf
            ends = {span.start + span.box.size}
            if plan.sums == "blocks":
                step = draft.BLOCK // leaf.itemsize
                ends |= set(range(span.start, span.start + span.box.size, step))
            elif leaf.runs is not None and leaf.dtype == leaf.record.dtype:
                step = draft.BLOCK // leaf.itemsize
                ends |= {e for run in leaf.runs for e in [*range(run.start, run.stop, step), run.stop]}
            else:
                continue
            assert atom.stop in ends


def test_shares_are_about_equal() -> None:
    leaf = Leaf("w", "w", TensorRecord("uint8", (64000,), None, "0"), "uint8", False)
    units = units_of(Draft({"f": 64000}, [Span(leaf, whole((64000,)), "f", 0)], "none", lambda sums: iter(())))
    sizes = [sum(u.nbytes for u in share_of(units, rank, 4)) for rank in range(4)]
    assert sum(sizes) == 64000 and max(sizes) - min(sizes) <= 2 * draft.WINDOW


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_packed_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    leaves = [Leaf(str(i), "", TensorRecord("uint8", (n,), None, ""), "uint8", False) for i, n in enumerate(sizes)]
    files = packed(leaves, limit)
    assert [x for file in files for x in file] == leaves
    assert all(sum(x.nbytes for x in file) <= limit or len([x for x in file if x.nbytes]) == 1 for file in files)
