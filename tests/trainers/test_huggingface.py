"""Hugging Face's Trainer: a run that was broken off and goes on is the run that was not, bit for bit."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import Unsupported
from holdfast.trainers.huggingface import HoldfastCallback
from holdfast.trainers.huggingface_best import Retention
from tests import pool
from tests.trainers import arguments, hf_runs

EXAMPLES = Path(__file__).parents[2] / "examples"


def same(whole, resumed, restored):
    assert resumed["restored"] == restored
    for key in ("step", "digest", "log", "flos", "counted", "scale"):
        assert resumed[key] == whole[key], key


# Six steps an epoch, evaluated at its end, logged every third step, saved every second one: 7 and 8 lie in the middle
# of an epoch and between two lines of the log, 6 ends one.
@pytest.mark.parametrize("broken_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (3, 6)), 9])
def test_a_run_goes_on_bit_for_bit(tmp_path, broken_at):
    same(*hf_runs.whole_and_resumed(tmp_path, broken_at, {}), broken_at - broken_at % 2)


@pytest.mark.slow
def test_a_run_with_workers_goes_on_bit_for_bit(tmp_path):
    same(*hf_runs.whole_and_resumed(tmp_path, 9, {"workers": 2, "args": {"num_train_epochs": 2}}), 8)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_go_on_bit_for_bit(tmp_path, fsdp):
    found = pool.run(2, hf_runs.whole_and_resumed, str(tmp_path), 5, {"fsdp": fsdp})
    for whole, resumed in found:
        assert whole["sharded"] == fsdp
        assert resumed["restored"] == 4
        for key in ("step", "digest", "flos", "counted", "scale"):
            assert resumed[key] == whole[key], key
    assert found[0][0]["log"] == found[0][1]["log"]
    # On another number of ranks model, optimizer and step are what they were.
    last = holdfast.open(tmp_path / "whole" / "step-000000009")
    alone = hf_runs.train(tmp_path / "whole", args={"num_train_epochs": 1})
    assert alone["restored"] == 9 and alone["step"] == 9
    assert alone["weights"] == pytest.approx(found[0][0]["weights"], abs=1e-9)
    assert last.world_size == 2


@pytest.mark.slow
def test_a_signal_ends_a_run_with_its_last_step_on_disk(tmp_path):
    whole = hf_runs.train(tmp_path / "whole", every=100)
    stopped = hf_runs.train(tmp_path / "stopped", 8, by_signal=True, every=100)
    assert stopped["stopped"] and stopped["step"] == 8 and stopped["steps"] == [8]
    assert not [line for line in stopped["log"] if "eval_loss" in line and line["step"] == 8]
    same(whole, hf_runs.train(tmp_path / "stopped", every=100), 8)


@pytest.mark.slow
def test_trainers_own_rhythm_may_drive_it(tmp_path):
    by_steps = {"save_strategy": "steps", "save_steps": 5}
    whole = hf_runs.train(tmp_path / "steps", every=None, args=by_steps, kept={"keep": holdfast.Keep(last=9)})
    assert whole["steps"] == [5, 10, 15, 18]
    best = holdfast.Keep(last=1, best=1, mode="max")
    by_epochs = {"save_strategy": "epoch", "metric_for_best_model": "loss"}
    found = hf_runs.train(tmp_path / "epochs", every=None, args=by_epochs, kept={"keep": best})
    losses = {line["step"]: line["eval_loss"] for line in found["log"] if "eval_loss" in line}
    assert sorted(losses) == [6, 12, 18]
    assert found["steps"] == sorted({max(losses, key=losses.get), 18})  # by mode="max": the first, most likely
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_damaged_step_is_passed_over_and_trainer_told(tmp_path):
    options = {"kept": {"keep": holdfast.Keep(last=9)}}
    whole = hf_runs.train(tmp_path / "whole", **options)
    assert hf_runs.train(tmp_path / "broken", 9, **options) is None
    file = next((tmp_path / "broken" / "step-000000008" / "model").iterdir())
    _damage(file)
    same(whole, hf_runs.train(tmp_path / "broken", **options), 6)


def _damage(file):
    data = bytearray(file.read_bytes())
    data[-200:-100] = bytes(byte ^ 0xFF for byte in data[-200:-100])
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("args", "last"), [({"max_steps": 2}, 2), pytest.param({"num_train_epochs": 1}, 6, marks=pytest.mark.slow)]
)
def test_a_finished_run_does_nothing_more(tmp_path, args, last):
    whole = hf_runs.train(tmp_path, args=args)
    again = hf_runs.train(tmp_path, args=args)
    assert again["restored"] == again["step"] == whole["step"] == last
    assert again["weights"] == whole["weights"]


@pytest.mark.slow
def test_a_trainer_goes_on_after_an_exception(tmp_path):
    whole = hf_runs.train(tmp_path / "whole")
    breaks = hf_runs.Breaks(9, False)
    trainer = hf_runs.trainer_of(tmp_path, more=(breaks,))
    callback = HoldfastCallback(tmp_path / "broken", every=2, worker="thread", deadline=240).attach(trainer)
    with pytest.raises(hf_runs.Broken):
        trainer.train()
    breaks.at = None
    trainer.train()
    assert callback.restored.step == 8
    assert hf_runs.digest(trainer.model, trainer.optimizer.optimizer) == whole["digest"]


def test_a_run_that_is_to_begin_afresh_does_not_among_older_steps(tmp_path):
    holdfast.save({"step": 7}, tmp_path / "step-000000007", step=7)
    trainer = hf_runs.trainer_of(tmp_path)
    HoldfastCallback(tmp_path, every=1, worker="thread").attach(trainer)
    with pytest.raises(ValueError, match="earlier run, up to 7"):
        trainer.train(resume_from_checkpoint=False)


def test_it_takes_what_a_manager_takes():
    def make_manager(callback):
        callback._manager_that(Retention(callback._options.keep, callback._options.keep_fast, False))

    assert arguments.lost(HoldfastCallback, make_manager) == []


@pytest.mark.slow
def test_what_cannot_be_done_is_said_at_once(tmp_path):
    with pytest.raises(Unsupported, match=r"transformers\.Trainer"):
        HoldfastCallback(tmp_path, every=1).attach(object())
    trainer = hf_runs.trainer_of(tmp_path)
    with pytest.raises(ValueError, match="nothing says when to save"):
        HoldfastCallback(tmp_path).attach(trainer)
    with pytest.raises(ValueError, match="at least 1"):
        HoldfastCallback(tmp_path, every=0)
    trainer.add_callback(HoldfastCallback(tmp_path, every=1))
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        trainer.train()
    again = hf_runs.trainer_of(tmp_path)
    callback = HoldfastCallback(tmp_path, every=1, also={"step": 3}).attach(again)
    with pytest.raises(ValueError, match="another Trainer"):
        callback.attach(trainer)
    with pytest.raises(ValueError, match="has a name that"):
        again.train()


def run_example(name, root, *options, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), f"--root={root}", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("{") and '"resumed"' in line]
    return json.loads(told[-1]) if told else done


@pytest.mark.parametrize("example", ["hf_trainer.py", "accelerate_loop.py"])
def test_an_example_says_that_sharding_needs_gpus(tmp_path, example, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main = runpy.run_path(str(EXAMPLES / example))["main"]
    with pytest.raises(SystemExit):
        main([f"--root={tmp_path}", "--fsdp"])
    assert "needs GPUs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("example", ["hf_trainer.py", "accelerate_loop.py"])
def test_an_example_that_is_killed_goes_on_bit_for_bit(tmp_path, example):
    whole = run_example(example, tmp_path / "whole")
    killed = run_example(example, tmp_path / "killed", "--kill-at=7")
    assert isinstance(killed, subprocess.CompletedProcess) and killed.returncode != 0, killed
    resumed = run_example(example, tmp_path / "killed")
    assert whole["resumed"] == 0 and resumed["resumed"] in (2, 4, 6)
    assert resumed["digest"] == whole["digest"]
    assert resumed["losses"].items() <= whole["losses"].items() and len(resumed["losses"]) >= 8
