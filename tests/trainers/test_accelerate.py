"""Loops of Accelerate: one that was broken off and goes on is the one that was not, bit for bit."""

import os

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import holdfast
from holdfast.errors import Unsupported
from holdfast.trainers.accelerate import epoch_of, state_of
from tests import pool
from tests.trainers import hf_runs


def same(whole, resumed, step):
    assert resumed["restored"] == step
    steps = [line[0] for line in whole["log"]]
    assert resumed["log"] == whole["log"][steps.index(step) + 1 :]
    for key in ("digest", "average", "rate", "scale"):
        assert resumed[key] == whole[key], key


# Seven steps an epoch: 7 is its last, 8 the first of the next, 11 in its middle.
# A gradient scaler doubles its factor at every fifth.
@pytest.mark.slow
@pytest.mark.parametrize("broken_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (7, 8)), 11])
def test_a_loop_goes_on_bit_for_bit(tmp_path, broken_at):
    same(*hf_runs.loop_and_resumed(tmp_path, broken_at, {}), broken_at)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 1},
        {"accumulate": 3},
        {"workers": 2},
        {"stream": True},
        {"stateful": True},
        {"stateful": True, "workers": 2},
        {"seedable": True},
    ],
)
def test_so_does_one_with_other_loaders(tmp_path, options):
    same(*hf_runs.loop_and_resumed(tmp_path, 9, options), 9)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_so_do_two_ranks(tmp_path, fsdp):
    for whole, resumed in pool.run(2, hf_runs.loop_and_resumed, str(tmp_path), 6, {"fsdp": fsdp}):
        assert whole["sharded"] == fsdp
        same(whole, resumed, 6)


@pytest.mark.slow
def test_other_ranks_go_on_after_as_many_samples(tmp_path):
    assert pool.run(2, hf_runs.loop, str(tmp_path), 2) == [None, None]  # 2 ranks, 2 steps of 2 batches of 2
    alone = hf_runs.loop(tmp_path)
    assert alone["restored"] == 2
    assert [line[0] for line in alone["log"]][:4] == [3, 4, 5, "end"]  # 12 of 28 samples were left


def test_between_two_micro_batches_nothing_is_saved(tmp_path):
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 2))
    state = state_of(accelerator)
    with accelerator.accumulate(model):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(Unsupported, match="between two micro-batches"):
        holdfast.save(state, tmp_path / "half")
    with accelerator.accumulate(model):
        model(torch.ones(1, 2)).sum().backward()
    holdfast.save(state, tmp_path / "whole")


def test_one_goes_back_to_a_saved_step_from_between_two_micro_batches(tmp_path):
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD
    model, optimizer = accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))
    state = state_of(accelerator)
    holdfast.save(state, tmp_path / "saved")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(Unsupported) as refused:
        holdfast.load(tmp_path / "saved", state)
    say = str(refused.value).partition("accumulated: ")[2]
    exec(say.partition(" (")[0].replace(", then", ";"), {"accelerator": accelerator, "optimizer": optimizer})
    holdfast.load(tmp_path / "saved", state)
    assert accelerator.step == 0 and model.weight.grad is None


def test_an_epoch_that_had_ended_has_ended_on_more_ranks():
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(hf_runs.Numbers(), batch_size=28))
    position = state_of(accelerator)["loader"].value
    for _ in loader:
        after_the_last = position.state_dict()
    loader.iteration = 0
    position.load_state_dict(position.elsewhere([after_the_last], 0, 4))  # a quarter of one batch: none
    assert (epoch_of(loader), len(list(loader))) == (0, 0)
    assert (epoch_of(loader), len(list(loader))) == (1, 1)


def test_everything_prepared_and_registered_is_in_the_state():
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    accelerator.prepare(first, second, *optimizers)
    accelerator.register_for_checkpointing(hf_runs.Average())
    state = state_of(accelerator, also={"step": 3})
    assert list(state) == [
        "model", "model_1", "optimizer", "optimizer_1", "custom", "accelerator", "rng", "step",
    ]  # fmt: skip
    assert state["optimizer"] is optimizers[0]
    with pytest.raises(ValueError, match="'model'"):
        state_of(accelerator, also={"model": 1})


def test_a_loader_of_the_first_rank_alone_is_refused(tmp_path):
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(hf_runs.Stream()))
    dispatched = type("DataLoaderDispatcher", (), {"__iter__": lambda self: iter(()), "base_dataloader": None})()
    accelerator._dataloaders.append(dispatched)
    with pytest.raises(Unsupported, match="dispatch_batches=False"):
        state_of(accelerator)
    assert "loader" not in state_of(accelerator, loaders=False)
    assert epoch_of(loader) == 0


def test_an_iteration_left_early_begins_anew(tmp_path):
    hf_runs.fresh()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(hf_runs.Numbers(), batch_size=7))
    state = state_of(accelerator)
    for number, _ in enumerate(loader):
        if number == 1:
            inside = state["loader"].state()
            break
    assert (inside["epoch"], inside["given"]) == (0, 2)
    assert state["loader"].state()["given"] == 0
    assert len(list(loader)) == 4
    assert state["loader"].state()["epoch"] == 1 and os.listdir(tmp_path) == []
