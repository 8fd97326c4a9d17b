"""`save_state` and `load_state` of an Accelerator that is attached to holdfast."""

import os

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Mismatch, Unsupported
from holdfast.trainers.accelerate import attach
from tests import pool
from tests.trainers import accelerate_states
from tests.trainers.accelerate_states import Loop


# A shuffled loader of accelerate's own draws a seed where it is resumed, so the draws after that are others.
@pytest.mark.parametrize("options", [{"stateful": True}, {"loaders": True}])
def test_a_loop_goes_on_bit_for_bit(tmp_path, options):
    found = accelerate_states.saved_and_loaded(str(tmp_path), 5, **options)
    assert found["losses"] == found["rest"] and found["rest"]
    for key in ("digests", "rates", "scales"):
        assert found[key][0] == found[key][1], key
    saved = holdfast.open(tmp_path / "checkpoints" / "checkpoint_0")
    assert "model/0.weight" in saved.tensors
    assert not [path for path in (tmp_path / "checkpoints").rglob("*") if path.suffix in (".pkl", ".bin", ".pt")]


def test_a_loop_that_skips_its_batches_goes_on_as_with_accelerate_alone(tmp_path):
    ours = accelerate_states.saved_and_loaded(str(tmp_path / "ours"), 5)
    theirs = accelerate_states.saved_and_loaded(str(tmp_path / "theirs"), 5, attached=False)
    assert ours == theirs and ours["rest"]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_load_what_they_saved(tmp_path, fsdp):
    for found in pool.run(2, sharded_run, str(tmp_path), fsdp):
        assert found["sharded"] == fsdp
        assert found["saved"] == found["loaded"]
        assert found["losses"] == found["rest"] and found["digests"][0] == found["digests"][1]


@pytest.mark.slow
def test_one_rank_loads_what_two_saved_in_shards(tmp_path):
    sums = pool.run(2, sharded_sum, str(tmp_path))
    alone = Loop(tmp_path)
    alone.accelerator.load_state()
    assert accelerate_states.sum_of(alone.model) == pytest.approx(sums[0], abs=1e-9)
    assert alone.average.value == pytest.approx(1.9)


def sharded_sum(root):
    loop = Loop(root, fsdp=True)
    batches = iter(loop.loader)
    loop.step(next(batches))
    loop.step(next(batches))
    loop.accelerator.save_state()
    return accelerate_states.sum_of(loop.model)


def sharded_run(root, fsdp):
    return accelerate_states.saved_and_loaded(root, 3, fsdp=fsdp, loaders=True)


def test_automatic_folders_are_numbered_and_limited(tmp_path):
    loop = Loop(tmp_path, limit=2)
    folder = tmp_path / "checkpoints"
    for number in range(11):
        assert loop.accelerator.save_state() == folder / f"checkpoint_{number}"
    assert sorted(os.listdir(folder)) == ["checkpoint_10", "checkpoint_9"]
    loop.accelerator.project_configuration.iteration = 9
    with pytest.raises(ValueError, match="checkpoint_9 holds a checkpoint already"):
        loop.accelerator.save_state()


def test_a_save_that_died_is_passed_over_and_made_again(tmp_path, caplog):
    loop = Loop(tmp_path)
    loop.accelerator.save_state()
    before = loop.digest()
    loop.epoch(loop.loader)
    loop.accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "manifest.json").unlink()
    again = Loop(tmp_path)
    again.accelerator.load_state()
    assert again.digest() == before
    assert "checkpoint_1 is no whole checkpoint" in caplog.text
    again.accelerator.project_configuration.iteration = 1
    again.epoch(again.loader)
    again.accelerator.save_state()
    Loop(tmp_path).accelerator.load_state()
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        Loop(tmp_path / "empty").accelerator.load_state()


def test_a_given_folder_is_saved_over(tmp_path):
    loop = Loop(tmp_path)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    loop.accelerator.save_state(tmp_path / "here")
    loop.epoch(loop.loader)
    loop.accelerator.save_state(str(tmp_path / "here"))
    again = Loop(tmp_path)
    again.accelerator.load_state(tmp_path / "here", map_location="on_device")
    assert again.digest() == loop.digest()
    with pytest.raises(ValueError, match="give a folder"):
        loop.accelerator.save_state()
    with pytest.raises(ValueError, match="does not exist"):
        loop.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(Unsupported, match="CheckpointManager"):
        loop.accelerator.save_state("s3://bucket/run")
    with pytest.raises(TypeError, match="map_location='moon'"):
        again.accelerator.load_state(tmp_path / "here", map_location="moon")
    with pytest.raises(Unsupported, match="strict"):
        again.accelerator.load_state(tmp_path / "here", strict=False)


def test_accelerates_own_checkpoints_are_still_read(tmp_path):
    loop = Loop(tmp_path, attached=False)
    loop.epoch(loop.loader)
    loop.accelerator.save_state()
    again = Loop(tmp_path)
    again.accelerator.load_state()
    assert again.digest() == loop.digest()


def test_a_hook_may_save_and_load_a_model_itself(tmp_path):
    """As diffusers has it: what a hook takes out of the list is left to it."""

    def save(models, weights, folder):
        for model in list(models):
            torch.save(model.state_dict(), os.path.join(folder, "by-hook.pt"))
            weights.pop()

    def load(models, folder):
        while models:
            models.pop().load_state_dict(torch.load(os.path.join(folder, "by-hook.pt")))

    first, second = Loop(tmp_path, limit=1), Loop(tmp_path)
    first.accelerator.register_save_state_pre_hook(save)
    first.accelerator.save_state()
    first.epoch(first.loader)
    folder = first.accelerator.save_state()
    names = holdfast.open(folder / "holdfast").tensors
    assert not [name for name in names if name.startswith("model/")]
    assert [name for name in names if name.startswith("optimizer/")]
    with pytest.raises(Mismatch):
        second.accelerator.load_state()
    second.accelerator.register_load_state_pre_hook(load)
    second.accelerator.load_state()
    assert second.digest() == first.digest()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]


def test_a_hook_may_look_and_not_touch(tmp_path):
    seen = []
    loop = Loop(tmp_path)
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append((len(weights), folder)))
    folder = loop.accelerator.save_state()
    assert seen == [(1, str(folder))] and "model/0.weight" in holdfast.open(folder).tensors
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights[0].popitem())
    with pytest.raises(Unsupported, match="has changed the weights"):
        loop.accelerator.save_state()


def test_a_loader_that_comes_later_is_refused_if_it_has_to_go_on(tmp_path):
    loop = Loop(tmp_path, loaders=True)
    loop.accelerator.prepare(torch.utils.data.DataLoader([torch.ones(1)]))
    with pytest.raises(Unsupported, match="call attach after accelerator.prepare"):
        loop.accelerator.save_state()


def test_nothing_is_saved_between_two_micro_batches(tmp_path):
    loop = Loop(tmp_path, accumulate=2)
    batches = iter(loop.loader)
    loop.step(next(batches))
    with pytest.raises(holdfast.SaveFailed, match="between two micro-batches"):
        loop.accelerator.save_state()
    loop.step(next(batches))
    loop.accelerator.save_state()


def test_options_of_other_engines_are_refused(tmp_path):
    loop = Loop(tmp_path)
    with pytest.raises(Unsupported, match="exclude_frozen_parameters"):
        loop.accelerator.save_state(exclude_frozen_parameters=True)
    assert attach(loop.accelerator) is loop.accelerator
    assert isinstance(loop.model, nn.Module)
