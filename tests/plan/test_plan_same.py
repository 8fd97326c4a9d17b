"""The plan against a plain list of every piece: the same pieces for every rank, and the same faults."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Mismatch
from holdfast.ondisk.box import Box
from holdfast.plan.layout import Layout, TensorLayout
from holdfast.plan.plan import make_plan
from holdfast.plan.spread import WHOLE, Boxes, Placed, Split, Spread, boxes_held
from tests.marks import examples
from tests.plan.plan_reference import reference
from tests.plan.test_plan import pieces

Told = tuple[list[Layout], list[int]]

MESHES = [(1,), (2,), (3,), (8,), (24,), (2, 2), (4, 6), (8, 3), (2, 3, 4), (4, 2, 3), (1, 7), (5, 1, 2)]
lengths = st.one_of(st.integers(0, 9), st.integers(10, 90), st.sampled_from([64, 4096, 5000]))
shapes = st.lists(lengths, max_size=3).filter(lambda shape: prod(shape) < 1 << 20).map(tuple)


@st.composite
def splits(draw: st.DrawFn, mesh: tuple[int, ...], dims: int) -> tuple[Split | None, ...]:
    if not dims:
        return (None,) * len(mesh)
    factors = [1, 1, 1, 2, 3, *(prod(mesh[axis:]) for axis in range(1, len(mesh)))]
    choice = st.one_of(st.none(), st.builds(Split, st.integers(0, dims - 1), st.sampled_from(factors)))
    return tuple(draw(choice) for _ in mesh)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int]:
    """Meshes of one shape over disjoint ranks (stages), perhaps in any order, and how many ranks there are."""
    size, stages = prod(draw(st.shared(st.sampled_from(MESHES), key="mesh"))), draw(st.integers(1, 3))
    extra = draw(st.integers(0, 2))
    order = list(range(size * stages + extra))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    return [tuple(order[size * n : size * (n + 1)]) for n in range(stages)], len(order)


@st.composite
def told(draw: st.DrawFn) -> Told:
    """What all ranks of some meshes tell: tensors of one mesh, of several, of all ranks, whole or in boxes."""
    mesh = draw(st.shared(st.sampled_from(MESHES), key="mesh"))
    stages, world = draw(groups())
    ranks: list[list[tuple[str, str, tuple[int, ...], Spread, bool]]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 6))):
        name, dtype = f"model/{number}", draw(st.sampled_from(["float32", "bfloat16", "bool"]))
        shape, first = draw(shapes), draw(st.integers(0, 5)) == 0
        kind = draw(st.sampled_from(["placed", "placed", "placed", "several", "whole", "mixed", "boxes", "missing"]))
        cut = draw(splits(mesh, len(shape)))
        on = stages if kind in ("several", "mixed") else [draw(st.sampled_from(stages))]
        placed = [Placed(members, mesh, cut) for members in on]
        if kind == "whole":
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                ranks[rank].append((name, dtype, shape, WHOLE, first))
            continue
        for spread in placed:
            everyone = draw(st.booleans()) and kind == "placed"
            for rank in range(world) if everyone else spread.ranks:
                ranks[rank].append((name, dtype, shape, spread, first))
        if kind == "mixed" and None not in cut:
            odd = [r for r in range(world) if r not in {m for spread in placed for m in spread.ranks}]
            for rank in odd:
                ranks[rank].append((name, dtype, shape, draw(st.sampled_from([WHOLE, placed[0]])), first))
        if kind == "boxes":
            for rank in placed[0].ranks:
                held = [(b.offsets, b.lengths) for b in boxes_held(shape, placed[0], rank)]
                entry = next(i for i, t in enumerate(ranks[rank]) if t[0] == name)
                ranks[rank][entry] = (name, dtype, shape, Boxes(((rank, tuple(held)),)), first)
        if kind == "missing":
            lost = draw(st.sampled_from(placed[0].ranks))
            ranks[lost] = [t for t in ranks[lost] if t[0] != name]
    return join(ranks)


def join(ranks: Sequence[Sequence[tuple[str, str, tuple[int, ...], Spread, bool]]]) -> Told:
    """Distinct layouts, and which of them each rank tells."""
    known: dict[bytes, int] = {}
    layouts: list[Layout] = []
    index = []
    for rank, tensors in enumerate(ranks):
        spreads = list(dict.fromkeys(spread for *_, spread, _ in tensors))
        rows = [
            TensorLayout(name, dtype, shape, spreads.index(spread), None,
                         0 not in shape and not boxes_held(shape, spread, rank), first)
            for name, dtype, shape, spread, first in tensors
        ]  # fmt: skip
        layout = Layout(rows, spreads, {}, {}, [], {})
        key = repr(layout).encode()
        if key not in known:
            known[key] = len(layouts)
            layouts.append(layout)
        index.append(known[key])
    return layouts, index


@settings(max_examples=examples(150))
@given(told())
def test_every_rank_writes_what_a_plain_list_says(case: Told) -> None:
    layouts, index = case
    try:
        expected = reference(layouts, index)
    except Mismatch as error:
        try:
            make_plan(layouts, index)
        except Mismatch as own:
            assert str(own) == str(error)
            return
        raise
    plan = make_plan(layouts, index)
    assert {n: (t.dtype, t.shape) for n, t in plan.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    for rank in range(len(index)):
        own: dict[str, list[Box]] = {}
        for name, tensor, box in plan.written_by(rank):
            assert tensor is plan.tensors[name]
            own.setdefault(name, []).append(box)
        wanted = {n: [box for box, owner in t.pieces if owner == rank] for n, t in expected.items()}
        assert {n: sorted(boxes) for n, boxes in own.items()} == {n: sorted(b) for n, b in wanted.items() if b}
        assert list(own) == [name for name in wanted if wanted[name]], "in name order of the state"
    assert {n: sorted(found) for n, found in pieces(plan).items()} == {n: sorted(t.pieces) for n, t in expected.items()}
