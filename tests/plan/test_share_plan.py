"""Who wants the same bytes, and who reads what: whole, disjoint, balanced, at block borders, alike on every rank."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes, intersect, relative, runs, whole
from holdfast.ondisk.cells import Cells, TensorRecord, cells_for
from holdfast.ondisk.manifest import ranges
from holdfast.plan import share_plan
from holdfast.plan.share_plan import (
    ALIGN,
    Atom,
    Held,
    Item,
    Wants,
    as_told,
    atoms_of,
    may_be_shared,
    run_at,
    runs_of,
    shared_items,
    windows_of,
)
from holdfast.plan.spread import WHOLE, Boxes, Placed, Split, Whole, boxes_held
from holdfast.read.shared import share
from holdfast.read.shared.demand import Offer
from holdfast.read.shared.relay import seat_of
from holdfast.read.shared.share import who_shares
from tests.marks import examples

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_plan, "BLOCK", BLOCK)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Every element of a box, by its number in the whole tensor."""
    run, starts = runs(whole(shape), box)
    return [s + i for s in starts for i in range(run)]


def taken(atom: Atom, shape: tuple[int, ...]) -> list[int]:
    """Every element that an atom brings, by its number in the whole tensor."""
    found = []
    for part in flat_boxes(atom.share.lengths, atom.first, atom.first + atom.elements):
        at = tuple(map(int.__add__, part.offsets, atom.share.offsets))
        found += elements(shape, Box(at, part.lengths))
    return found


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[TensorRecord, Box]:
    """A saved tensor in any cells, and a box of it that is wanted."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    if shape and draw(st.booleans()):
        at = draw(st.integers(0, prod(shape)))
        boxes = [*flat_boxes(shape, 0, at), *flat_boxes(shape, at, prod(shape))]
    else:
        axes = []
        for n in shape:
            cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
            axes.append(list(zip(cuts, cuts[1:], strict=False)))
        boxes = [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in product(*axes)]
    cells, order = cells_for(shape, boxes)
    assert cells is None or isinstance(cells, list | Cells)
    files = draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    low = tuple(draw(st.integers(0, n - 1)) for n in shape)
    box = Box(low, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True)))
    dtype = draw(st.sampled_from(["uint8", "float32", "complex128"]))
    return TensorRecord(dtype, shape, cells, ",".join(ranges([f]) for f in files)), box


@settings(max_examples=examples(300))
@given(st.lists(cut_tensors(), min_size=1, max_size=3), st.integers(1, 6))
def test_atoms_are_all_bytes_once_in_blocks(told: list[tuple[TensorRecord, Box]], readers: int) -> None:
    records = [record for record, _ in told]
    items = [Item(i, box) for i, (_, box) in enumerate(told)]
    atoms = atoms_of(items, records)
    for number, (tensor, box) in enumerate(items):
        mine = [atom for atom in atoms if atom.item == number]
        brought = [e for atom in mine for e in taken(atom, records[tensor].shape)]
        assert sorted(brought) == sorted(elements(records[tensor].shape, box)), "all of it, and nothing twice"
        size = dtypes.itemsize(records[tensor].dtype)
        for atom in mine:
            assert atom.nbytes == atom.elements * size <= BLOCK and (atom.cell, atom.file) in records[tensor].boxes()
            if atom.at >= 0:
                assert atom.at * size // BLOCK == ((atom.at + atom.elements) * size - 1) // BLOCK, "of one block"
                inside = elements(atom.cell.lengths, relative(atom.share, atom.cell))
                assert inside[atom.first] == atom.at and inside[-1] - inside[0] == len(inside) - 1
    assert [atom.file for atom in atoms] == sorted(atom.file for atom in atoms)
    parts = runs_of(atoms, readers)
    assert [i for part in parts for i in part] == list(range(len(atoms))) and len(parts) == readers
    loads = [sum(atoms[i].nbytes for i in part) for part in parts]
    assert max(loads) - sum(loads) / readers <= BLOCK and sum(loads) / readers - min(loads) <= BLOCK
    for part in parts:
        windows = windows_of(atoms, part, 2 * BLOCK)
        assert [p.atom for window in windows for p in window] == list(part)
        for window in windows:
            ends = [0, *(p.offset + atoms[p.atom].nbytes for p in window)]
            assert ends[-1] <= 2 * BLOCK
            assert all(p.offset % ALIGN == 0 and p.offset >= end for p, end in zip(window, ends, strict=False))


@given(cut_tensors())
def test_one_run_or_several(told: tuple[TensorRecord, Box]) -> None:
    record, box = told
    for cell, _ in record.boxes():
        part = intersect(cell, box)
        if part is not None:
            _, starts = runs(whole(cell.lengths), relative(part, cell))
            assert run_at(part, cell) == (starts[0] if len(starts) == 1 else None)


MESHES = {
    "replicated": Placed(tuple(range(8)), (8,), (None,)),
    "sharded": Placed(tuple(range(8)), (8,), (Split(0),)),
    "hybrid": Placed(tuple(range(8)), (2, 4), (None, Split(0))),
    "columns": Placed((7, 6, 5, 4, 3, 2, 1, 0), (2, 2, 2), (Split(1), None, Split(0))),
    "strided": Placed(tuple(range(8)), (4, 2), (Split(0, 2), Split(0))),
}


def wants(rank: int, world: int) -> tuple[Wants, dict[Item, Whole | Placed | Held]]:
    """What a rank of this world wants: each kind of spread, and tensors that only some ranks name."""
    pair = tuple(r for r in range(8) if r // 2 == rank // 2)
    box = ((rank % 2 * 5, 0), (5, 6))
    spreads = {
        **MESHES, "whole": WHOLE, "held": Boxes(((rank, (box,)),)),
        "pairs": Placed(pair, (2,), (Split(0),)),  # a mesh of its own for each pair: replicas on the others
    }  # fmt: skip
    if rank in (1, 4, 6):
        spreads["some"] = WHOLE
    names = ["columns", "held", "hybrid", "pairs", "replicated", "sharded", "some", "strided", "whole"]
    table: list[Whole | Placed | Held] = []
    tensors, own = [], {}
    for name, spread in spreads.items():
        told = as_told(spread, rank)
        table.append(told)
        tensors.append((names.index(name), len(table) - 1))
        own.update({Item(names.index(name), b): told for b in boxes_held((10, 6), spread, rank)})
    return Wants("c", sorted(tensors), table), own


def test_holders_are_those_who_have_the_same_box() -> None:
    found = [wants(rank, 8) for rank in range(8)]
    distinct: list[Wants] = []
    for told, _ in found:
        if told not in distinct:
            distinct.append(told)
    wants_of = [distinct.index(told) for told, _ in found]
    for rank, (_, own) in enumerate(found):
        shared = shared_items(distinct, wants_of, rank, own)
        said = {item: holders for holders, items in shared.items() for item in items}
        for item in own:
            holders = tuple(r for r, (_, others) in enumerate(found) if item in others)
            assert said.get(item, (rank,)) == holders, (rank, item)
        assert all(items == sorted(items) for items in shared.values())
    for told, own in found:
        for item, spread in own.items():
            holders = [r for r, (_, others) in enumerate(found) if item in others]
            assert may_be_shared(spread, 8) or len(holders) == 1, "what may be shared is never called unshared"
        assert told.spreads


def test_ranks_of_another_checkpoint_share_nothing() -> None:
    told, own = Wants("one", [(0, 0)], [WHOLE]), {Item(0, whole((4,))): WHOLE}
    other = Wants("another", [(0, 0)], [WHOLE])
    assert shared_items([told, other], [0, 1, 0], 0, own) == {(0, 2): [Item(0, whole((4,)))]}
    assert shared_items([told, other], [0, 1, 1], 0, own) == {}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_seats(host_of: list[int]) -> None:
    holders = [r for r in range(len(host_of)) if r % 5 != 3]
    assume(len(holders) > 1)
    seats = {r: seat_of(holders, r, host_of) for r in holders}
    readers = [seat.reader for seat in seats.values() if seat.reader is not None]
    first = seats[holders[0]]
    assert sorted(readers) == list(range(first.hosts * first.lanes)), "each part has one reader"
    for rank, seat in seats.items():
        assert seat.beside[seat.place] == rank and {host_of[r] for r in seat.beside} == {host_of[rank]}
        assert bool(seat.across) == (seat.reader is not None)
        assert not seat.across or (seat.across[seat.host] == rank and len(seat.across) == seat.hosts)


def test_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "LEAST", 100)
    same = Offer("a", 10, 60, 80, "h")
    choice = who_shares([same, same])
    assert choice.name and choice.wants == ["a"] and choice.senders == [] and choice.host_of == [0, 0]
    assert choice.name != who_shares([same, same]).name, "each load connects under a name of its own"
    other = Offer("b", 10, 60, 80, "g")
    choice = who_shares([same, other, same])
    assert (choice.wants_of, choice.senders, choice.host_of) == ([0, 1, 0], [0, 1], [0, 1, 0])
    assert not who_shares([same]).name
    assert not who_shares([same, Offer()]).name, "a rank that has switched it off, or lays its tensors out oddly"
    assert not who_shares([Offer("a", 10, 40, 80, "h")] * 2).name, "too little"
    assert not who_shares([Offer("a", 10, 60, 8000, "h")] * 2).name, "too small a part"
    assert not who_shares([Offer("a", share.MOST_COMPARED, 60, 80, "h"), Offer("b", 1, 60, 80, "h")]).name
    assert not who_shares([Offer(str(r), 10, 60, 80, "h") for r in range(17)]).name, "no two want the same"
    warm = Offer("a", 10, 60, 80, "h", cached=True)
    assert who_shares([same, warm]).name and not who_shares([warm, warm]).name, "each copies pages of its own machine"


def test_sixteen_thousand_ranks() -> None:
    """Nothing is worked out for each rank and tensor: a rank asks for what it holds itself."""
    world, shards = 16384, 1024
    mesh = Placed(tuple(range(world)), (world // shards, shards), (None, Split(0)))
    shape = (shards * 4, 8)
    told = Wants("c", [(i, 0) for i in range(3000)], [mesh])
    box = boxes_held(shape, mesh, 5000)[0]
    own: dict[Item, Whole | Placed | Held] = {Item(i, box): mesh for i in range(3000)}
    ((holders, items),) = shared_items([told], [0] * world, 5000, own).items()
    assert holders == tuple(range(5000 % shards, world, shards)) and len(items) == 3000
