"""The table of `holdfast ls`: what it marks."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import holdfast
from holdfast.run.keep import Mode
from tests.cli.conftest import Run


def test_ls_marks_the_best_step_if_it_is_recorded_which_is_better(run: Run, tmp_path: Path) -> None:
    cases: tuple[tuple[Mode | None, str], ...] = (("max", "0.75 (best)"), ("min", "0.25 (best)"), (None, ""))
    for mode, marked in cases:
        root, keep = tmp_path / str(mode), holdfast.Keep(last=9, best=1 if mode else 0, mode=mode)
        with holdfast.CheckpointManager(root, every=1, keep=keep, worker="none") as manager:
            for step, metric in enumerate((0.5, 0.75, 0.25), start=1):
                manager.step(step, {"w": torch.ones(2)}, metric=metric)
            best = manager.best() if mode else None
        out = run("ls", root)[1]
        if best is None:
            assert "0.75" in out and "best" not in out
        else:
            (line,) = [line for line in out.splitlines() if "(best)" in line]
            assert marked in line and line.split()[0] == str(best.step)
            assert json.loads(run("ls", root, "--json")[1])["checkpoints"][0]["mode"] == mode
