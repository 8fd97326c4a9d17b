"""Files, steps and models that are not the ones meant are refused, with the reason."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.ondisk import manifest, part
from holdfast.state.layers import decode_kinds, encode_kinds, kinds_of
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from holdfast.testing import faults
from tests import pool

# Files of another save


def _saved(path: Path, seed: int, step: int = 1) -> Path:
    state = {"model": {"w": torch.full((3000,), float(seed))}, "rng": holdfast.PerRank(seed), "step": step}
    holdfast.save(state, path)
    return path


def _data(path: Path, section: str = "model") -> Path:
    (found,) = (path / section).glob("*.safetensors")
    return found


USES: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda path, to: holdfast.load(path, {"model": {"w": torch.zeros(3000)}}, only="model"),
    "load without sums": lambda path, to: holdfast.load(
        path, {"model": {"w": torch.zeros(3000)}}, only="model", verify=False
    ),
    "slice": lambda path, to: holdfast.open(path).read("model/w", [slice(3, 9)]),
    "mapped": lambda path, to: holdfast.open(path).state_dict(mmap=True, verify=False),
    "verify": lambda path, to: holdfast.open(path).verify(),
    "copy": lambda path, to: holdfast.copy(path, to),
    "convert": lambda path, to: holdfast.convert(path, to),
    "sign": lambda path, to: holdfast.tools.sign(path, bytes(32)),
}


@pytest.mark.parametrize("how", USES)
def test_a_file_of_another_save_is_found(how: str, tmp_path: Path) -> None:
    """Of the same step, shape, size and name in its folder: only the save is another."""
    one, other = _saved(tmp_path / "one", 1), _saved(tmp_path / "other", 2)
    assert _data(one).stat().st_size == _data(other).stat().st_size
    shutil.copy(_data(other), _data(one))
    with pytest.raises(holdfast.errors.Damaged) as caught:
        USES[how](one, tmp_path / "to")
    if how not in ("copy", "sign", "convert"):
        saves = [holdfast.open(path).manifest.save for path in (other, one)]
        assert f"is a file of another save, as its header says: {saves[0]}, not {saves[1]}" in str(caught.value)
    assert not (tmp_path / "to" / "manifest.json").exists()


def test_a_value_of_a_rank_from_another_save_is_found(tmp_path: Path) -> None:
    one, other = _saved(tmp_path / "one", 1), _saved(tmp_path / "other", 2)
    shutil.copy(_data(other, "state"), _data(one, "state"))
    with pytest.raises(holdfast.errors.Damaged, match="of another save"):
        holdfast.open(one).per_rank("rng", 0)


def two_ranks(path: str) -> None:
    rank = dist.get_rank()
    shard = holdfast.Shard(torch.full((500,), float(rank)), shape=(1000,), offsets=(500 * rank,))
    holdfast.save({"model": {"w": shard}}, path)


def test_files_of_two_ranks_that_were_exchanged_are_found(tmp_path: Path) -> None:
    pool.run(2, two_ranks, str(tmp_path / "c"))
    first, second = sorted((tmp_path / "c" / "model").iterdir())
    spare = tmp_path / "spare"
    for path, to in ((first, spare), (second, first), (spare, second)):
        path.rename(to)
    with pytest.raises(holdfast.errors.Damaged, match="rank 1, section 'model', as its header says, under another"):
        holdfast.open(tmp_path / "c").state_dict()


def test_blocks_of_another_save_behind_the_right_header_are_found(tmp_path: Path) -> None:
    one, other = _saved(tmp_path / "one", 1), _saved(tmp_path / "other", 2)
    data, theirs = _data(one).read_bytes(), _data(other).read_bytes()
    _data(one).write_bytes(data[:4096] + theirs[4096:])
    with pytest.raises(holdfast.errors.Damaged, match="have another checksum"):
        holdfast.open(one).state_dict()


def test_a_late_commit_takes_no_part_and_no_file_of_another_save(tmp_path: Path) -> None:
    for swapped in ("file", "part"):
        folder, other = _uncommitted(tmp_path / f"{swapped} 1", 1), _uncommitted(tmp_path / f"{swapped} 2", 2)
        if swapped == "file":
            shutil.copy(_data(other), _data(folder))
        else:
            (ours,), (theirs,) = (folder / "parts").iterdir(), (other / "parts").iterdir()
            shutil.copy(theirs, ours)
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.tools.recover(folder)
        assert not (folder / "manifest.json").exists()
    holdfast.tools.recover(_uncommitted(tmp_path / "whole", 3)).verify()


def _uncommitted(path: Path, seed: int) -> Path:
    """What a background save leaves whose trainer died before the commit."""
    _saved(path, seed)
    record = manifest.decode((path / "manifest.json").read_bytes(), "")
    left = part.Part(
        version=part.VERSION, save=record.save, rank=0, world_size=1,
        files=[tuple(row[:4]) for row in record.files], reused=[], manifest=record,  # type: ignore[misc]
    )  # fmt: skip
    (path / "parts").mkdir()
    (path / part.file_name(0, record.save)).write_bytes(part.encode(left))
    (path / "manifest.json").unlink()
    return path


# Steps of another run


def _manager(root: Any, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, every=1, signals=(), worker="none", keep=holdfast.Keep(last=20), **options)


def _run(root: Any, steps: range, value: float, *, restore: bool = True) -> str:
    """What a start of a job does; in this process a run of its own is a marked one, as another process would be."""
    state: dict[str, Any] = {"w": {"x": torch.full((4,), value)}, "step": 0}
    with _manager(root) as manager:
        if restore:
            manager.restore(state)
        for step in steps:
            state["step"] = step
            manager.save(step, state)
        newest = manager.latest()
        assert newest is not None
        return newest.run


@pytest.fixture
def _new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def begin() -> None:
        fresh = os.urandom(8).hex()
        for module in ("holdfast.save", "holdfast.saver", "holdfast.run.saves"):
            monkeypatch.setattr(sys.modules[module], "RUN", fresh)

    return begin


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_run_that_began_afresh_beside_an_older_one(
    where: str, tmp_path: Path, _new_process: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path if where == "disk" else StorePlace(Local(tmp_path), "")
    old = _run(root, range(98, 101), 1.0)
    assert "another run" not in caplog.text
    _new_process()
    with _manager(root) as manager:  # forgets to restore
        fresh = {"w": {"x": torch.full((4,), 2.0)}, "step": 1}
        with pytest.raises(holdfast.errors.Mismatch, match="holds steps 98 … 100 of an earlier run, .* restored none"):
            manager.save(1, fresh)
        assert manager.steps() == [98, 99, 100]
        manager.save(1, fresh, overwrite=True)  # and means it
        manager.save(2, {**fresh, "step": 2})
    told = [record.getMessage() for record in caplog.records if "another run" in record.getMessage()]
    assert len(told) == 1 and "holds steps up to 100, and this run goes on at step 1" in told[0], told
    new = holdfast.open(tmp_path / "step-000000002").run
    assert new != old
    state = {"w": {"x": torch.zeros(4)}, "step": 0}
    with _manager(root) as manager:
        with pytest.raises(holdfast.errors.Mismatch, match="steps of two runs") as caught:
            manager.restore(state)
        assert old in str(caught.value) and new in str(caught.value) and 'run="any"' in str(caught.value)
        assert state["step"] == 0 and not state["w"]["x"].any()
        for run, step in ((new, 2), (old, 100), ("any", 100)):
            loaded = manager.restore(state, run=run)
            assert loaded is not None and loaded.step == step == state["step"]
        assert manager.restore(state, run="0" * 16) is None
        with pytest.raises(holdfast.errors.Mismatch, match="restored none of them: step 3 is not saved"):
            manager.save(3, state)


def _save_and_tell(root: str) -> str:
    with _manager(root) as manager, pytest.raises(holdfast.errors.Mismatch) as caught:
        manager.step(2, {"w": {"x": torch.zeros(4)}, "step": 2})
    return str(caught.value)


def test_all_ranks_refuse_to_save_beside_an_older_run(tmp_path: Path) -> None:
    _run(tmp_path, range(3, 4), 1.0)
    texts = pool.run(2, _save_and_tell, str(tmp_path))
    assert len(set(texts)) == 1 and "holds step 3 of an earlier run" in texts[0]
    with _manager(tmp_path) as manager:  # who begins behind it may have loaded it by hand
        assert manager.save(4, {"w": {"x": torch.zeros(4)}, "step": 4}).step == 4


def test_a_step_that_cannot_be_read_is_not_said_to_be_of_another_run(tmp_path: Path) -> None:
    """Else a disk that fails for a moment would take training back to an older step."""
    run = _run(tmp_path, range(1, 4), 1.0)
    state = {"w": {"x": torch.zeros(4)}, "step": 0}
    with _manager(tmp_path) as manager:
        with faults("read", times=0, under=tmp_path / "step-000000003"), pytest.raises(holdfast.errors.StorageError):
            manager.restore(state, run=run)
        assert state["step"] == 0
        loaded = manager.restore(state, run=run)
        assert loaded is not None and loaded.step == 3


def test_a_run_that_is_resumed_stays_the_same_run(tmp_path: Path, _new_process: Callable[[], None]) -> None:
    first = _run(tmp_path, range(1, 4), 1.0)
    _new_process()
    assert _run(tmp_path, range(4, 6), 1.0) == first
    _new_process()
    assert _run(tmp_path, range(6, 8), 1.0, restore=False) == first  # loaded by hand, and goes on behind it


def test_saves_without_a_manager_go_on_one_after_the_other(tmp_path: Path, _new_process: Callable[[], None]) -> None:
    for step in (1, 2, 3):
        _new_process()
        holdfast.save({"w": {"x": torch.full((4,), float(step))}, "step": step}, tmp_path / f"step-{step:09d}")
    state = {"w": {"x": torch.zeros(4)}, "step": 0}
    loaded = _manager(tmp_path).restore(state)
    assert loaded is not None and loaded.step == 3


def test_a_step_that_was_copied_from_another_run(tmp_path: Path, _new_process: Callable[[], None]) -> None:
    _run(tmp_path / "b", range(500, 501), 2.0)
    _new_process()
    _run(tmp_path / "a", range(1, 3), 1.0)
    holdfast.copy(tmp_path / "b" / "step-000000500", tmp_path / "a" / "step-000000500")
    with pytest.raises(holdfast.errors.Mismatch, match="steps of two runs"):
        _manager(tmp_path / "a").restore({"w": {"x": torch.zeros(4)}, "step": 0})


def test_load_of_a_run(tmp_path: Path) -> None:
    run = holdfast.open(_saved(tmp_path / "c", 1)).run
    target = {"model": {"w": torch.zeros(3000)}}
    with pytest.raises(holdfast.errors.Mismatch, match=f"is of run {run}"):
        holdfast.load(tmp_path / "c", target, only="model", run="0" * 16)
    assert not target["model"]["w"].any()
    holdfast.load(tmp_path / "c", target, only="model", run=run)


# Another model under the same names


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.act = nn.Linear(8, 8), norm(), act()


class Model(nn.Module):
    def __init__(
        self, norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(8), act: Callable[[], nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList([Block(norm, act) for _ in range(12)])


def test_layers_of_another_kind_are_refused(tmp_path: Path) -> None:
    holdfast.save({"model": Model(), "step": 3}, tmp_path / "c")
    for other, name, was, now in (
        (Model(norm=lambda: nn.GroupNorm(2, 8)), "model/layers.7.norm", "LayerNorm", "GroupNorm"),
        (Model(act=nn.GELU), "model/layers.11.act", "ReLU", "GELU"),
    ):
        before = [parameter.clone() for parameter in other.parameters()]
        with pytest.raises(holdfast.errors.Mismatch) as caught:
            holdfast.load(tmp_path / "c", {"model": other, "step": 0})
        assert f"{name}: saved by a {was}, here a {now}" in str(caught.value) and "12 differ" in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
        holdfast.load(tmp_path / "c", {"model": other, "step": 0}, other_model=True)
        holdfast.load(tmp_path / "c", {"model": other}, only="model/embed*")


class Fused(nn.Module):
    """A layer norm of another library, as a user would put it in the place of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))


class Adapted(nn.Linear):
    """A layer that derives from torch's, as adapters and quantised ones do."""


def _adapted() -> nn.Module:
    model = Model()
    for block in model.layers:
        block.up = Adapted(8, 8)  # type: ignore[union-attr]
    return model


def _parts_wrapped() -> nn.Module:
    model = Model()
    for number, block in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(block)
    model.embed = torch.compile(model.embed)  # type: ignore[assignment]
    return model


SAME: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(Model()),  # type: ignore[return-value]
    "parts compiled and checkpointed": _parts_wrapped,
    "another library's norm": lambda: Model(norm=Fused),
    "derived": _adapted,
    "without activations": lambda: Model(act=nn.Identity),
    "data parallel": lambda: nn.DataParallel(Model()),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.slow_cases("compiled", "parts compiled and checkpointed")
def test_wrappers_and_stand_ins_are_the_same_model(kind: str, tmp_path: Path) -> None:
    holdfast.save({"model": Model()}, tmp_path / "plain")
    holdfast.load(tmp_path / "plain", {"model": SAME[kind]()})
    holdfast.save({"model": SAME[kind]()}, tmp_path / "other")
    holdfast.load(tmp_path / "other", {"model": Model()})
    holdfast.load(tmp_path / "other", {"model": SAME[kind]()})


def sharded(path: str, kind: str, saving: bool) -> None:
    model: nn.Module = Model()
    if kind == "fsdp2":
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block.up)
            fully_shard(block)
        fully_shard(model)
        assert type(model.layers[0].up) is not nn.Linear  # type: ignore[index]
    else:
        model = DistributedDataParallel(model)
    if saving:
        holdfast.save({"model": model}, path)
    else:
        holdfast.load(path, {"model": model})


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_sharded_models_are_the_same_model(kind: str, tmp_path: Path) -> None:
    holdfast.save({"model": Model()}, tmp_path / "plain")
    pool.run(2, sharded, str(tmp_path / "plain"), kind, False)
    pool.run(2, sharded, str(tmp_path / "other"), kind, True)
    holdfast.load(tmp_path / "other", {"model": Model()})
    with pytest.raises(holdfast.errors.Mismatch, match="saved by a ReLU, here a GELU"):
        holdfast.load(tmp_path / "other", {"model": Model(act=nn.GELU)})


def test_a_background_save_remembers_the_kinds(tmp_path: Path) -> None:
    model = Model()
    with holdfast.Saver(worker="thread") as saver:
        for number in (1, 2, 3):
            saver.save({"model": model}, tmp_path / str(number)).wait()
    for number in (1, 2, 3):
        producer = holdfast.open(tmp_path / str(number)).manifest.producer
        assert decode_kinds(producer)["model/layers.*.norm"] == "LayerNorm"


def test_what_is_told_is_short_and_says_all() -> None:
    model = Model()
    model.layers[3].act = nn.Tanh()  # type: ignore[union-attr]
    kinds = dict(kinds_of("model", model))
    text = encode_kinds(kinds)
    assert len(text) < 1000
    short = decode_kinds({"modules": text})
    assert short["model/layers.3.act"] == "Tanh" and short["model/layers.4.act"] == "ReLU"
    assert short["model/embed"] == "Embedding" and "model/layers.*.act" not in short
    assert encode_kinds({}) == encode_kinds({"model": ""}) == ""
    assert decode_kinds({}) == decode_kinds({"modules": "[1"}) == {}


def test_kinds_of_a_dropped_checkpoint_stay(tmp_path: Path) -> None:
    model = Model()
    holdfast.save({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, tmp_path / "c")
    assert decode_kinds(holdfast.open(tmp_path / "c").manifest.producer)


def test_a_step_that_is_saved_again_is_of_the_same_run(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        runs = {manager.save(1, {"w": {"x": torch.ones(3)}, "step": 1}, overwrite=bool(n)).run for n in range(3)}
    assert len(runs) == 1


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("below", ["", "model"])
def test_a_checkpoint_is_not_the_folder_of_a_run(below: str, tiers: bool, tmp_path: Path) -> None:
    root = _saved(tmp_path / "run" / "step-1", 1) / below
    fast = {"fast": tmp_path / "fast"} if tiers else {}
    with (
        holdfast.CheckpointManager(root, every=1, worker="none", journal=False, **fast) as manager,
        pytest.raises(holdfast.errors.NotACheckpoint, match=f"give the folder of its run, {tmp_path / 'run'}"),
    ):
        manager.restore({"model": {"w": torch.zeros(3000)}})


def test_a_run_may_begin_beside_what_a_checkpoint_holds(tmp_path: Path) -> None:
    root = _saved(tmp_path / "base", 1) / "finetuned"
    with holdfast.CheckpointManager(root, every=1, worker="none", journal=False) as manager:
        assert manager.restore({"model": {"w": torch.zeros(3000)}}) is None
