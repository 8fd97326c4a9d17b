"""Does the training script survive? To be copied for a script of your own: `pytest examples/test_faults.py`.

Each test starts train.py, as it is, under torchrun with a fault (docs/testing.md) and looks at what it has logged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast.testing import corrupt_block

SCRIPT = Path(__file__).with_name("train.py")
SMALL = ["--layers=1", "--width=64", "--context=16", "--batch=6", "--every=3", "--deadline=30"]


def train(root: Path, steps: int, *, faults: str = "") -> subprocess.CompletedProcess[str]:
    """Train on two ranks until a step, saving every third one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "holdfast.testing.inject", faults] if faults else []
    command += [str(SCRIPT), f"--root={root}", f"--steps={steps}", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def logged(root: Path, key: str) -> list[int]:
    """What the script has logged under a key, in order."""
    entries = [json.loads(line) for line in (root / "log.jsonl").read_text().splitlines()]
    return [entry[key] for entry in entries if key in entry]


def test_a_rank_dies_in_a_save(tmp_path: Path) -> None:
    """All end; started again, they go on after the save before that."""
    assert train(tmp_path, 6, faults='kill_at("stage", rank=1, nth=2)').returncode != 0
    done = train(tmp_path, 6)
    assert done.returncode == 0, done.stderr
    assert logged(tmp_path, "restored") == [3]
    assert holdfast.open(tmp_path / "step-000000006").step == 6


def test_the_disk_is_full(tmp_path: Path) -> None:
    """The script ends with an error that says so. Started again, with room on the disk, it goes on."""
    full = f'faults("reserve", nth=3, times=0, error=ENOSPC, rank=0, under="{tmp_path}")'
    done = train(tmp_path, 6, faults=full)
    assert done.returncode != 0 and "No space left on device" in done.stderr and str(tmp_path) in done.stderr
    assert train(tmp_path, 6).returncode == 0
    assert holdfast.open(tmp_path / "step-000000006").step == 6


def test_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    """The script goes on from the one before."""
    assert train(tmp_path, 6).returncode == 0
    hit = corrupt_block(tmp_path / "step-000000006", tensor="model/*")
    done = train(tmp_path, 9)
    assert done.returncode == 0 and hit.file in done.stderr, done.stderr
    assert logged(tmp_path, "restored") == [3]
