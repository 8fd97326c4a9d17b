"""examples/train.py under a real torchrun: a run that was interrupted is the run that was not, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ["--layers=1", "--width=64", "--context=16", "--batch=6", "--dropout=0.2"]


def train(root, ranks, *options):
    """The run's log after train.py has trained to step 6, saving every 3 steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(EXAMPLES / "train.py"), f"--root={root}", "--steps=6", "--every=3", "--digest", "--deadline=240"]
    done = subprocess.run(
        [*command, *SIZES, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (root / "log.jsonl").read_text().splitlines()]


def losses(log):
    return {entry["step"]: entry["loss"] for entry in log if "step" in entry}


def digests(log, kind="saving"):
    return {entry[kind]: entry["digest"] for entry in log if kind in entry}


def interrupted_after_step_3(run, copy):
    """A copy of a run as it was when it had saved step 3, with an empty log."""
    shutil.copytree(run / "step-000000003", copy / "step-000000003")
    return copy


@pytest.mark.slow  # seven ranks under torchrun; what it shows is shown without it by the meshes and the trainers
def test_a_resumed_run_is_the_uninterrupted_one_and_goes_on_elsewhere(tmp_path):
    whole = train(tmp_path / "whole", 2)
    assert sorted(losses(whole)) == [1, 2, 3, 4, 5, 6]
    assert sorted(digests(whole)) == [3, 6]
    assert [entry["saved"] for entry in whole if "saved" in entry] == [3, 6]

    again_at = interrupted_after_step_3(tmp_path / "whole", tmp_path / "again")
    other_at = interrupted_after_step_3(tmp_path / "whole", tmp_path / "other")
    with ThreadPoolExecutor() as pool:
        futures = pool.submit(train, again_at, 2), pool.submit(train, other_at, 3, "--mesh=3x1")
        again, other = (future.result() for future in futures)

    # On the same ranks: model, optimizer, scheduler, loader and each rank's dropout go on with the same bits.
    assert digests(again, "restored") == {3: digests(whole)[3]}
    assert losses(again) == {step: losses(whole)[step] for step in (4, 5, 6)}
    assert digests(again) == {6: digests(whole)[6]}

    # On other ranks and another mesh: the same bits come back, the same batches follow, only dropout is drawn anew.
    assert digests(other, "restored") == {3: digests(whole)[3]}
    assert [entry["seen"] for entry in other if "step" in entry] == [24, 30, 36]
    for step, loss in losses(other).items():
        assert abs(loss - losses(whole)[step]) < 0.5
