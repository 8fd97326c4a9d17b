"""Plans, manifests and loads of 16,384 ranks: nothing is listed for each rank and tensor.

Bytes and counts are looked at, never times.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from math import prod

import pytest

from holdfast.commit.draft import Identity, complete, draft
from holdfast.ondisk import dtypes, manifest
from holdfast.ondisk.box import Box, intersect
from holdfast.ondisk.cells import Cells, TensorRecord
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.plan.layout import Layout, OwnedJoin, TensorLayout
from holdfast.plan.owners import Owned
from holdfast.plan.plan import Plan, make_plan
from holdfast.plan.spread import WHOLE, Placed, Split, Spread, boxes_held

WORLD = 16384
LAYERS = 4
SHAPES = {
    "wq": (16384, 1024), "wk": (1024, 1024), "wo": (1024, 16384), "w1": (53248, 1024), "w2": (1024, 53248),
    "norm": (16384,), "experts": (128, 256, 16384),
}  # fmt: skip
BY_COLUMN, BY_ROW = ("wq", "wk", "w1"), ("wo", "w2")
Spreads = Callable[[str], Spread]


def tensors(layers: range, spread_of: Spreads, empty: frozenset[str]) -> Layout:
    """Parameters and Adam's state of some layers; ``empty`` are the parts of which the telling ranks hold nothing."""
    spreads: dict[Spread, int] = {}
    rows = []
    for i in layers:
        for part, shape in SHAPES.items():
            spread = spreads.setdefault(spread_of(part), len(spreads))
            lone = part in empty
            rows.append(TensorLayout(f"model/layers.{i}.{part}", "bfloat16", shape, spread, None, lone))
            for key in ("exp_avg", "exp_avg_sq"):
                name = f"optimizer/state/layers.{i}.{part}/{key}"
                rows.append(TensorLayout(name, "float32", shape, spread, None, lone))
    step = spreads.setdefault(WHOLE, len(spreads))
    rows.append(TensorLayout("optimizer/step", "int64", (), step, None, False))
    return Layout(rows, list(spreads), {}, {}, [], {})


def fsdp() -> tuple[list[Layout], list[int]]:
    mesh = Placed(tuple(range(WORLD)), (WORLD,), (Split(0),))
    # Rows that are fewer than ranks, or no multiple of them: the last ranks hold none, and tell so.
    held = {part: -(-shape[0] // -(-shape[0] // WORLD)) for part, shape in SHAPES.items()}
    index, layouts = [], {}
    for rank in range(WORLD):
        empty = frozenset(part for part, count in held.items() if rank >= count)
        index.append(layouts.setdefault(empty, len(layouts)))
    return [tensors(range(LAYERS), lambda part: mesh, empty) for empty in layouts], index


def hsdp() -> tuple[list[Layout], list[int]]:
    mesh = Placed(tuple(range(WORLD)), (64, 256), (None, Split(0)))
    few = frozenset({"experts"})
    index = [int(rank % 256 >= 128) for rank in range(WORLD)]
    return [tensors(range(LAYERS), lambda part: mesh, empty) for empty in (frozenset[str](), few)], index


def three_d() -> tuple[list[Layout], list[int]]:
    """16 stages of 128 x 8 ranks: FSDP over tensor parallel; norms on all tensor-parallel ranks."""
    layouts = []
    for stage in range(16):
        members = tuple(range(1024 * stage, 1024 * (stage + 1)))
        column = Placed(members, (128, 8), (Split(0, 8), Split(0)))
        row = Placed(members, (128, 8), (Split(0), Split(1)))
        norm = Placed(members, (128, 8), (Split(0), None))
        experts = Placed(members, (128, 8), (Split(2), Split(0)))
        by_part: dict[str, Spread] = {**dict.fromkeys(BY_COLUMN, column), **dict.fromkeys(BY_ROW, row)}
        by_part |= {"norm": norm, "experts": experts}
        layouts.append(tensors(range(stage, stage + 1), by_part.__getitem__, frozenset()))
    return layouts, [rank // 1024 for rank in range(WORLD)]


def expert_parallel() -> tuple[list[Layout], list[int]]:
    layouts, index = fsdp()
    mesh = Placed(tuple(range(WORLD)), (WORLD, 1), (Split(0), None))
    experts = Placed(tuple(range(WORLD)), (256, 64), (Split(1), Split(0)))
    told = []
    for layout in layouts:
        lone = frozenset(t.name.rpartition(".")[2] for t in layout.tensors if t.empty and t.name.startswith("model/"))
        told.append(tensors(range(LAYERS), lambda part: experts if part == "experts" else mesh, lone - {"experts"}))
    return told, index


def replicated() -> tuple[list[Layout], list[int]]:
    return [tensors(range(LAYERS), lambda part: WHOLE, frozenset())], [0] * WORLD


CASES = {"FSDP": fsdp, "HSDP": hsdp, "3-D": three_d, "EP": expert_parallel, "DDP": replicated}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in ("FSDP", "3-D") else pytest.mark.slow) for case in CASES],
)
def told(request: pytest.FixtureRequest) -> tuple[str, list[Layout], list[int]]:
    return (request.param, *CASES[request.param]())


@pytest.fixture(scope="module")
def plan(told: tuple[str, list[Layout], list[int]]) -> Plan:
    return make_plan(*told[1:])


@pytest.fixture(scope="module")
def committed(plan: Plan) -> Manifest:
    identity = Identity("7c1e09ab52d3f410", "0123456789abcdef", 7, WORLD)
    drafted = draft(identity, plan, {}, {}, OwnedJoin({}, {}), [])
    return complete(drafted, [FileRecord(str(row[0]), 100_000_000, 126_976, "0" * 32) for row in drafted.files])


def test_a_rank_plans_in_little_memory(told: tuple[str, list[Layout], list[int]]) -> None:
    """What grows is a list of the ranks here and there, never one for each tensor."""
    rank = 9999
    gc.collect()
    tracemalloc.start()
    try:
        plan = make_plan(*told[1:])
        own = list(plan.written_by(rank))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert own and peak <= 16 << 20
    kinds = {id(tensor) for tensor in plan.tensors.values()}
    assert len(kinds) <= 2 * len(SHAPES) * max(1, len(told[1]) // 4 * 4) + 1, "one for all that lie alike"


@pytest.mark.slow_cases("3-D")
def test_every_rank_writes_its_part_and_replicas_share_evenly(
    told: tuple[str, list[Layout], list[int]], plan: Plan
) -> None:
    case, layouts, index = told
    ranks = (0, 1, 4097, 13311, WORLD - 1)
    own: dict[int, dict[str, list[Box]]] = {rank: {} for rank in ranks}
    for rank in ranks:
        layout = layouts[index[rank]]
        spreads = {t.name: layout.spreads[t.spread] for t in layout.tensors}
        for name, tensor, box in plan.written_by(rank):
            assert any(intersect(held, box) == box for held in boxes_held(tensor.shape, spreads[name], rank))
            own[rank].setdefault(name, []).append(box)
    loads: Counter[int] = Counter()
    for owned, names in alike(plan).items():
        found = boxes_of(plan, owned, names[0])
        assert sum(box.size for box, _ in found) == prod(plan.tensors[names[0]].shape)
        size = sum(dtypes.itemsize(plan.tensors[name].dtype) for name in names)
        loads.update({rank: sum(n for n in sizes) * size for rank, sizes in by_owner(found).items()})
        for rank in ranks:
            expected = [box for box, owner in found if owner == rank]
            assert all(own[rank].pop(name, []) == expected for name in names)
    assert not any(own.values())
    if case in ("DDP", "HSDP"):
        few = [rank for rank in range(WORLD) if case == "DDP" or rank % 256 < 128]
        assert max(loads.values()) <= 1.05 * sum(loads[rank] for rank in few) / len(few)


def alike(plan: Plan) -> dict[Owned, list[str]]:
    """The tensors that are cut alike and written by the same ranks."""
    found: dict[Owned, list[str]] = {}
    for name, _, owned in plan.owned():
        found.setdefault(owned, []).append(name)
    return found


def boxes_of(plan: Plan, owned: Owned, name: str) -> list[tuple[Box, int]]:
    tensor = plan.tensors[name]
    return TensorRecord(tensor.dtype, tensor.shape, owned.cells, manifest.ranges(owned.owners)).boxes()


def by_owner(found: list[tuple[Box, int]]) -> dict[int, list[int]]:
    sizes: dict[int, list[int]] = {}
    for box, owner in found:
        sizes.setdefault(owner, []).append(box.size)
    return sizes


@pytest.mark.slow_cases("3-D")
def test_the_manifest_is_short_and_says_what_was_planned(plan: Plan, committed: Manifest) -> None:
    data = manifest.encode(committed)
    rows = sum(len(record.files) + len(str(record.cells)) for record in committed.tensors.values())
    # Tensors that are cut between their holders say where; there are less of such cuts than ranks that share.
    cut = sum(len(r.boxes()) for r in committed.tensors.values() if isinstance(r.cells, Cells))
    assert rows <= 60 * len(committed.tensors) + 60 * cut and cut <= 4 * WORLD
    assert len(data) <= 100 * len(committed.tensors) + 112 * len(committed.files) + 60 * cut
    assert manifest.decode(data, "here") == committed
    ranks = [int(str(row[0]).partition("/")[2][:5]) for row in committed.files]
    for owned, (name, *_) in alike(plan).items():
        assert [(box, ranks[file]) for box, file in committed.tensors[name].boxes()] == boxes_of(plan, owned, name)


def test_another_number_of_ranks_finds_what_it_needs(committed: Manifest) -> None:
    """2,048 ranks by FSDP: the cells that meet a rank's box cover it, and are not looked for one by one."""
    mesh = Placed(tuple(range(2048)), (2048,), (Split(0),))
    for rank in (0, 777, 2047):
        for record in committed.tensors.values():
            for box in boxes_held(record.shape, mesh, rank) if record.shape else ():
                met = [intersect(cell, box) for cell, _ in record.touching(box)]
                assert sum(part.size for part in met if part is not None) == box.size and None not in met
