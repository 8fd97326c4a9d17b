"""`Writer` and `Reader` under torch's own engine: cached plans, processes, planners, failures, and what is read."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
import holdfast.dcp as dcp
from holdfast.dcp import reader as reader_module
from tests import meshes, pool
from tests.dcp.test_save_load import _same

LONG = 240.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sharded(value: float, rows: int = 5) -> dict[str, Any]:
    """A state over all ranks, uneven on purpose: with more ranks than rows some hold nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = _whole(value, rows)
    state["model"]["layer.w"] = distribute_tensor(state["model"]["layer.w"], mesh, [Shard(0)])
    state["model"]["b"] = distribute_tensor(state["model"]["b"], mesh, [Replicate()])
    return state


def _whole(value: float, rows: int = 5) -> dict[str, Any]:
    full = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + value
    group = {"lr": value, "betas": (0.9, value), "params": ["a", "b"]}
    return {
        "model": {
            "layer.w": full, "b": full[0].clone(), "plain": torch.full((2,), float(value)), "none": torch.zeros(0, 3),
            "one": torch.tensor(value, dtype=torch.bfloat16),
        },
        "optim": {"state": {"0": {"step": value}}, "param_groups": [group]}, "step": int(value),
    }  # fmt: skip


def _is(path: str | Path, value: float, rows: int = 5) -> None:
    """There is this checkpoint at the path, and nothing else."""
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    found = checkpoint.state_dict()
    assert _same(found, _whole(value, rows)), found
    assert checkpoint.step == int(value)
    saves = {file.path.split(".")[-2] for file in checkpoint.manifest.data_files}
    assert saves == {checkpoint.manifest.save}
    left = {p.relative_to(path).as_posix() for p in Path(path).rglob("*") if p.is_file()}
    assert left == {"manifest.json", ".metadata", *(file.path for file in checkpoint.manifest.data_files)}


# Plans


def cached_plans(folder: str) -> list[Any]:
    """The same plan twice, then another layout, then that twice."""
    _forget_plans()
    writer = dcp.Writer(f"{folder}/0")
    for number, rows in enumerate((5, 5, 7, 7)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        torch_dcp.save(
            _sharded(number, rows), storage_writer=writer, planner=planner, checkpoint_id=f"{folder}/{number}"
        )
    # The same writer, the same folder, nothing told anew.
    torch_dcp.save(_sharded(9.0, 7), storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    _forget_plans()
    return []


def _forget_plans() -> None:
    for kept in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{kept}").clear()


def test_cached_plans(tmp_path: Path) -> None:
    pool.run(2, cached_plans, str(tmp_path))
    for number, rows in enumerate((5, 5, 7)):
        _is(tmp_path / str(number), number, rows)
    _is(tmp_path / "3", 9.0, 7)


def other_planners(folder: str) -> None:
    torch_dcp.save(
        _sharded(1.0),
        storage_writer=dcp.Writer(f"{folder}/first"),
        planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )
    state = {"a": {"b": torch.ones(2), "c": 1}, "x": torch.ones(1)}
    torch_dcp.save(
        state, storage_writer=dcp.Writer(f"{folder}/flat"), planner=dcp.DefaultSavePlanner(flatten_state_dict=False)
    )
    torch_dcp.save(_sharded(1.0), storage_writer=dcp.Writer(f"{folder}/half"), planner=Halves())


class Halves(dcp.DefaultSavePlanner):
    """Changes what is written: every float32 tensor as float16."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) and found.dtype is torch.float32 else found


def test_planners_decide_who_writes_and_what(tmp_path: Path) -> None:
    pool.run(2, other_planners, str(tmp_path))
    _is(tmp_path / "first", 1.0)
    flat = holdfast.open(tmp_path / "flat")
    assert _same(flat.state_dict(), {"a": {"b": torch.ones(2), "c": 1}, "x": torch.ones(1)})
    half = holdfast.open(tmp_path / "half")
    assert half.read("model/layer.w").dtype is torch.float16 and half.read("model/one").dtype is torch.bfloat16


def test_data_files_are_safetensors_and_values_are_json(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.ones(2), "b": torch.arange(3)},
        "cfg": {"lr": 0.1, "raw": b"\0", "pair": (1, torch.ones(1))},
    }
    torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c"))
    (file,) = (tmp_path / "c" / "model").glob("*.safetensors")
    assert _same(load_file(file), state["model"])
    told = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert told["values"]["cfg/lr"] == 0.1 and told["values"]["cfg/pair/0"] == 1
    assert _same(holdfast.open(tmp_path / "c").state_dict(), state)
    state["cfg"]["raw"] = io.BytesIO(b"abc")  # some programs pack by themselves
    torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c"))
    assert holdfast.open(tmp_path / "c").values["cfg"]["raw"] == b"abc"
    into: dict[str, Any] = {"model": {"a": torch.zeros(2)}, "cfg": {"lr": 0.0, "raw": io.BytesIO(), "pair": ()}}
    torch_dcp.load(into, storage_reader=dcp.Reader(tmp_path / "c"))
    assert into["cfg"].pop("raw").read() == b"abc"
    assert _same(into, {"model": {"a": torch.ones(2)}, "cfg": {"lr": 0.1, "pair": (1, torch.ones(1))}})


def test_values_that_are_none_of_holdfasts_are_refused_by_path(tmp_path: Path) -> None:
    for value, text in (
        ({"f": print}, "cfg/f: builtins.builtin_function_or_method is code"),
        ({"a": torch.nn.Linear(1, 1)}, "cfg/a is a Linear inside of a dict: give its state_dict()"),
        ({"a": holdfast.PerRank(1)}, "cfg/a differs by rank"),
        ([1, {object()}], "cfg/1: builtins.object is not kept"),
    ):
        with pytest.raises(torch_dcp.CheckpointException) as caught:
            torch_dcp.save({"cfg": value, "x": torch.ones(1)}, storage_writer=dcp.Writer(tmp_path / "c"))
        assert text in str(caught.value)
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.open(tmp_path / "c")


def _long_values() -> dict[str, Any]:
    return {
        "seen": {f"id{i}": i / 7 for i in range(2000)},
        "log": [{"step": i, "loss": i / 3} for i in range(1500)],
        "history": {"loss": [i / 9 for i in range(3000)], "best": None},
        "w": torch.arange(3.0),
    }


def _blank(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: _blank(value) for key, value in node.items()}
    return [_blank(value) for value in node] if isinstance(node, list) and isinstance(node[0], dict) else None


@pytest.mark.parametrize("saves", ["holdfast.save", "dcp.save", "Writer"])
@pytest.mark.parametrize("loads", ["holdfast.load", "dcp.load", "Reader"])
@pytest.mark.slow_cases(
    "Reader-holdfast.save", "Reader-dcp.save", "holdfast.load-Writer", "dcp.load-Writer", "Reader-Writer"
)
def test_long_values_come_back_by_whichever_call(saves: str, loads: str, tmp_path: Path) -> None:
    state = _long_values()
    if saves == "holdfast.save":
        holdfast.save(state, tmp_path / "c")
    elif saves == "dcp.save":
        dcp.save(state, checkpoint_id=tmp_path / "c")
    else:
        torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c"))
    target = _blank(state)
    if loads == "holdfast.load":
        holdfast.load(tmp_path / "c", target)
    elif loads == "dcp.load":
        dcp.load(target, checkpoint_id=tmp_path / "c")
    else:
        torch_dcp.load(target, storage_reader=dcp.Reader(tmp_path / "c"))
    assert _same(target, state)


# Asynchronous


def async_threads(folder: str) -> None:
    writer = dcp.Writer(f"{folder}/0")
    state = _sharded(0.0)
    for step in range(2):
        future = torch_dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{folder}/{step}")
        for tensor in (
            state["model"]["layer.w"].to_local(),
            state["model"]["b"].to_local(),
            state["model"]["plain"],
            state["model"]["one"],
        ):
            tensor.add_(1)
        future.result(LONG)
        state = _sharded(step + 1.0)


def test_async_save_of_torch_in_threads(tmp_path: Path) -> None:
    pool.run(2, async_threads, str(tmp_path))
    for step in range(2):
        _is(tmp_path / str(step), float(step))


def test_a_writer_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Torch pickles it for a process that saves."""
    for path in (tmp_path / "c", str(tmp_path / "c"), "s3://bucket/c"):
        writer = dcp.Writer(path)
        other = pickle.loads(pickle.dumps(writer))  # noqa: S301 - our own
        assert other.path == writer.path and type(other.path) is type(writer.path)
        assert other.storage_meta() == writer.storage_meta() and other.checkpoint_id == writer.checkpoint_id


def async_process(folder: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it is to have a child
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for step in range(2):
        torch_dcp.async_save(
            _sharded(step), storage_writer=dcp.Writer(f"{folder}/{step}"),
            async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS,
        ).result(LONG)  # fmt: skip
    with pytest.raises(BaseException, match="is code"):  # torch hands on what its process raised
        torch_dcp.async_save(
            {"f": print}, storage_writer=dcp.Writer(f"{folder}/bad"),
            async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS,
        ).result(LONG)  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.slow
def test_async_save_of_torch_in_a_process(tmp_path: Path) -> None:
    try:
        pool.run(1, async_process, str(tmp_path))
    finally:
        pool.close(1)
    for step in range(2):
        _is(tmp_path / str(step), step)


# Failures


class Raises(dcp.DefaultSavePlanner):
    """Fails on rank 1 in the middle of its items."""

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == 1 and write_item.index.fqn == "model.layer.w":
            raise OSError("the disk is gone")
        return super().resolve_data(write_item)


class Drops(dcp.DefaultSavePlanner):
    """Forgets an item after all have planned it, a tensor's on rank 1 alone."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        if dist.get_rank() == 1 or self.key == "step":
            plan.items[:] = [item for item in plan.items if item.index.fqn != self.key]
        return plan


def interrupted(folder: str, planner: str) -> str:
    made = Raises() if planner == "raises" else Drops(planner)
    try:
        torch_dcp.save(_sharded(2.0), storage_writer=dcp.Writer(folder), planner=made)
    except torch_dcp.CheckpointException as error:
        return str(error)
    return ""


def again(folder: str, value: float) -> None:
    torch_dcp.save(_sharded(value), storage_writer=dcp.Writer(folder))


@pytest.mark.parametrize(
    ("planner", "text"),
    [
        ("raises", "the disk is gone"),
        ("model.layer.w", "model/layer.w of shape [5, 3] is not whole: 6 of 15 elements are in no box"),
        ("step", "step was planned and not written"),
    ],
)
def test_an_interrupted_save_leaves_nothing_that_opens_and_what_was_there_stays(
    planner: str, text: str, tmp_path: Path
) -> None:
    told = pool.run(2, interrupted, str(tmp_path / "c"), planner)
    assert all(text in one for one in told), told
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(tmp_path / "c")
    assert (tmp_path / "c").exists() == (planner == "raises")  # torch tells a Writer nothing of another rank's failure
    pool.run(2, again, str(tmp_path / "c"), 1.0)  # the next one takes away what is left
    _is(tmp_path / "c", 1.0)
    told = pool.run(2, interrupted, str(tmp_path / "c"), planner)
    assert all(text in one for one in told), told
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    assert checkpoint.step == 1
    pool.run(2, again, str(tmp_path / "c"), 3.0)
    _is(tmp_path / "c", 3.0)


def refusals(folder: str) -> list[str]:
    told = []
    for writer, collectives in ((dcp.Writer(folder, overwrite=False), True), (dcp.Writer(folder), False)):
        try:
            torch_dcp.save({"x": torch.ones(1)}, storage_writer=writer, use_collectives=collectives)
        except (torch_dcp.CheckpointException, holdfast.HoldfastError) as error:
            told.append(str(error))
    return told


def test_what_a_writer_refuses(tmp_path: Path) -> None:
    pool.run(2, again, str(tmp_path / "c"), 1.0)
    for told in pool.run(2, refusals, str(tmp_path / "c")):
        assert "already holds a committed checkpoint" in told[0]
        assert "use_collectives=False leaves no rank that hears of all others" in told[1]
    _is(tmp_path / "c", 1.0)
    with pytest.raises(ValueError, match="no store for ftp"):
        dcp.Writer("ftp://bucket/c")


# Reading


def test_a_reader_reads_what_holdfast_saved_and_only_the_bytes_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(1 << 18)
    module = torch.nn.Linear(3, 2)
    state = {
        "model": module,
        "big": {"w": weight, "tied": weight, "other": torch.randn(1 << 18)},
        "cfg": {"a": [1, (2, None)]},
    }
    holdfast.save({**state, "mine": holdfast.PerRank(1)}, tmp_path / "c")
    stats = []

    def read_boxes(*args: Any, **options: Any) -> Any:
        stats.append(reads(*args, **options))
        return stats[-1]

    reads = reader_module.read_boxes
    monkeypatch.setattr(reader_module, "read_boxes", read_boxes)
    into: dict[str, Any] = {"big": {"tied": torch.zeros(1 << 18)}, "cfg": {"a": []}}
    torch_dcp.load(into, storage_reader=dcp.Reader(tmp_path / "c"))
    assert _same(into, {"big": {"tied": weight}, "cfg": {"a": [1, (2, None)]}})
    assert stats[0].needed == weight.nbytes and stats[0].read < weight.nbytes + (64 << 10)
    whole = _load_state_dict_from_keys(storage_reader=dcp.Reader(tmp_path / "c"))
    assert _same(whole, {**state, "model": dict(module.state_dict())})
    other = torch.nn.Linear(3, 2)
    torch_dcp.load({"model": other}, storage_reader=dcp.Reader(tmp_path / "c"))
    assert _same(dict(other.state_dict()), dict(module.state_dict()))


def test_a_reader_tells_what_is_wrong(tmp_path: Path) -> None:
    lost = "|metadata is None" if torch.__version__ < (2, 13) else ""  # an older torch drops what a reader says first
    with pytest.raises(torch_dcp.CheckpointException, match=f"there is nothing at {re.escape(str(tmp_path))}/c{lost}"):
        torch_dcp.load({"x": torch.ones(1)}, storage_reader=dcp.Reader(tmp_path / "c"))
    holdfast.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, "m": {"w": torch.ones(4 << 10)}}, tmp_path / "c")
    with pytest.raises(torch_dcp.CheckpointException, match=f"which torch both calls 'a.b'{lost}"):
        torch_dcp.load({"x": torch.ones(1)}, storage_reader=dcp.Reader(tmp_path / "c"))
    holdfast.save({"m": {"w": torch.ones(4 << 10)}}, tmp_path / "d")
    with pytest.raises(torch_dcp.CheckpointException, match="Missing key in checkpoint state_dict: m.x"):
        torch_dcp.load({"m": {"x": torch.ones(1)}}, storage_reader=dcp.Reader(tmp_path / "d"))
    (file,) = (tmp_path / "d").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(torch_dcp.CheckpointException, match="is altered"):
        torch_dcp.load({"m": {"w": torch.zeros(4 << 10)}}, storage_reader=dcp.Reader(tmp_path / "d"))


def several_shards_a_rank(folder: str) -> list[str]:
    """ShardedTensors of several shards a rank, through both doors; read as plain tensors, and these as sharded."""
    warnings.simplefilter("ignore")
    rows = [ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"] * n) for n in (1, 2)]  # type: ignore
    columns = ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"])  # type: ignore[list-item]
    cuts = [(0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)]
    uneven = EnumerableShardingSpec(
        [ShardMetadata([at, 0], [length, 6], f"rank:{rank}/cpu") for at, length, rank in cuts]
    )
    specs: list[Any] = [*rows, columns, uneven]
    wrong = []
    for number, spec in enumerate(specs):
        full = torch.rand(10, 6)
        dist.broadcast(full, 0)
        saved = {"m": {"sharded": _filled(sharded_tensor.zeros(spec, 10, 6), full), "plain": full}}
        torch_dcp.save(saved, storage_writer=dcp.Writer(f"{folder}/torch-{number}"))
        dcp.save(saved, checkpoint_id=f"{folder}/ours-{number}")
        for other in specs:
            into = {"m": {"sharded": torch.zeros(10, 6), "plain": sharded_tensor.zeros(other, 10, 6)}}
            dcp.load(into, checkpoint_id=f"{folder}/torch-{number}")
            back = {"m": {"sharded": sharded_tensor.zeros(other, 10, 6), "plain": torch.zeros(10, 6)}}
            torch_dcp.load(back, storage_reader=dcp.Reader(f"{folder}/ours-{number}"))
            for found in (into["m"]["plain"], back["m"]["sharded"]):
                wanted = _filled(sharded_tensor.zeros(other, 10, 6), full)
                for one, two in zip(found.local_shards(), wanted.local_shards(), strict=True):
                    wrong += [] if torch.equal(one.tensor, two.tensor) else [f"{number} sharded"]
            for plain in (into["m"]["sharded"], back["m"]["plain"]):
                wrong += [] if torch.equal(plain, full) else [f"{number} plain"]
    return wrong


def _filled(tensor: ShardedTensor, full: torch.Tensor) -> ShardedTensor:
    for shard in tensor.local_shards():
        view = full
        places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        for dim, (start, length) in enumerate(places):
            view = view.narrow(dim, start, length)
        shard.tensor.copy_(view)
    return tensor


def test_sharded_tensors_laid_out_by_hand(tmp_path: Path) -> None:
    assert pool.run(2, several_shards_a_rank, str(tmp_path)) == [[], []]


def old_fsdp(folder: str) -> list[str]:
    """FSDP1's own state dicts: ShardedTensors, and the loader that torch has for its optimizer state."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    state = meshes.build("FSDP1 2", 7, steps=2)
    full = meshes.gathered(state)
    model, optimizer = state["model"], state["optimizer"]
    FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    saved = {"model": model.state_dict(), "optim": FSDP1.optim_state_dict(model, optimizer)}
    kinds = {type(value) for value in saved["model"].values()}
    torch_dcp.save(saved, storage_writer=dcp.Writer(f"{folder}/torch"))
    dcp.save(saved, checkpoint_id=f"{folder}/ours")
    wrong = (
        [] if any(issubclass(kind, (ShardedTensor, torch.distributed.tensor.DTensor)) for kind in kinds) else ["kinds"]
    )
    for written, reader in (("torch", dcp.Reader), ("ours", dcp.Reader), ("ours", dcp.FileSystemReader)):
        other = meshes.build("FSDP1 2", 8, steps=2)
        model, optimizer = other["model"], other["optimizer"]
        FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        into = {"model": model.state_dict()}
        dcp.load(into, checkpoint_id=f"{folder}/{written}")
        model.load_state_dict(into["model"])
        loaded = dcp.load_sharded_optimizer_state_dict(into["model"], "optim", reader(f"{folder}/{written}"))
        optimizer.load_state_dict(FSDP1.optim_state_dict_to_load(model, optimizer, loaded["optim"]))
        found = meshes.gathered(other)
        wrong += [f"{written} {n}" for n in full if n not in found or not torch.equal(found[n], full[n])]
    return wrong


def test_the_state_dicts_of_fsdp1_and_torchs_loader_for_its_optimizer(tmp_path: Path) -> None:
    assert pool.run(2, old_fsdp, str(tmp_path)) == [[], []]
    assert os.path.exists(tmp_path / "torch" / "manifest.json")
