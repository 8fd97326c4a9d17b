"""Pickled DTensors and ShardedTensors of all ranks, joined: as torch itself would put them together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.formats import alike
from holdfast.formats.assemble import assemble
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.sharded import join_ranks, mesh_of
from holdfast.formats.shares import Mesh
from holdfast.formats.simplified import PerRank
from holdfast.formats.sources import Memory, Stretch, all_of
from holdfast.formats.stored import Stored, cut, of_bytes
from holdfast.formats.torch_save import full
from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.formats.truth import same

WHERE = LocalPlace("somewhere")
SHAPES = [(7, 5), (3,), (8, 3, 5), (1, 6), (2, 2), ()]


def stored(tensor: torch.Tensor) -> Stored:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return of_bytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data, WHERE)


# What torch saves


def meshes(world: int) -> list[tuple[int, ...]]:
    return {2: [(2,), (2, 1)], 3: [(3,)], 4: [(4,), (2, 2), (1, 4)]}[world]


def save_dtensors(folder: str) -> dict[str, torch.Tensor]:
    """Every placement on every mesh, uneven too; the whole of each."""
    world, rank = dist.get_world_size(), dist.get_rank()
    held: dict[str, Any] = {}
    truth: dict[str, torch.Tensor] = {}
    for sizes in meshes(world):
        mesh = init_device_mesh("cpu", sizes)
        for shape in SHAPES:
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(truth))).to(torch.bfloat16)
            choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in itertools.product(choices, repeat=len(sizes)):
                name = f"{sizes} {shape} {placements}"
                held[name], truth[name] = distribute_tensor(whole, mesh, placements), whole
    torch.save(held, f"{folder}/rank_{rank}.pt")
    return truth


@pytest.mark.parametrize("world", [2, 3, 4])
def test_dtensors_of_every_placement(tmp_path: Path, world: int) -> None:
    truth = pool.run(world, save_dtensors, str(tmp_path))[0]
    tree = join_ranks([load_path(tmp_path / f"rank_{r}.pt") for r in range(world)])
    assert [name for name, whole in truth.items() if not same(tree[name].read(), whole)] == []


def save_strided(folder: str) -> dict[str, torch.Tensor]:
    """FSDP2 over tensor parallel: torch writes the order of cutting as strides; with sizes that nothing divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Linear(11, 7), torch.nn.Embedding(9, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    flat = mesh["dp", "tp"]._flatten("all")
    held = {**model.state_dict(), "flat": distribute_tensor(torch.arange(10.0), flat, [Shard(0)])}
    torch.save(held, f"{folder}/rank_{dist.get_rank()}.pt")
    assert any("Strided" in str(v.placements) for v in held.values())
    return {name: value.full_tensor().detach() for name, value in held.items()}


def test_strided_shards_and_submeshes(tmp_path: Path) -> None:
    truth = pool.run(4, save_strided, str(tmp_path))[0]
    tree = join_ranks([load_path(tmp_path / f"rank_{r}.pt") for r in range(4)])
    assert tree.keys() == truth.keys()
    assert [name for name, whole in truth.items() if not same(tree[name].read(), whole)] == []


def save_sharded_tensors(folder: str) -> None:
    whole, rank = torch.arange(66.0).reshape(11, 6), dist.get_rank()
    boxes = [((0, 0), (4, 6)), ((4, 0), (7, 2)), ((4, 2), (7, 4))]
    shards = [
        TorchShard.from_tensor_and_offsets(whole[a : a + m, b : b + n].contiguous(), [a, b], i % 2)
        for i, ((a, b), (m, n)) in enumerate(boxes)
        if i % 2 == rank
    ]
    torch.save({"t": init_from_local_shards(shards, 11, 6), "own": rank}, f"{folder}/rank_{rank}.pt")


def test_sharded_tensors(tmp_path: Path) -> None:
    pool.run(2, save_sharded_tensors, str(tmp_path))
    trees = [load_path(tmp_path / f"rank_{r}.pt") for r in range(2)]
    tree = join_ranks(trees)
    assert same(tree["t"].read(), torch.arange(66.0).reshape(11, 6))
    assert tree["own"] == PerRank((0, 1))
    with pytest.raises(holdfast.errors.Damaged, match="run 3: t .* is not whole with what ranks .0. hold"):
        join_ranks(trees[:1], "run 3: ")


def save_partial(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    torch.save({"sum": local}, f"{folder}/rank_{dist.get_rank()}.pt")


def test_a_partial_value_is_refused(tmp_path: Path) -> None:
    pool.run(2, save_partial, str(tmp_path))
    with pytest.raises(holdfast.errors.Unsupported, match="sum was saved with placement Partial.*redistribute"):
        join_ranks([load_path(tmp_path / f"rank_{r}.pt") for r in range(2)])


# What older torches saved


def old_mesh(**attributes: Any) -> Record:
    return Record("torch.distributed.device_mesh.DeviceMesh", (), {"device_type": "cpu", **attributes})


RANKS = torch.tensor([[4, 5, 6], [7, 8, 9]], dtype=torch.int32)


@pytest.mark.parametrize("rank", [4, 8, 9, 11])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"mesh": RANKS}, id="2.1 to 2.8"),
        pytest.param({"_rank_map": RANKS.reshape(-1), "shape": (2, 3), "stride": (3, 1)}, id="2.9 to 2.11"),
    ],
)
def test_meshes_of_older_torches(mesh: dict[str, Any], rank: int) -> None:
    where = (rank == RANKS).nonzero().tolist()
    expected = Mesh((2, 3), tuple(where[0]) if where else None)
    held: dict[str, Any] = {k: stored(v) for k, v in mesh.items() if isinstance(v, torch.Tensor)}
    if "shape" in mesh:
        layout = {"shape": mesh["shape"], "stride": mesh["stride"]}
        held["_layout"] = Record("torch.distributed._mesh_layout._MeshLayout", (), layout)
    assert mesh_of(old_mesh(**held), rank) == expected  # found by the rank
    told = expected.coordinate and list(expected.coordinate)
    assert mesh_of(old_mesh(**held, _coordinate_on_dim=told), -1) == expected  # or told


def test_flattened_axes_of_a_mesh() -> None:
    """Axes 0 and 2 of a mesh of 2x3x2 as one: ranks 0, 1, 6, 7 have its coordinates 0 to 3 in the first column."""
    layout = Record("torch.distributed._mesh_layout._MeshLayout", (), {"shape": ((2, 2), 3), "stride": ((6, 1), 2)})
    mesh = old_mesh(_layout=layout, _rank_map=stored(torch.arange(12)))
    assert [mesh_of(mesh, rank) for rank in (0, 1, 6, 7, 9)] == [
        Mesh((4, 3), at) for at in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1))
    ]


def old_dtensor(local: torch.Tensor, shape: tuple[int, ...], rank: int, *placements: tuple[str, dict[str, Any]]) -> Any:
    places = [Record(f"torch.distributed._tensor.placement_types.{kind}", (), state) for kind, state in placements]
    sizes = {1: (2,), 2: (2, 2)}[len(placements)]
    mesh = old_mesh(mesh=stored(torch.arange(2 ** len(sizes)).reshape(sizes)))
    spec = {"mesh": mesh, "placements": tuple(places), "tensor_meta": None}
    state = ({}, {"_local_tensor": stored(local), "_spec": Record("torch.x.DTensorSpec", (), spec)})
    return Record("torch.distributed._tensor.api.DTensor", ("float32", shape), state)


def test_dtensors_of_older_torches() -> None:
    whole = torch.arange(21.0).reshape(7, 3)
    trees = [{"w": old_dtensor(whole[4 * r : 4 * r + 4], (7, 3), r, ("Shard", {"dim": 0}))} for r in range(2)]
    assert same(join_ranks(trees)["w"].read(), whole)
    # Strides that no order of cutting explains: each third of the axis is cut in two.
    axis = torch.arange(9.0)
    parts = [axis[[0, 1, 3, 4, 6, 7]], axis[[2, 5, 8]]]
    strided = ("_StridedShard", {"dim": 0, "split_factor": 3})
    trees = [{"w": old_dtensor(part, (9,), r, strided)} for r, part in enumerate(parts)]
    assert same(join_ranks(trees)["w"].read(), axis)
    columns = torch.arange(18.0).reshape(2, 9)
    strided = ("_StridedShard", {"dim": -1, "split_factor": 3})
    parts = [columns[:, [0, 1, 3, 4, 6, 7]], columns[:, [2, 5, 8]]]
    trees = [{"w": old_dtensor(part, (2, 9), r, strided)} for r, part in enumerate(parts)]
    assert same(join_ranks(trees)["w"].read(), columns)


def test_a_local_tensor_that_is_not_what_its_mesh_says() -> None:
    wrong = old_dtensor(torch.zeros(3, 3), (7, 3), 0, ("Shard", {"dim": 0}))
    with pytest.raises(holdfast.errors.Damaged, match=r"w: it is a local tensor of shape \[3, 3\].*has \[4, 3\] there"):
        join_ranks([{"w": wrong}, {"w": wrong}])
    for placement in [("Shard", {}), ("Shard", {"dim": "x"}), ("_StridedShard", {"dim": 0, "split_factor": 1 << 40})]:
        with pytest.raises(holdfast.errors.Damaged, match="w"):
            join_ranks([{"w": old_dtensor(torch.zeros(4, 3), (7, 3), 0, placement)}])
    with pytest.raises(holdfast.errors.Damaged, match="w is a DTensor that cannot be made out"):
        join_ranks([{"w": Record("torch.distributed.tensor.DTensor", ("float32", (2,)), {})}])


def test_ranks_that_see_a_tensor_differently() -> None:
    a = old_dtensor(torch.zeros(4, 3), (7, 3), 0, ("Shard", {"dim": 0}))
    b = old_dtensor(torch.zeros(4, 3), (8, 3), 1, ("Shard", {"dim": 0}))
    with pytest.raises(holdfast.errors.Damaged, match="w is seen differently"):
        join_ranks([{"w": a}, {"w": b}])
    with pytest.raises(holdfast.errors.Damaged, match="w is sharded on some ranks and not on others"):
        join_ranks([{"w": a}, {"w": stored(torch.zeros(3, 3))}])


# What else ranks hold


def test_what_is_alike_comes_once_and_what_differs_for_each_rank() -> None:
    nan = float("nan")
    record = Record("datetime.timedelta", (1, 2, 3))
    trees = [
        {"lr": 0.1, "rank": r, "nan": nan, "betas": (0.9, 0.95), "params": [f"w{r}"], 1: "int", "1": "text",
         "at": Record(record.name, record.args),
         "groups": [{"lr": 1, "of": r}], "long": [0] * r, "kind": Name("torch.x"),
         "t": stored(torch.arange(3)), "own": stored(torch.full((2,), r)), **({"only": 5} if r == 1 else {})}
        for r in range(2)
    ]  # fmt: skip
    tree = join_ranks(trees)
    assert tree["lr"] == 0.1 and tree["nan"] != tree["nan"] and tree["betas"] == (0.9, 0.95) and tree["only"] == 5
    assert tree["rank"] == PerRank((0, 1)) and tree["params"] == PerRank((["w0"], ["w1"]))
    assert tree[1] == "int" and tree["1"] == "text" and tree["kind"] == Name("torch.x")
    assert tree["at"].args == (1, 2, 3)
    assert tree["groups"] == [{"lr": 1, "of": PerRank((0, 1))}]
    mixed = join_ranks([{"x": stored(torch.zeros(1))}, {"x": None}, {"x": stored(torch.zeros(1))}])["x"]
    assert isinstance(mixed, PerRank) and mixed.values[1] is None
    assert tree["long"] == PerRank(([], [0]))
    assert same(tree["t"].read(), torch.arange(3))
    assert [v.read().tolist() for v in tree["own"].values] == [[0, 0], [1, 1]]


def test_records_that_hold_themselves_are_compared() -> None:
    def mesh(name: str) -> Record:
        made = Record("torch.distributed.device_mesh.DeviceMesh", (), {"name": name})
        made.state["root"] = made
        return made

    tree = join_ranks([{"same": mesh("a"), "other": mesh("a")}, {"same": mesh("a"), "other": mesh("b")}])
    assert isinstance(tree["same"], Record) and isinstance(tree["other"], PerRank)


def test_a_tree_without_end_is_damaged() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(holdfast.errors.Damaged, match="contains itself"):
        join_ranks([endless, endless])


class Sealed(Memory):
    """Bytes that nobody may read."""

    def read(self, begin: int, nbytes: int) -> bytes:
        raise AssertionError("read")


def test_sums_of_archives_spare_the_reading(tmp_path: Path) -> None:
    """torch keeps a CRC-32 of every storage; views of storages that differ elsewhere are read."""
    for rank, value in enumerate((1.0, 1.0, 2.0)):
        torch.save({"t": torch.full((1000,), value), "view": torch.tensor([value, 5, 6])[1:]}, tmp_path / f"{rank}.pt")
    trees = [load_path(tmp_path / f"{r}.pt") for r in range(3)]

    def sealed(tensor: Stored) -> Stored:
        ((box, stretch),) = tensor.pieces
        source = Sealed(WHERE, bytes(stretch.source.nbytes))
        unread = Stretch(source, stretch.begin, stretch.nbytes, stretch.member)
        return Stored(tensor.dtype, tensor.shape, ((box, unread),))

    unread = [sealed(tree["t"]) for tree in trees]
    assert alike.same_tensors([unread[:2], unread]) == [True, False]
    assert alike.same_tensors([[tree["view"] for tree in trees]]) == [True]
    whole = of_bytes("uint8", (6,), b"abcabc", WHERE)
    first, same_bytes, other = (cut(whole, i, i + 3) for i in (0, 3, 2))
    assert alike.same_tensors([[first, same_bytes], [first, other]]) == [True, False]


def test_what_is_too_large_to_compare_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [stored(torch.zeros(100)) for _ in range(2)]
    monkeypatch.setattr(alike, "COMPARED", 399)
    assert alike.same_tensors([tensors]) == [False]
    monkeypatch.setattr(alike, "COMPARED", 400)
    assert alike.same_tensors([tensors]) == [True]
    monkeypatch.setattr(alike, "BUDGET", 1000)
    assert alike.same_tensors([tensors, tensors]) == [True, False]


def test_small_neighbours_are_read_at_once() -> None:
    reads: list[tuple[int, int]] = []

    class Counted(Memory):
        def read(self, begin: int, nbytes: int) -> bytes:
            reads.append((begin, nbytes))
            return super().read(begin, nbytes)

    sources = [Counted(LocalPlace(f"rank {r}"), torch.arange(1000.0).numpy().tobytes()) for r in range(2)]
    steps = [[Stored("float32", (), ((whole_box(), all_of(s).part(4 * i, 4)),)) for s in sources] for i in range(1000)]
    assert all(alike.same_tensors(steps))
    assert reads == [(0, 4000), (0, 4000)]


def whole_box() -> Any:
    return stored(torch.tensor(0.0)).pieces[0][0]


# Files of ranks


@pytest.mark.parametrize("pattern", ["rank_{}.pt", "model-rank{}.bin", "shard {:03d} of 4", "rank{}/state.pt"])
def test_files_that_ranks_saved_each_for_itself(tmp_path: Path, pattern: str) -> None:
    truth = pool.run(4, save_strided, str(tmp_path))[0]
    folder = tmp_path / "ckpt"
    for rank in range(4):
        path = folder / pattern.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"rank_{rank}.pt").rename(path)
    template = folder / pattern.replace("{:03d}", "{rank}").replace("{}", "{rank}")
    paths = [template] if "/" in pattern else [template, folder]
    for path in paths:
        found = full.read(path)
        assert found is not None and found.world_size == 4
        opened = assemble(found, path)
        assert sorted(opened.manifest.tensors) == sorted(f"model/{name}" for name in truth)
        assert [name for name, whole in truth.items() if not same(found.state["model"][name].read(), whole)] == []
    (folder / pattern.format(1)).unlink()
    with pytest.raises(holdfast.errors.Damaged, match="the file of rank 1 is missing"):
        full.read(template)


def test_files_that_are_numbered_are_not_taken_for_ranks(tmp_path: Path) -> None:
    for epoch in range(3):
        torch.save({"w": torch.full((3,), float(epoch))}, tmp_path / f"epoch_{epoch}.pt")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="several files of one kind"):
        full.read(tmp_path)
    assert full.read(tmp_path / "other_{rank}.pt") is None
    with pytest.raises(holdfast.errors.Unsupported, match="differ between its files.*open one of the files"):
        full.read(tmp_path / "epoch_{rank}.pt")
