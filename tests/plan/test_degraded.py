"""Who takes over from lost ranks: each piece once, by one that is left and holds it, or a list of what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ondisk import datafile, dtypes
from holdfast.ondisk.box import Box, intersect, tiling_fault, whole
from holdfast.plan.degraded import Key, kept_by, listed, spare_of, taken_over, writer_of
from holdfast.plan.plan import Plan, file_of, make_plan
from holdfast.plan.spread import WHOLE, Placed, Split, Spread, boxes_held
from tests.marks import examples
from tests.plan.test_plan import DTYPES, Rank, boxes_of, explicit, joined, pieces, small_shapes, splits_on

MESHES = [(1,), (2,), (4,), (7,), (2, 2), (4, 3), (2, 8), (2, 2, 3), (3, 1, 4)]


def planned(ranks: Sequence[Rank], buffers: frozenset[str] = frozenset()) -> Plan:
    layouts, layout_of = joined(ranks)
    marked = [
        msgspec.structs.replace(
            layout, tensors=[msgspec.structs.replace(t, first=t.name in buffers) for t in layout.tensors]
        )
        for layout in layouts
    ]
    return make_plan(marked, layout_of)


def holds(rank: Rank, number: int, name: str, box: Box) -> bool:
    if name not in rank.tensors:
        return False
    _, shape, spread = rank.tensors[name]
    return any(intersect(held, box) == box for held in boxes_held(shape, spread, number))


def check(ranks: Sequence[Rank], plan: Plan, lost: set[int], attempt: int) -> None:
    world = len(ranks)
    left = [rank for rank in range(world) if rank not in lost]
    before = pieces(plan)
    unheld = [
        f"{name}{box} of rank {owner}"
        for name, found in before.items()
        for box, owner in found
        if box.size and owner in lost and not any(holds(ranks[rank], rank, name, box) for rank in left)
    ]
    taken = taken_over(plan, lost, world, attempt=attempt)
    assert set(taken.missing) == set(unheld) or (not left and taken.missing)
    if taken.missing:
        return
    after = pieces(taken.plan)
    assert list(taken.plan.tensors) == list(plan.tensors), "citations count positions"
    assert (taken.plan.aliases, taken.plan.containers, taken.plan.volumes) == (
        plan.aliases, plan.containers, plan.volumes
    )  # fmt: skip
    for name, tensor in plan.tensors.items():
        assert 0 in tensor.shape or tiling_fault(tensor.shape, [box for box, _ in after[name]]) is None
        owners = dict(before[name])
        assert owners.keys() == dict(after[name]).keys()
        for box, writer in after[name]:
            if owners[box] not in lost:
                assert writer == owners[box], "what is written already stays"
                continue
            assert writer // world == attempt and writer % world in left
            assert not box.size or holds(ranks[writer % world], writer % world, name, box)
    for rank in left:
        more = writer_of(rank, world, attempt)
        told_apart = [(name, box) for name, _, box in taken.plan.written_by(more)]
        assert Counter(told_apart) == Counter((n, b) for n, found in after.items() for b, w in found if w == more)


def check_spares(ranks: Sequence[Rank], plan: Plan, lost: set[int]) -> None:
    world = len(ranks)
    kept: list[set[Key]] = [{(name, box) for name, _, box in kept_by(plan, rank)} for rank in range(world)]
    owners = {(name, box): owner for name, found in pieces(plan).items() for box, owner in found if box.size}
    keepers: dict[Key, list[int]] = {key: [rank for rank in range(world) if key in kept[rank]] for key in owners}
    for (name, box), owner in owners.items():
        others = [r for r in range(world) if r != owner and holds(ranks[r], r, name, box)]
        assert len(keepers[name, box]) == bool(others), "one copy of all that somebody else holds"
        assert all(rank in others for rank in keepers[name, box])
    taken = taken_over(plan, lost, world, spares=True)
    unkept = [key for key, owner in owners.items() if owner in lost and not set(keepers[key]) - lost]
    assert bool(taken.missing) == bool(unkept or len(lost) == world)
    for rank in range(world) if not taken.missing else ():
        assert {(n, b) for n, _, b in taken.plan.written_by(writer_of(rank, world, 1)) if b.size} <= kept[rank]


@st.composite
def losses(draw: st.DrawFn, world: int) -> set[int]:
    return draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=max(1, world // 2)))


@settings(max_examples=examples(150))
@given(st.sampled_from(MESHES), st.data())
def test_any_placement_on_any_mesh(mesh: tuple[int, ...], data: st.DataObject) -> None:
    """DDP, FSDP, HSDP, TP beside DP: mesh axes that replicate or cut."""
    world = prod(mesh)
    state: dict[str, tuple[str, tuple[int, ...], Spread]] = {}
    for i in range(data.draw(st.integers(1, 5))):
        shape = data.draw(small_shapes)
        spread: Spread = Placed(tuple(range(world)), mesh, data.draw(splits_on(mesh, len(shape))))
        if data.draw(st.booleans()):
            spread = WHOLE
        state[f"model/{i}"] = (data.draw(st.sampled_from(DTYPES)), shape, spread)
    buffers = frozenset(name for name in state if state[name][2] == WHOLE and data.draw(st.booleans()))
    ranks = [Rank(state) for _ in range(world)]
    plan = planned(ranks, buffers)
    lost = data.draw(losses(world))
    check(ranks, plan, lost, data.draw(st.integers(1, 3)))
    check_spares(ranks, plan, lost)
    taken = taken_over(plan, lost, world)
    first = min(set(range(world)) - lost, default=0)
    heirs = {w % world for n in buffers if not taken.missing for b, w in pieces(taken.plan)[n] if w >= world and b.size}
    assert heirs <= {first}, "buffers come from one rank, whole"


@settings(max_examples=examples(150))
@given(explicit(), st.sampled_from(DTYPES), st.data())
def test_any_boxes(cut: tuple[tuple[int, ...], list[list[Box]]], dtype: str, data: st.DataObject) -> None:
    """Experts and other shards of one's own: some ranks have several boxes, some none."""
    shape, held = cut
    ranks = [
        Rank({"model/w": (dtype, shape, boxes_of(number, boxes))}) if boxes else Rank()
        for number, boxes in enumerate(held)
    ]
    plan = planned(ranks)
    lost = data.draw(losses(len(ranks)))
    check(ranks, plan, lost, 1)
    check_spares(ranks, plan, lost)


def ddp(world: int, tensors: int = 48) -> list[Rank]:
    state = {f"model/{i}": ("float32", (64, 64 + i), WHOLE) for i in range(tensors)}
    return [Rank(state) for _ in range(world)]


def test_a_lost_share_is_cut_evenly() -> None:
    plan = planned(ddp(4))
    taken = taken_over(plan, [1], 4)
    loads: Counter[int] = Counter()
    for name, found in pieces(taken.plan).items():
        for box, writer in found:
            if writer >= 4:
                loads[writer % 4] += box.size * dtypes.itemsize(plan.tensors[name].dtype)
    assert set(loads) == {0, 2, 3}
    assert max(loads.values()) - min(loads.values()) <= 2 * 4 * 64 * (64 + 48), "but for a whole tensor at each end"


def test_spares_are_not_neighbours() -> None:
    """Half of the ranks, as they lie on one host, may be lost together."""
    plan = planned(ddp(8))
    assert not taken_over(plan, [0, 1, 2, 3], 8, spares=True).missing
    assert taken_over(plan, [0, 4], 8, spares=True).missing
    assert spare_of((3,), 3) is None
    assert [spare_of((2, 5, 6), owner) for owner in (2, 5, 6)] == [5, 6, 2]


@pytest.mark.parametrize("mesh", [(8, 1), (2, 4), (4, 2)])
def test_spares_take_as_much_as_a_rank_writes(mesh: tuple[int, int]) -> None:
    """HSDP: the first axis replicates, the second cuts."""
    spread = Placed(tuple(range(8)), mesh, (None, Split(0)))
    plan = planned([Rank({f"model/{i}": ("float32", (64, 64 + i), spread) for i in range(48)}) for _ in range(8)])
    for rank in range(8):
        written = sum(box.size for _, _, box in plan.written_by(rank))
        kept = sum(box.size for _, _, box in kept_by(plan, rank))
        assert 0.95 * written < kept < 1.05 * written


def test_values_of_one_rank_are_missing() -> None:
    ranks = [Rank({"model/w": ("float32", (8,), WHOLE)}, per_rank=["rng", "mine"]) for _ in range(3)]
    assert taken_over(planned(ranks), [2], 3).missing == ["rng of rank 2", "mine of rank 2"]


def test_shards_are_missing_and_named() -> None:
    state = {f"model/{i}": ("float32", (40,), Placed((0, 1, 2, 3), (4,), (Split(0),))) for i in range(12)}
    missing = taken_over(planned([Rank(state) for _ in range(4)]), [3], 4).missing
    assert missing == [f"model/{i}[30:40] of rank 3" for i in range(12)]
    assert listed(missing).endswith("model/7[30:40] of rank 3 and 4 more")


def test_files_of_what_is_taken_over_are_of_their_own() -> None:
    volumes = {"model/b": 2, "model/c": 1, "model_b/x": 7}
    save = "0123456789abcdef"
    made = [
        file_of("model", writer_of(rank, 4, attempt), 4, save, volume, volumes)
        for attempt in range(3)
        for rank in range(4)
        for volume in range(3)
    ]
    assert len(set(made)) == len(made)
    assert all(datafile.save_of(path) == save for path in made)
    assert file_of("model", 2, 4, save, 1, volumes) == datafile.file_name("model", 2, 4, save, 1)
    assert file_of("other", writer_of(2, 4, 1), 4, save, 0, volumes) == datafile.file_name("other", 2, 4, save, 1)


def test_an_empty_tensor_is_written_all_the_same() -> None:
    ranks = [Rank({"model/none": ("float32", (0, 3), WHOLE)}) for _ in range(2)]
    taken = taken_over(planned(ranks), [0], 2)
    assert pieces(taken.plan) == {"model/none": [(whole((0, 3)), writer_of(1, 2, 1))]}
