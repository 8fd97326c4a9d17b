"""The plan, for meshes that nobody could start here: whole, disjoint, written by holders, in even shares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, inside, intersect, tiling_fault, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import ranges
from holdfast.plan.layout import Layout, TensorLayout, digest_of
from holdfast.plan.owners import CUT_SHARE, SMALLEST_CUT, deal, pieces_of
from holdfast.plan.plan import Plan, make_plan
from holdfast.plan.spread import WHOLE, Boxes, Placed, Split, Spread, boxes_held
from tests.marks import examples


@dataclass
class Rank:
    """What one rank would tell; `told` makes layouts of it."""

    tensors: dict[str, tuple[str, tuple[int, ...], Spread]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unheld: dict[str, str] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    per_rank: list[str] = field(default_factory=list)

    def told(self, rank: int) -> Layout:
        spreads: list[Spread] = []
        tensors = []
        for name, (dtype, shape, spread) in self.tensors.items():
            if spread not in spreads:
                spreads.append(spread)
            empty = not boxes_held(shape, spread, rank) and 0 not in shape
            alias = self.aliases.get(name)
            tensors.append(TensorLayout(name, dtype, shape, spreads.index(spread), alias, empty and alias is None))
        return Layout(tensors, spreads, self.unheld, self.containers, self.per_rank, {})


def joined(ranks: Sequence[Rank]) -> tuple[list[Layout], list[int]]:
    """Each distinct layout once, and which of them every rank told, as a save does it."""
    layouts: dict[str, Layout] = {}
    index = []
    for number, rank in enumerate(ranks):
        layout = rank.told(number)
        digest = digest_of(layout)
        layouts.setdefault(digest, layout)
        index.append(list(layouts).index(digest))
    return list(layouts.values()), index


def plan_of(ranks: Sequence[Rank]) -> Plan:
    return make_plan(*joined(ranks))


def pieces(plan: Plan) -> dict[str, list[tuple[Box, int]]]:
    """Every piece of each tensor with its owner, in the manifest's order."""
    return {
        name: [(whole(tensor.shape), owned.owners[0])] if 0 in tensor.shape
        else TensorRecord(tensor.dtype, tensor.shape, owned.cells, ranges(owned.owners)).boxes()
        for name, tensor, owned in plan.owned()
    }  # fmt: skip


def check(ranks: Sequence[Rank], plan: Plan) -> None:
    """Every tensor's pieces tile it, and each is written by a rank that holds all of it."""
    names = {name for rank in ranks for name in rank.tensors}
    assert set(plan.tensors) | set(plan.aliases) == names | {a for r in ranks for a in r.unheld}
    assert not set(plan.tensors) & set(plan.aliases)
    assert set(plan.aliases.values()) <= set(plan.tensors)
    found = pieces(plan)
    for name, tensor in plan.tensors.items():
        if 0 in tensor.shape:
            [(box, owner)] = found[name]
            assert box == whole(tensor.shape) and name in ranks[owner].tensors
            continue
        assert tiling_fault(tensor.shape, [box for box, _ in found[name]]) is None
        for box, owner in found[name]:
            assert box.size > 0
            dtype, shape, spread = ranks[owner].tensors[name]
            assert (dtype, shape) == (tensor.dtype, tensor.shape)
            assert any(intersect(held, box) == box for held in boxes_held(shape, spread, owner)), (name, box, owner)


def bytes_by_rank(plan: Plan, world: int) -> list[int]:
    total = Counter(dict.fromkeys(range(world), 0))
    for name, found in pieces(plan).items():
        for box, owner in found:
            total[owner] += box.size * dtypes.itemsize(plan.tensors[name].dtype)
    return [total[rank] for rank in range(world)]


def even(loads: Sequence[int], within: float = 1.05) -> bool:
    return max(loads) <= within * sum(loads) / len(loads)


DTYPES = ["float32", "bfloat16", "int64", "bool", "complex128"]
lengths = st.one_of(st.integers(0, 9), st.integers(10, 400))
small_shapes = st.lists(lengths, max_size=3).map(tuple)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, ...]:
    """A mesh of up to three axes and a few hundred ranks."""
    return draw(st.sampled_from([
        (1,), (2,), (3,), (8,), (64,), (256,), (2, 2), (4, 8), (8, 3), (16, 16), (2, 4, 3), (4, 8, 8),
        (1, 7), (5, 1, 5),
    ]))  # fmt: skip


@st.composite
def splits_on(draw: st.DrawFn, mesh: tuple[int, ...], dims: int) -> tuple[Split | None, ...]:
    if not dims:
        return (None,) * len(mesh)
    choice = st.one_of(st.none(), st.builds(Split, st.integers(0, dims - 1), st.sampled_from([1, 1, 1, 2, 3])))
    return tuple(draw(choice) for _ in mesh)


@settings(max_examples=examples(60))
@given(meshes(), st.data())
def test_any_placement_on_any_mesh(mesh: tuple[int, ...], data: st.DataObject) -> None:
    world = prod(mesh)
    state: dict[str, tuple[str, tuple[int, ...], Spread]] = {}
    for i in range(data.draw(st.integers(1, 4))):
        shape = data.draw(small_shapes)
        spread: Spread = Placed(tuple(range(world)), mesh, data.draw(splits_on(mesh, len(shape))))
        if data.draw(st.integers(0, 4)) == 0:
            spread = WHOLE
        state[f"model/{i}"] = (data.draw(st.sampled_from(DTYPES)), shape, spread)
    ranks = [Rank(state) for _ in range(world)]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert {name: (t.dtype, t.shape) for name, t in plan.tensors.items()} == {n: s[:2] for n, s in state.items()}


@st.composite
def explicit(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """A shape that is cut into boxes, each given to one or more ranks; some ranks get none, some several."""
    shape = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    pieces = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axes = [d for d, n in enumerate(piece.lengths) if n > 1]
        if not axes:
            pieces.append(piece)
            continue
        d = draw(st.sampled_from(axes))
        at = draw(st.integers(1, piece.lengths[d] - 1))
        for start, length in ((0, at), (at, piece.lengths[d] - at)):
            offsets, sizes = list(piece.offsets), list(piece.lengths)
            offsets[d], sizes[d] = offsets[d] + start, length
            pieces.append(Box(tuple(offsets), tuple(sizes)))
    world = draw(st.integers(1, 12))
    held: list[list[Box]] = [[] for _ in range(world)]
    for piece in pieces:
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=4)):
            held[rank].append(piece)
    return shape, held


def boxes_of(rank: int, held: Sequence[Box]) -> Boxes:
    return Boxes(((rank, tuple((b.offsets, b.lengths) for b in held)),))


@settings(max_examples=examples(100))
@given(explicit(), st.sampled_from(DTYPES))
def test_explicit_boxes(case: tuple[tuple[int, ...], list[list[Box]]], dtype: str) -> None:
    shape, held = case
    ranks = [Rank({"x/t": (dtype, shape, boxes_of(rank, boxes))}) for rank, boxes in enumerate(held)]
    check(ranks, plan_of(ranks))


def transformer(spread: dict[str, Spread], layers: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...], Spread]]:
    state: dict[str, tuple[str, tuple[int, ...], Spread]] = {}
    for i in layers:
        for part, shape in {"wq": (512, 512), "wo": (512, 512), "w1": (1376, 512), "w2": (512, 1376)}.items():
            state[f"model/layers.{i}.{part}"] = ("float32", shape, spread[part])
        state[f"model/layers.{i}.norm"] = ("float32", (512,), spread["norm"])
    return state


def all_on(placed: Placed) -> dict[str, Spread]:
    return dict.fromkeys(("wq", "wo", "w1", "w2", "norm"), placed)


def test_fsdp_of_512_ranks() -> None:
    ranks = [Rank(transformer(all_on(Placed(tuple(range(512)), (512,), (Split(0),))), range(4))) for _ in range(512)]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert all(len(found) <= 512 for found in pieces(plan).values())
    assert {owner for found in pieces(plan).values() for _, owner in found} == set(range(512))


def test_hsdp_shares_each_shard_among_its_replicas() -> None:
    spread = all_on(Placed(tuple(range(256)), (8, 32), (None, Split(0))))
    ranks = [Rank(transformer(spread, range(8))) for _ in range(256)]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert even(bytes_by_rank(plan, 256))


def test_tensor_parallel_under_fsdp_of_256_ranks() -> None:
    members = tuple(range(256))
    column = Placed(members, (32, 8), (Split(0, 8), Split(0)))
    row = Placed(members, (32, 8), (Split(0), Split(1)))
    norm = Placed(members, (32, 8), (Split(0), None))
    spread: dict[str, Spread] = {"wq": column, "w1": column, "wo": row, "w2": row, "norm": norm}
    ranks = [Rank(transformer(spread, range(3))) for _ in members]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert even(bytes_by_rank(plan, 256))


def test_pipeline_stages_with_names_of_their_own() -> None:
    """4 stages x 8 data-parallel ranks; the embedding is on the first stage and the last."""
    ranks = []
    for rank in range(32):
        stage = rank // 8
        members = tuple(range(8 * stage, 8 * stage + 8))
        state = transformer(all_on(Placed(members, (8,), (None,))), range(2 * stage, 2 * stage + 2))
        if stage in (0, 3):
            state["model/embed"] = ("float32", (4096, 64), WHOLE)
        ranks.append(Rank(state, per_rank=["rng"], containers={"lrs": "list"}))
    plan = plan_of(ranks)
    check(ranks, plan)
    assert plan.per_rank == ["rng"] and plan.containers == {"lrs": "list"}
    loads = bytes_by_rank(plan, 32)
    for stage in range(4):
        assert even(loads[8 * stage : 8 * stage + 8])
    writers = {owner // 8 for _, owner in pieces(plan)["model/embed"]}
    assert writers == {0, 3}


@pytest.mark.parametrize("spread", [WHOLE, Placed((0, 1, 2, 3), (4,), (None,))], ids=["DDP", "replicated DTensor"])
def test_each_of_four_ranks_writes_a_quarter(spread: Spread) -> None:
    ranks = [Rank(transformer(all_on(spread), range(4))) for _ in range(4)]  # type: ignore[arg-type]
    plan = plan_of(ranks)
    check(ranks, plan)
    loads = bytes_by_rank(plan, 4)
    assert all(0.95 * sum(loads) / 4 <= load <= 1.05 * sum(loads) / 4 for load in loads)
    cut = [name for name, found in pieces(plan).items() if len(found) > 1]
    assert len(cut) <= 3, "one run of neighbours for each rank"


def test_one_large_tensor_is_cut() -> None:
    for shape in [(50304, 64), (64, 50304), (1, 1, 1 << 20), (3, 1 << 18), (1 << 20,), (3, 1600, 8)]:
        ranks = [Rank({"m/w": ("bfloat16", shape, WHOLE)})] * 8
        plan = plan_of(ranks)
        check(ranks, plan)
        assert even(bytes_by_rank(plan, 8)), shape


def test_few_tensors_are_even_over_many_ranks() -> None:
    """Where no axis has rows enough for the ranks, shares end inside of a row."""
    for world, *shapes in [
        (512, (300, 4096)),
        (1000, (40, 40, 1000)),
        (300, (7, 11, 13, 1009), (500, 3)),
        (96, (1, 1 << 20)),
    ]:
        state: dict[str, tuple[str, tuple[int, ...], Spread]] = {
            f"m/{i}": ("float32", shape, WHOLE) for i, shape in enumerate(shapes)
        }
        ranks = [Rank(state)] * world
        plan = plan_of(ranks)
        check(ranks, plan)
        assert even(bytes_by_rank(plan, world)), (world, shapes)
        assert all(len(list(plan.written_by(rank))) <= 8 for rank in (0, 1, world // 2, world - 1))


# The one that is replicated on `holders` ranks: every share is even as far as the pieces can be cut.

fine = st.tuples(st.integers(600, 3000), st.integers(1, 64), st.sampled_from(["float32", "bfloat16", "int8"]))


@settings(max_examples=examples(80))
@given(st.lists(fine, min_size=1, max_size=12), st.integers(2, 16))
def test_replicated_bytes_are_balanced(tensors: list[tuple[int, int, str]], world: int) -> None:
    state: dict[str, tuple[str, tuple[int, ...], Spread]] = {
        f"m/{i}": (dtype, (rows, width), WHOLE) for i, (rows, width, dtype) in enumerate(tensors)
    }
    total = sum(prod(shape) * dtypes.itemsize(dtype) for dtype, shape, _ in state.values())
    coarsest = max(width * dtypes.itemsize(dtype) for _, width, dtype in tensors)
    ranks = [Rank(state) for _ in range(world)]
    plan = plan_of(ranks)
    check(ranks, plan)
    # A share ends inside of a tensor: off by half a row, or by half of a tensor that is too small to be cut.
    slack = max(coarsest, SMALLEST_CUT, CUT_SHARE * total / world)
    loads = bytes_by_rank(plan, world)
    assert all(load <= max(total / world, SMALLEST_CUT) + slack + 1 for load in loads)
    if total / world >= SMALLEST_CUT:
        assert all(abs(load - total / world) <= slack + 1 for load in loads)
    if slack <= 0.05 * total / world and total / world >= SMALLEST_CUT:
        assert even(loads)


def test_many_scalars_of_many_ranks_go_into_few_files() -> None:
    ranks = [Rank({f"m/{i}": ("float32", (), WHOLE) for i in range(1000)})] * 512
    assert sum(1 for load in bytes_by_rank(plan_of(ranks), 512) if load) == 1


@given(st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(1, 8)), min_size=1, max_size=8),
       st.integers(1, 9))  # fmt: skip
def test_a_line_is_dealt_out_whole(pieces: list[tuple[list[int], int]], count: int) -> None:
    boxes = [(Box((7,) * len(n), tuple(n)), size) for n, size in pieces]
    hand = deal([(box.size * size, box.lengths) for box, size in boxes], count)
    owned = [pieces_of(hand.given(at), box) for at, (box, _) in enumerate(boxes)]
    order = [holder for parts in owned for _, holder in parts]
    assert set(order) <= set(range(count))
    assert order == sorted(order), "each holder writes one run of neighbours"
    for (box, _), parts in zip(boxes, owned, strict=True):
        parts = [Box(tuple(o - 7 for o in p.offsets), p.lengths) for p, _ in parts]
        assert all(inside(p, box.lengths) for p in parts)
        assert tiling_fault(box.lengths, parts) is None


# The same everywhere.

_PRINT = (
    "from tests.plan.test_plan import *; from holdfast.plan.layout import digest_of; "
    "print(digest_of([pieces(mixed()), mixed().aliases]))"
)


def mixed() -> Plan:
    members = tuple(range(24))
    state = transformer(all_on(Placed(members, (4, 6), (None, Split(0)))), range(3))
    state["opt/step"] = ("float32", (), WHOLE)
    state["opt/ema"] = ("bfloat16", (1000, 33), WHOLE)
    state["opt/tied"] = ("bfloat16", (1000, 33), WHOLE)
    return plan_of([Rank(state, aliases={"opt/tied": "opt/ema"}) for _ in members])


def test_every_process_makes_the_same_plan() -> None:
    """Also under another hash seed, as every rank has its own."""
    own = digest_of([pieces(mixed()), mixed().aliases])
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", _PRINT], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == own


def test_a_layout_that_is_known_to_two_ranks_is_told_by_one() -> None:
    layouts, index = joined([Rank({"m/w": ("int8", (4,), WHOLE)})] * 5)
    assert len(layouts) == 1 and index == [0] * 5
    plan = make_plan(layouts, index)
    [(name, tensor, box)] = [piece for rank in range(5) for piece in plan.written_by(rank)]
    assert (name, tensor.shape, box) == ("m/w", (4,), whole((4,)))


# Disagreements.


def fault_of(*ranks: Rank) -> str:
    with pytest.raises(Mismatch) as caught:
        plan_of(ranks)
    return str(caught.value)


def test_another_dtype_or_shape_names_tensor_and_ranks() -> None:
    text = fault_of(*[Rank({"m/w": ("int8", (4,), WHOLE)})] * 5, Rank({"m/w": ("int16", (4,), WHOLE)}))
    assert "m/w is int8 [4] on rank 0 and int16 [4] on rank 5" in text
    text = fault_of(*[Rank({"m/w": ("int8", (4,), WHOLE)})] * 2, Rank({"m/w": ("int8", (4, 1), WHOLE)}))
    assert "m/w is int8 [4] on rank 0 and int8 [4, 1] on rank 2" in text


def test_a_mesh_of_which_a_rank_is_missing() -> None:
    mesh = Placed((0, 1, 2, 3), (4,), (Split(0),))
    text = fault_of(*[Rank({"m/w": ("int8", (8, 2), mesh)})] * 3, Rank({}))
    assert (
        "m/w of shape [8, 2] is not whole: 4 of 16 elements are in no box" in text and "Ranks 0, 1, 2 hold it" in text
    )


def test_explicit_boxes_with_a_hole_or_an_overlap() -> None:
    def rank(number: int, start: int, length: int) -> Rank:
        return Rank({"m/w": ("int8", (8,), boxes_of(number, [Box((start,), (length,))]))})

    check([rank(0, 0, 4), rank(1, 4, 4)], plan_of([rank(0, 0, 4), rank(1, 4, 4)]))
    text = fault_of(rank(0, 0, 4), rank(1, 5, 3))
    assert "m/w" in text and "1 of 8 elements are in no box" in text and "Ranks 0, 1" in text
    text = fault_of(rank(0, 0, 5), rank(1, 4, 4))
    assert "m/w" in text and "boxes [0:5] and [4:8] overlap" in text and "Ranks 0, 1" in text
    text = fault_of(rank(0, 0, 4), rank(1, 4, 5))
    assert "m/w" in text and "lies outside of shape [8]" in text


def test_whole_here_and_sharded_there() -> None:
    mesh = Placed((1, 2), (2,), (Split(0),))
    text = fault_of(Rank({"m/w": ("int8", (8,), WHOLE)}), *[Rank({"m/w": ("int8", (8,), mesh)})] * 2)
    assert "m/w" in text and "overlap" in text


def test_many_ranks_are_not_all_listed() -> None:
    text = fault_of(*[Rank({"m/w": ("int8", (600,), boxes_of(r, [Box((r,), (1,))]))}) for r in range(599)])
    assert "(599 in all)" in text and len(text) < 600


def test_a_tensor_cannot_lie_below_a_tensor_of_another_rank() -> None:
    text = fault_of(Rank({"m/w": ("int8", (4,), WHOLE)}), Rank({"m/w/part/x": ("int8", (4,), WHOLE)}))
    assert "m/w is a tensor on rank 0" in text and "rank 1" in text and "m/w/part/x" in text


def test_containers_and_per_rank_values_must_agree() -> None:
    text = fault_of(Rank(containers={"x": "list"}), Rank(), Rank(containers={"x": "tuple"}))
    assert "x is a list on rank 0 and a tuple on rank 2" in text
    text = fault_of(Rank(per_rank=["a", "rng"]), Rank(per_rank=["a", "rng"]), Rank(per_rank=["a"]))
    assert "rng" in text and "rank 2" in text


# Tied tensors.


def two(aliases: dict[str, str], spread: Spread = WHOLE) -> Rank:
    return Rank({"m/a": ("int8", (8,), spread), "m/b": ("int8", (8,), spread)}, aliases)


def test_tied_on_every_rank_is_stored_once() -> None:
    plan = plan_of([two({"m/b": "m/a"})] * 3)
    assert plan.aliases == {"m/b": "m/a"} and list(plan.tensors) == ["m/a"]


def test_tied_on_some_ranks_only_is_stored_twice() -> None:
    for ranks in ([two({"m/b": "m/a"}), two({})], [two({}), two({"m/b": "m/a"}), two({"m/b": "m/a"})]):
        plan = plan_of(ranks)
        check(ranks, plan)
        assert plan.aliases == {} and set(plan.tensors) == {"m/a", "m/b"}


def test_tied_the_other_way_round_is_stored_twice() -> None:
    ranks = [two({"m/b": "m/a"}), two({"m/a": "m/b"})]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert plan.aliases == {}


def test_a_rank_without_elements_has_no_say() -> None:
    """2 elements over 3 ranks: the last holds nothing and cannot see that they are tied."""
    mesh = Placed((0, 1, 2), (3,), (Split(0),))
    tensors: dict[str, tuple[str, tuple[int, ...], Spread]] = dict.fromkeys(("m/a", "m/b"), ("int8", (2,), mesh))
    ranks = [Rank(tensors, {"m/b": "m/a"}), Rank(tensors, {"m/b": "m/a"}), Rank(tensors)]
    plan = plan_of(ranks)
    check(ranks, plan)
    assert plan.aliases == {"m/b": "m/a"}


def test_a_name_that_only_one_stage_has_is_tied_there() -> None:
    first = Rank({"m/embed": ("int8", (8,), WHOLE), "m/head": ("int8", (8,), WHOLE)}, {"m/head": "m/embed"})
    other = Rank({"m/embed": ("int8", (8,), WHOLE)})
    plan = plan_of([first, other])
    assert plan.aliases == {"m/head": "m/embed"} and set(plan.tensors) == {"m/embed"}
    last = Rank({"m/head": ("int8", (8,), WHOLE)})
    plan = plan_of([first, last])
    check([first, last], plan)
    assert plan.aliases == {}


def test_a_chain_of_ties_ends_at_what_is_stored() -> None:
    tensors: dict[str, tuple[str, tuple[int, ...], Spread]] = {f"m/{n}": ("int8", (8,), WHOLE) for n in "abc"}
    plan = plan_of([Rank(tensors, {"m/b": "m/a", "m/c": "m/b"})] * 2)
    assert plan.aliases == {"m/b": "m/a", "m/c": "m/a"} and set(plan.tensors) == {"m/a"}


def test_names_that_no_rank_holds_as_tensors_are_tied_too() -> None:
    ranks = [Rank({"m/a": ("int8", (8,), WHOLE)}, unheld={"m/b": "m/a"})] * 2
    plan = plan_of(ranks)
    check(ranks, plan)
    assert plan.aliases == {"m/b": "m/a"}
    tensors: dict[str, tuple[str, tuple[int, ...], Spread]] = dict.fromkeys(("m/a", "m/c"), ("int8", (8,), WHOLE))
    text = fault_of(Rank(tensors, unheld={"m/b": "m/a"}), Rank(tensors, unheld={"m/b": "m/c"}))
    assert "m/b" in text and "m/a" in text and "m/c" in text
