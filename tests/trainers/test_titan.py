"""A trainer written like torchtitan's goes on with the same bits, and each setting does what its page says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import holdfast
from holdfast.trainers.titan import CheckpointManager
from holdfast.trainers.titan_steps import NAME, find_step
from tests.trainers.lives import KILLED, differences, live
from tests.trainers.scripts import play


@pytest.mark.slow
def test_it_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = live(2, play, "titan.py", tmp_path / "whole", [], {}, "")
    assert live(2, play, "titan.py", tmp_path / "killed", [], {}, "step 14:") == KILLED
    again = live(2, play, "titan.py", tmp_path / "killed", [], {}, "")
    assert [lines[-len(again[0]) :] for lines in whole] == again and len(again[0]) in (10, 15)
    unlike = differences(tmp_path / "whole/checkpoint/step-20", tmp_path / "killed/checkpoint/step-20")
    assert [name for name in unlike if not name.startswith("rng")] == []  # the script seeds torch's generators alone
    assert sorted(path.name for path in tmp_path.glob("whole/checkpoint/step-*")) == ["step-10", "step-15", "step-20"]


class Counter:
    """A loader, schedulers or the state of a trainer, as torchtitan's are: objects with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Run:
    """Two parts of a model, their optimizers and counters, on one process, with a manager of these settings."""

    def __init__(self, root: Path, seed: int, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.parts: list[nn.Module] = [nn.ModuleDict({str(i): nn.Linear(3, 3)}) for i in range(2)]
        self.optimizers = SimpleNamespace(
            optimizers=[torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.parts]
        )
        self.loader, self.schedule, self.train_state = Counter(), Counter(), Counter()
        self.states: dict[str, Any] = {"train_state": self.train_state, "tokens": seed}
        config = SimpleNamespace(**{"interval": 2, "async_mode": "disabled", "last_save_model_only": False, **settings})
        self.manager = CheckpointManager(
            config, dataloader=self.loader, model_parts=self.parts, optimizers=self.optimizers,
            lr_schedulers=self.schedule, states=self.states, base_folder=str(root),
        )  # fmt: skip

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.train_state.count += 1
            self.loader.count += 10
            self.schedule.count += 100
            self.states["tokens"] = self.train_state.count * 1000
            for part, optimizer in zip(self.parts, self.optimizers.optimizers, strict=True):
                sum(p.square().sum() for p in part.parameters()).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.manager.save(self.train_state.count)
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for part in self.parts for name, tensor in part.state_dict().items()}

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.train_state.count, self.loader.count, self.schedule.count

    def moments(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers.optimizers)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_that_is_named_is_loaded_and_gone_on_from(tmp_path: Path) -> None:
    run = Run(tmp_path, 0).train(2)
    second = run.weights
    run.train(2)
    fourth = run.weights
    run.train(2).manager.close()
    again = Run(tmp_path, 1)
    assert again.manager.load(step=2)
    assert same(again.weights, second) and again.counts == (2, 20, 200)
    again.train(2).manager.close()  # step 4 was there already, and so is 6
    last = Run(tmp_path, 2)
    with pytest.raises(holdfast.errors.NotACheckpoint, match="step-3"):
        last.manager.load(step=3)
    with pytest.raises(holdfast.errors.Mismatch, match=r"steps of two runs.*load\(step=…\)"):
        last.manager.load()  # which of both is meant, is to be said
    assert last.manager.load(step=4) and same(last.weights, fourth) and last.counts == (4, 40, 400)
    last.train(2).manager.close()
    assert Run(tmp_path, 3).manager.load()


@pytest.mark.parametrize("step", [-1, 2])
def test_plain_values_of_states_come_and_go(tmp_path: Path, step: int) -> None:
    Run(tmp_path, 0).train(2).manager.close()
    again = Run(tmp_path, 1)
    assert again.manager.load(step=step) and again.states["tokens"] == 2000
    again.train(2).manager.close()
    assert holdfast.open(tmp_path / "checkpoint" / "step-4").value("tokens") == 4000


def test_names_that_it_needs_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="states has 'step'"):
        CheckpointManager(
            SimpleNamespace(), dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None,
            states={"step": Counter()}, base_folder=str(tmp_path),
        )  # fmt: skip


def test_what_is_excluded_is_not_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path, 0).train(2)
    for step in (-1, 2):
        again = Run(tmp_path, 1, exclude_from_loading=["dataloader", "lr_scheduler"])
        assert again.manager.load(step=step)
        assert same(again.weights, run.weights) and again.counts == (2, 0, 0)
        assert again.moments() == run.moments()
    first = {"initial_load_path": str(tmp_path / "checkpoint/step-2"), "initial_load_model_only": False}
    other = Run(tmp_path / "other", 1, exclude_from_loading=["dataloader", "lr_scheduler"], **first)
    assert other.manager.load() and other.counts == (2, 0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_step_may_hold_the_model_alone(tmp_path: Path, dtype: str) -> None:
    run = Run(tmp_path, 0, last_save_model_only=True, export_dtype=dtype).train(3)
    assert run.manager.save(4, last_step=True)
    run.manager.close()
    found = holdfast.open(tmp_path / "checkpoint" / "step-4")
    assert sorted(found.tensors) == sorted(f"model/{name}" for name in run.weights)
    assert all(torch.equal(found.read(f"model/{n}"), w.to(getattr(torch, dtype))) for n, w in run.weights.items())


@pytest.mark.parametrize("model_only", [True, False])
def test_a_first_load_comes_from_elsewhere_unless_there_is_a_step(tmp_path: Path, model_only: bool) -> None:
    first = Run(tmp_path / "first", 0).train(2)
    settings = {"initial_load_path": str(tmp_path / "first/checkpoint/step-2"), "initial_load_model_only": model_only}
    run = Run(tmp_path / "second", 1, **settings)
    assert run.manager.load()
    assert same(run.weights, first.weights)
    assert run.counts == ((0, 0, 0) if model_only else (2, 20, 200)) and bool(run.moments()) != model_only
    run.train(2)
    trained = run.weights
    again = Run(tmp_path / "second", 2, **settings)
    assert again.manager.load() and same(again.weights, trained)


def test_so_does_one_that_torchtitan_saved(tmp_path: Path) -> None:
    theirs = Run(tmp_path / "unused", 0)
    # As torchtitan lays it out: the model's parameters at the top, all else beside them.
    dcp.save({**theirs.weights, "train_state": {"step": torch.tensor(7)}}, checkpoint_id=tmp_path / "theirs")
    run = Run(tmp_path / "ours", 1, initial_load_path=str(tmp_path / "theirs"))
    assert run.manager.load() and same(run.weights, theirs.weights)


def test_what_is_not_asked_for_is_not_done(tmp_path: Path) -> None:
    assert not Run(tmp_path / "empty", 0).manager.load()
    readers = Run(tmp_path / "read", 0, load_only=True).train(2)
    assert not readers.manager.save(4, last_step=True) and not list(tmp_path.glob("read/checkpoint/step-*"))
    first = Run(tmp_path / "one", 0, enable_first_step_checkpoint=True, keep_latest_k=0).train(5)
    first.manager.close()
    assert sorted(path.name for path in tmp_path.glob("one/checkpoint/step-*")) == ["step-1", "step-2", "step-4"]
    off = Run(tmp_path / "off", 0, enable=False).train(2)
    assert not off.manager.load() and not (tmp_path / "off").exists()
    with pytest.raises(ValueError, match="last_save_in_hf is True, but sd_adapter is not provided"):
        Run(tmp_path, 0, last_save_in_hf=True)
    with pytest.raises(holdfast.errors.Unsupported, match="ft_manager"):
        manager_of(off, tmp_path / "ft", SimpleNamespace(), ft_manager=SimpleNamespace(enabled=True))


def manager_of(run: Run, root: Path, config: Any, **more: Any) -> CheckpointManager:
    return CheckpointManager(
        config, dataloader=run.loader, model_parts=run.parts, optimizers=run.optimizers, lr_schedulers=run.schedule,
        states=run.states, base_folder=str(root), **more,
    )  # fmt: skip


def test_a_config_builds_its_manager(tmp_path: Path) -> None:
    run = Run(tmp_path, 0, enable=False)
    config = CheckpointManager.Config(enable=True, interval=3, async_mode="ASYNC", keep_latest_k=2)
    assert config.async_mode == "async" and config.load_step == -1 and not config.create_seed_checkpoint
    manager = config.build(
        dataloader=None, model_parts=run.parts, optimizers=run.optimizers, lr_schedulers=run.schedule,
        states={"train_state": run.train_state}, sd_adapter=None, base_folder=str(tmp_path),
    )  # fmt: skip
    assert type(manager) is CheckpointManager
    assert [manager.save(step) for step in range(1, 10)] == [step % 3 == 0 for step in range(1, 10)]
    manager.maybe_wait_for_staging()
    assert manager.staging_future is None
    manager.maybe_wait_for_saving()
    assert manager.save_future is None
    manager.close()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-6", "step-9"]
    off = CheckpointManager.Config().build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not off.enable and not off.save(500) and not off.load()
    off.maybe_wait_for_staging()
    off.maybe_wait_for_saving()
    off.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"folder": "  "}, "folder.*cannot be empty"),
        ({"interval": 0}, "at least 1"),
        ({"keep_latest_k": -1}, "cannot be negative"),
        ({"keep_latest_k": 1}, "at least 2 checkpoint replicas"),
        ({"exclude_from_loading": ["model"]}, "model key shouldn't be in exclude_from_loading"),
        ({"exclude_from_loading": ["optimizer"]}, "lr_scheduler must be excluded"),
        ({"initial_load_path": "relative"}, "absolute path or a remote"),
        ({"initial_load_in_hf": True, "initial_load_model_only": False}, "requires initial_load_model_only"),
        ({"initial_load_in_hf_quantized": True, "initial_load_path": "/a"}, "requires initial_load_in_hf"),
        ({"last_save_in_hf": True, "last_save_model_only": False}, "requires last_save_model_only=True"),
        ({"last_save_in_hf": True, "folder": "s3://bucket/run"}, "not supported with a remote"),
        ({"initial_load_in_hf": True, "initial_load_path": "s3://bucket/run"}, "not supported with a remote"),
        ({"async_mode": "sometimes"}, "Invalid async_mode"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CheckpointManager.Config(**fields)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_step_that_is_saved_again_replaces_the_one_that_is_there(tmp_path: Path, mode: str) -> None:
    Run(tmp_path, 0, async_mode=mode).train(6).manager.close()
    again = Run(tmp_path, 1, async_mode=mode).train(4)  # from scratch, in the same folder
    again.manager.close()
    found = holdfast.open(tmp_path / "checkpoint" / "step-4")
    assert all(torch.equal(found.read(f"model/{name}"), weight) for name, weight in again.weights.items())
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]


def test_a_seed_checkpoint_gives_the_model_alone(tmp_path: Path) -> None:
    seed = Run(tmp_path, 0, last_save_model_only=True)
    assert seed.manager.save(curr_step=0, last_step=True)
    seed.manager.close()
    for step in (-1, 0):
        run = Run(tmp_path, 1)
        assert run.manager.load(step=step)
        assert same(run.weights, seed.weights) and run.counts == (0, 0, 0) and not run.moments()


def test_a_step_that_is_not_there_is_named_as_torchtitan_does(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    for _ in ("no folder yet", "a folder without that step"):
        with pytest.raises(FileNotFoundError, match=r"--checkpoint\.load_step=5 not found"):
            run.manager.load(step=5)
        run.train(2)


def test_the_newest_step_is_none_that_training_left_behind(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, every=100, keep=holdfast.Keep(last=9), name=NAME) as manager:
        for step in (100, 200, 300):
            manager.save(step, {"step": step})
            manager.wait()
        manager.restore({"step": 0}, step=100)
        manager.save(150, {"step": 150})
        manager.wait()
        assert find_step(manager.root, -1) == 150
        assert find_step(manager.root, 300) == 300, "one that is named is loaded all the same"


@pytest.mark.parametrize("step", [-1, 8])
def test_a_step_that_torchtitan_saved_in_the_folder_is_gone_on_from(tmp_path: Path, step: int) -> None:
    Run(tmp_path, 0).train(2).manager.close()
    theirs = Run(tmp_path / "unused", 1, enable=False)
    theirs.loader.count, theirs.schedule.count, theirs.train_state.count = 80, 800, 8
    theirs.optimizers = Counter()  # an optimizers' container, of which its own state dict counts here
    theirs.optimizers.count = 8000
    whole = {**theirs.weights, "optimizer": theirs.optimizers, "dataloader": theirs.loader, "tokens": 8,
             "lr_scheduler": theirs.schedule, "train_state": theirs.train_state}  # fmt: skip
    dcp.save(whole, checkpoint_id=tmp_path / "checkpoint/step-8")
    run = Run(tmp_path, 2)
    run.manager.states["optimizer"] = container = Counter()
    assert run.manager.load(step=step)
    assert same(run.weights, theirs.weights) and run.counts == (8, 80, 800)
    assert container.count == 8000 and run.states["tokens"] == 8
    run.train(2).manager.close()
    assert (tmp_path / "checkpoint/step-8/.metadata").exists()
    assert holdfast.open(tmp_path / "checkpoint/step-10").value("tokens") == 10_000


class Adapter:
    """Other names for the model's parameters, as those of torchtitan's models have them."""

    fqn_to_index_mapping = None

    def __init__(self, assets: str | None = None) -> None:
        self.hf_assets_path = assets

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": tensor for name, tensor in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> Any:
        return HuggingFaceStorageReader(path)


@pytest.mark.parametrize("by", ["initial_load_path", "hf_assets_path"])
def test_the_last_step_may_be_hugging_faces(tmp_path: Path, by: str) -> None:
    run = Run(tmp_path, 0, enable=False)
    config = CheckpointManager.Config(enable=True, interval=2, last_save_in_hf=True, export_dtype="bfloat16")
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (assets / name).write_text("{}")
    manager = manager_of(run, tmp_path, config, sd_adapter=Adapter(str(assets)))
    assert manager.save(2) and manager.save(2, last_step=True) and manager.save(2, last_step=True)
    manager.close()
    saved = tmp_path / "checkpoint/step-2"
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in saved.rglob("*")) == names, "nothing of the step that was there before"
    tensors = load_file(next(saved.glob("*.safetensors")))
    assert tensors.keys() == {f"model.{name}" for name in run.weights}
    again = Run(tmp_path, 1, enable=False)
    path = str(saved) if by == "initial_load_path" else None
    config = CheckpointManager.Config(enable=True, folder="other", initial_load_in_hf=True, initial_load_path=path)
    adapter = Adapter(None if path else str(saved))
    assert manager_of(again, tmp_path, config, sd_adapter=adapter).load()
    assert same(again.weights, {name: weight.bfloat16().float() for name, weight in run.weights.items()})
