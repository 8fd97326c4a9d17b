"""Running the command inside of this process, and a run with some steps to do it to."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import app as application

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the program with these arguments: its exit code, standard output and standard error."""

    def running(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = application.run([str(argument) for argument in arguments])
        told = capfd.readouterr()
        return code, told.out, told.err

    return running


def state_of(step: int) -> dict[str, object]:
    """A frozen tensor, one that trains, and an optimizer's."""
    made = torch.Generator().manual_seed(step)
    return {
        "model": {"frozen": torch.arange(20_000.0), "w": torch.rand(10_000, generator=made)},
        "optimizer": {"m": torch.rand(10_000, generator=made)},
        "step": step,
    }


@pytest.fixture(scope="session")
def saved_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``steps`` copies for each test."""
    root = tmp_path_factory.mktemp("steps") / "run"
    with holdfast.CheckpointManager(root, every=100, keep=holdfast.Keep(last=9), incremental=True) as manager:
        for step in range(100, 600, 100):
            manager.step(step, state_of(step), metric=abs(step - 300.0))
    return root


@pytest.fixture
def steps(saved_steps: Path, tmp_path: Path) -> Path:
    """The steps 100 to 500 of a run, which share the frozen tensor; step 300 has the lowest metric."""
    subprocess.run(["cp", "-a", saved_steps, tmp_path / "run"], check=True)  # it keeps the links between steps
    return tmp_path / "run"
