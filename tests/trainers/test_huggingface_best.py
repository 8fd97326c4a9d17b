"""The best step of a Trainer: it stays on disk, it is named in the state, and it is in the model at the end."""

import logging
import os
import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback

import holdfast
from holdfast.run.keep import Keep
from holdfast.trainers.huggingface import HoldfastCallback
from holdfast.trainers.huggingface_best import CallbackOptions, TotalLimit, retention
from tests import pool
from tests.trainers import hf_runs

# The loss that each evaluation gives, as the runs here are too short to have a worst step in their middle.
LOSSES = {3: 0.9, 6: 0.4, 9: 0.6, 12: 0.4, 15: 0.7, 18: 0.8}
STEPS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
BEST = {**STEPS, "load_best_model_at_end": True}


def trainer_with(root, losses=None, more=(), **args):
    """A Trainer whose evaluations give ``losses`` by step."""
    trainer = hf_runs.trainer_of(root, more=more, **args)
    loop = trainer.evaluation_loop

    def evaluation_loop(*given, **named):
        output = loop(*given, **named)
        output.metrics["eval_loss"] = (losses or LOSSES).get(trainer.state.global_step, 1.0)
        return output

    trainer.evaluation_loop = evaluation_loop
    return trainer


def train(root, broken_at=None, losses=None, every=None, kept=None, fsdp=False, more=(), **args):
    """Train to the end, or until it is broken off; None where it broke."""
    breaks = hf_runs.Breaks(broken_at, False)
    trainer = trainer_with(root, losses, (breaks, *more), **{**BEST, **args})
    if fsdp:
        hf_runs.shard(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    callback = HoldfastCallback(root, every=every, worker="thread", deadline=240, **(kept or {})).attach(trainer)
    try:
        trainer.train()
    except hf_runs.Broken:
        return None
    return {
        "best": trainer.state.best_model_checkpoint,
        "best_step": trainer.state.best_global_step,
        "step": trainer.state.global_step,
        "steps": callback.manager.steps(),
        "weights": {name: whole(tensor).numpy() for name, tensor in trainer.model.state_dict().items()},
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "limit": trainer.args.save_total_limit,
        "callbacks": trainer.callback_handler.callbacks,
    }


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def weights_of(path):
    saved = holdfast.open(path)
    return {name.removeprefix("model/"): saved.read(name) for name in saved.tensors if name.startswith("model/")}


def is_model_of(found, path):
    saved = weights_of(path)
    assert saved.keys() <= found["weights"].keys() and saved
    for name, tensor in saved.items():
        assert torch.equal(torch.as_tensor(found["weights"][name]), tensor), name


def test_the_best_step_is_loaded_and_stays(tmp_path):
    found = train(tmp_path)
    assert found["best_step"] == 6  # the first of two that are alike
    assert found["best"] == str(tmp_path / "step-000000006")
    assert found["steps"] == [6, 15, 18]
    is_model_of(found, found["best"])


@pytest.mark.slow
def test_the_greatest_may_be_the_best(tmp_path):
    found = train(tmp_path, greater_is_better=True, kept={"keep": Keep(last=1)})
    assert (found["best_step"], found["steps"]) == (3, [3, 18])
    is_model_of(found, found["best"])


@pytest.mark.slow
@pytest.mark.parametrize("broken_at", [6, 10])
def test_a_resumed_run_knows_its_best_step(tmp_path, broken_at):
    assert train(tmp_path / "run", broken_at) is None
    # Wherever the run's folder is now.
    shutil.move(tmp_path / "run", tmp_path / "moved")
    found = train(tmp_path / "moved")
    assert found["best"] == str(tmp_path / "moved" / "step-000000006")
    assert found["steps"] == [6, 15, 18]
    is_model_of(found, found["best"])


@pytest.mark.slow
def test_a_finished_run_has_its_best_step_again(tmp_path):
    first = train(tmp_path)
    again = train(tmp_path)
    assert (again["step"], again["best"]) == (18, first["best"])
    is_model_of(again, first["best"])


@pytest.mark.slow
def test_a_rhythm_of_its_own_saves_each_new_best_step(tmp_path):
    found = train(tmp_path, every=5, kept={"keep": Keep(last=1)})
    assert (found["best_step"], found["steps"]) == (6, [6, 18])
    is_model_of(found, found["best"])


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_load_the_best_step_in_shards(tmp_path, fsdp):
    for found in pool.run(2, train_in_pool, str(tmp_path), fsdp):
        assert found["sharded"] == fsdp
        assert found["best"] == os.path.join(str(tmp_path), "step-000000006")
        is_model_of(found, found["best"])


def train_in_pool(root, fsdp):
    found = train(root, fsdp=fsdp)
    return {key: found[key] for key in ("sharded", "best", "weights")}


@pytest.mark.slow
def test_the_best_step_comes_from_a_store_with_a_fast_tier(tmp_path):
    tiers = {"fast": tmp_path / "fast", "keep_fast": Keep(last=1), "keep": Keep(last=1)}
    trainer = trainer_with(tmp_path / "out", **BEST)
    callback = HoldfastCallback(tmp_path / "store", worker="thread", deadline=240, **tiers).attach(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "fast" / "step-000000006")
    assert 6 in callback.manager.steps()
    is_model_of(
        {"weights": {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()}},
        tmp_path / "fast" / "step-000000006",
    )


@pytest.mark.slow
def test_save_total_limit_counts_the_best_step(tmp_path):
    found = train(tmp_path / "three", save_total_limit=3)
    assert found["steps"] == [6, 15, 18] and found["limit"] == 3
    # Without loading it, as Trainer's own.
    args = {"load_best_model_at_end": False, "metric_for_best_model": "loss", "greater_is_better": False}
    found = train(tmp_path / "two", save_total_limit=2, **args)
    assert found["steps"] == [6, 18]
    assert found["best"] == str(tmp_path / "two" / "step-000000006")
    assert train(tmp_path / "given", save_total_limit=1, kept={"keep": Keep(last=2)})["steps"] == [6, 15, 18]
    # The last step stays too, so that a finished run makes no further one.
    assert train(tmp_path / "one", save_total_limit=1)["steps"] == [6, 18]


def test_trainers_own_checkpoints_are_not_deleted(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    train(tmp_path, save_total_limit=1, max_steps=3)
    assert (tmp_path / "checkpoint-1").is_dir()


@pytest.mark.slow
def test_early_stopping_goes_on_counting(tmp_path):
    def stopping():
        return (EarlyStoppingCallback(early_stopping_patience=3),)

    losses = {3: 0.5, 6: 0.6, 9: 0.7, 12: 0.8, 15: 0.1, 18: 0.1}
    whole_run = train(tmp_path / "whole", losses=losses, more=stopping())
    assert train(tmp_path / "broken", 10, losses=losses, more=stopping()) is None
    resumed = train(tmp_path / "broken", losses=losses, more=stopping())
    assert whole_run["step"] == resumed["step"] == 12
    stopped = next(one for one in resumed["callbacks"] if isinstance(one, EarlyStoppingCallback))
    assert stopped.early_stopping_patience_counter == 3


class Loses(TrainerCallback):
    """Deletes the best step before the training ends, as somebody else might."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 12:
            shutil.rmtree(state.best_model_checkpoint)


@pytest.mark.slow
def test_trainer_warns_that_its_best_step_is_lost(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING", "transformers"):
        found = train(tmp_path, more=(Loses(),))
    assert found["steps"] == [15, 18] and "Could not locate the best model" in caplog.text
    is_model_of(found, tmp_path / "step-000000018")


class Blocks(TrainerCallback):
    """Makes the save of the best step fail: a file lies where its folder is to be."""

    def __init__(self, root):
        self.root = root

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 5:
            (self.root / "step-000000006").write_text("in the way")


@pytest.mark.slow
def test_a_best_step_that_was_not_saved_is_not_the_best(tmp_path, caplog):
    found = train(tmp_path, more=(Blocks(tmp_path),), kept={"on_failure": "warn"})
    assert found["best"] == str(tmp_path / "step-000000003") and found["steps"] == [3, 15, 18]
    assert "best steps that were not saved" in caplog.text
    is_model_of(found, found["best"])


@pytest.mark.slow
def test_a_signal_leaves_the_last_step_in_the_model(tmp_path):
    trainer = trainer_with(tmp_path, more=(hf_runs.Breaks(10, True),), **BEST)
    # A save that is under way at the signal would be the last one.
    callback = HoldfastCallback(tmp_path, worker="none", deadline=240).attach(trainer)
    trainer.train()
    assert callback.should_stop and callback.manager.steps() == [6, 9, 10]
    weights = {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()}
    is_model_of({"weights": weights}, tmp_path / "step-000000010")
    found = train(tmp_path)
    assert found["best"] == str(tmp_path / "step-000000006")
    is_model_of(found, found["best"])


@pytest.mark.slow
def test_a_best_step_that_a_signal_has_saved_is_the_best(tmp_path):
    # Evaluated at each third step, and saved at each sixth.
    args = {**BEST, "save_steps": 6}
    trainer = trainer_with(tmp_path, {6: 0.9, 9: 0.1}, more=(hf_runs.Breaks(9, True),), **args)
    HoldfastCallback(tmp_path, worker="none", deadline=240, keep=Keep(last=1)).attach(trainer)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "step-000000009")
    found = train(tmp_path, losses={12: 0.5}, kept={"keep": Keep(last=1)}, save_steps=6)
    assert (found["best"], found["steps"]) == (str(tmp_path / "step-000000009"), [9, 18])
    is_model_of(found, found["best"])


def test_another_best_than_trainers_is_refused(tmp_path):
    trainer = hf_runs.trainer_of(tmp_path, **BEST)
    with pytest.raises(ValueError, match="asks for mode='min'"):
        HoldfastCallback(tmp_path, keep=Keep(best=1, mode="max")).attach(trainer)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("best", [1, 4, 6, None])
def test_a_total_limit_keeps_what_trainer_keeps(limit, best):
    rule = TotalLimit(last=limit, best=1)
    steps = list(range(1, 7))
    # As transformers.trainer_utils.rotate_checkpoints: the newest and the best are safe, then the oldest go.
    safe = {6, best} - {None}
    left = list(steps)
    for step in steps:
        if len(left) > max(limit, len(safe)) and step not in safe:
            left.remove(step)
    assert rule.kept({step: 0.5 if step == best else None for step in steps}) == set(left)


def test_what_is_kept_follows_the_arguments(tmp_path):
    def rules(options=CallbackOptions("run"), **args):
        return retention(hf_runs.trainer_of(tmp_path, **args).args, options)

    assert rules().keep == Keep() and not rules().only_best
    assert rules(save_total_limit=4).keep == TotalLimit(last=4, mode="min")
    assert rules(CallbackOptions("run", keep=Keep(last=9)), save_total_limit=4).keep == Keep(last=9)
    best = rules(**BEST)
    assert (best.keep.best, best.keep.mode, best.keep_fast.best, best.only_best) == (1, "min", 1, True)
    assert rules(**{**BEST, "greater_is_better": True}).keep.mode == "max"


@pytest.mark.slow
def test_a_run_begins_from_a_step_of_another_folder(tmp_path):
    whole_run = hf_runs.train(tmp_path / "first", kept={"keep": Keep(last=9)}, args={"num_train_epochs": 1})
    trainer = hf_runs.trainer_of(tmp_path, num_train_epochs=1)
    callback = HoldfastCallback(tmp_path / "second", every=2, worker="thread", deadline=240).attach(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "step-000000002"))
    assert callback.restored.step == 2 and callback.manager.steps() == [4, 6]
    assert hf_runs.digest(trainer.model, trainer.optimizer.optimizer) == whole_run["digest"]
    # In its own folder later steps have to go first.
    trainer = hf_runs.trainer_of(tmp_path, num_train_epochs=1)
    HoldfastCallback(tmp_path / "first", every=2, worker="thread", deadline=240).attach(trainer)
    with pytest.raises(ValueError, match="holds a later one, step-000000006"):
        trainer.train(resume_from_checkpoint=tmp_path / "first" / "step-000000004")
