"""Devices in trouble: no memory left, a kernel that fails for good, processes that end. Nothing committed is harmed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.gpu import states
from tests.gpu.lab import LIMIT, Lab, needs_cuda
from tests.tearing import differences

ROOT = Path(__file__).parents[2]


def script(name: str, folder: Path) -> dict[str, Any]:
    """What a script of `tests.gpu.scripts` said; nothing if it was killed first. It has to end by itself."""
    command = [sys.executable, "-m", "tests.gpu.scripts", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines or done.returncode < 0, done.stderr[-3000:]
    return json.loads(lines[-1]) if lines else {}


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.fast_cases("blocking")
def test_a_full_device_is_no_trouble_for_plain_tensors(how: str, lab: Lab, tmp_path: Path) -> None:
    """Copies need no memory there; small tensors are gathered in some only if it can be had."""
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 1)
    training.run(1)
    there = training.copy()
    with lab.full():
        if how == "blocking":
            holdfast.save(training.state, tmp_path / "c")
        else:
            with holdfast.Saver(worker="thread") as saver:
                saver.save(training.state, tmp_path / "c").wait()
    other = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 2)
    holdfast.load(tmp_path / "c", other.state)
    assert differences(other.copy(), there) == []


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_running_out_of_memory_in_the_middle_costs_one_save(worker: str, lab: Lab, tmp_path: Path) -> None:
    """Tensors that lie scattered are made contiguous on the device, which needs memory: the save fails, no more."""
    plain = {f"p{number}": states.noise((1 << 20,), torch.float32, lab.kind, number) for number in range(20)}
    model = torch.nn.ParameterDict({**plain, "z": states.noise((3000, 2000), torch.float32, lab.kind, 1).t()})
    held = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    there = {name: tensor.detach().cpu().clone() for name, tensor in model.items()}
    with holdfast.Saver(worker=worker) as saver:
        saver.prepare(held)
        saver.save(held, tmp_path / "before").wait()
        for number in range(2):
            with lab.full(), pytest.raises(holdfast.SaveFailed, match="OutOfMemoryError"):
                saver.save(held, tmp_path / f"full-{number}").wait()
            assert not (tmp_path / f"full-{number}").exists()
        saver.save(held, tmp_path / "after").wait()
    for name in ("before", "after"):
        checkpoint = holdfast.open(tmp_path / name)
        checkpoint.verify()
        assert differences({key: checkpoint.read(f"model/{key}") for key in there}, there) == []


@pytest.mark.slow
def test_a_device_that_fails_for_good_fails_saves_and_lets_the_process_end(lab: Lab, tmp_path: Path) -> None:
    said = script("fails", tmp_path)
    assert said["second"].startswith("SaveFailed") and said["blocking"].startswith("SaveFailed"), said
    holdfast.open(tmp_path / "before").verify()
    for name in ("first", "second", "third"):
        if (tmp_path / name).exists():
            holdfast.open(tmp_path / name).verify()  # it had been copied before the device failed
            assert name == "first"


@pytest.mark.slow
def test_a_writer_ends_the_save_of_a_trainer_that_was_killed(lab: Lab, tmp_path: Path) -> None:
    """The memory that was pinned for a device belongs to both, and the system lets it go when the last one ends."""
    assert script("killed", tmp_path) == {}
    until = time.monotonic() + LIMIT
    while True:
        try:
            checkpoint = holdfast.tools.recover(tmp_path / "c")
            break
        except holdfast.errors.NotACheckpoint:
            assert time.monotonic() < until, "the writer did not finish"
            time.sleep(0.2)
    checkpoint.verify()
    there = states.noise((64 << 20,), torch.float32, "cpu", 1)
    assert differences({"t": checkpoint.read("large")}, {"t": there}) == []


@needs_cuda
@pytest.mark.slow
def test_a_capture_beside_a_save_ends_in_words(lab: Lab, tmp_path: Path) -> None:
    """CUDA may end the capture, the save, or neither; each says so, and both work afterwards."""
    said = script("captures", tmp_path)
    assert said["trained"] == "done" and said["again"] == "done", said
    holdfast.open(tmp_path / "before").verify()
    holdfast.open(tmp_path / "after").verify()
    if said["saved"] == "done":
        holdfast.open(tmp_path / "c").verify()
    else:
        assert said["saved"].startswith("SaveFailed") and not (tmp_path / "c").exists(), said


@pytest.mark.slow
def test_a_run_on_the_cpu_leaves_the_device_alone(lab: Lab, tmp_path: Path) -> None:
    assert script("untouched", tmp_path) == {"used": False}


@pytest.mark.slow
def test_a_load_holds_no_copy_of_the_state_in_host_memory(lab: Lab, tmp_path: Path) -> None:
    said = script("loads", tmp_path)
    assert said["equal"]
    assert said["grown"] < 128 << 20 < said["nbytes"], said
