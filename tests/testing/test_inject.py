"""`python -m holdfast.testing.inject`: a script runs as it is, with the faults that were asked for and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.inject import main, read

SCRIPT = """
import sys, torch, holdfast
if __name__ == "__main__":
    import beside
    print("arguments", sys.argv[1:])
    for step in range(1, 4):
        holdfast.save({"model": {"w": torch.ones(5)}, "step": step}, f"{sys.argv[1]}/{step}")
        print("saved", step, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(faults: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.testing.inject", faults, *command],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_dies_where_it_was_told_to(script: Path, tmp_path: Path) -> None:
    ended = run('kill_at("commit", nth=2)', str(script), str(tmp_path / "run"), "--more")
    assert ended.returncode == -9, ended.stderr
    assert ended.stdout.splitlines() == [f"arguments ['{tmp_path}/run', '--more']", "saved 1"]


@pytest.mark.slow
def test_one_that_is_started_again_runs_without_faults(script: Path, tmp_path: Path) -> None:
    faults = 'kill_at("commit"); faults("any", times=0)'
    ended = run(faults, str(script), str(tmp_path / "run"), TORCHELASTIC_RESTART_COUNT="1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "saved 3"


@pytest.mark.slow
def test_a_module_and_several_faults(script: Path, tmp_path: Path) -> None:
    faults = 'slow("write", seconds_per_call=0.001); faults(["link", "replace"], nth=2, error=errno.ENOSPC)'
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.testing.inject", faults, "-m", "train", "run"],
        capture_output=True, text=True, check=False, timeout=240, cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 1 and "No space left on device" in ended.stderr, ended.stderr
    assert ended.stdout.splitlines()[-1] == "saved 1"


@pytest.mark.parametrize(
    "text",
    [
        "nothing(1)", "kill_at", "kill_at('plan'", "__import__('os').abort()", "kill_at(open('x'))", "kill_at(*'ab')",
        "kill_at(**{})", "kill_at(1, 2)", "x = 1", "faults(error=errno)", "kill_at('plan', many=2)",
    ],
)  # fmt: skip
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_what_cannot_be_ordered_is_said_with_the_usage(script: Path) -> None:
    for arguments in (["kill_at('nowhere')", str(script)], ["kill_at('plan')"], ["--help", str(script)]):
        with pytest.raises(SystemExit, match=r"holdfast.testing.inject FAULTS"):  # Python prints it, and exits with 1
            main(arguments)
