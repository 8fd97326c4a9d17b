"""The command: what it prints, what it ends with, and that nobody who does not call it pays for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app as application
from holdfast.cli.errors import Code, code_of
from holdfast.ondisk import datafile
from tests.cli.test_commands import VERBS
from tests.damaging import contents_of, flip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save({"model": {"w": torch.arange(2000.0)}, "step": 3}, tmp_path / "step-3", step=3)
    shutil.copytree(tmp_path / "step-3", tmp_path / "copy")
    return tmp_path / "step-3"


def command(*arguments: object, capsys: Any = None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `main` as the script does; its exit code."""
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        application.main()
    return int(ended.value.code or 0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def running(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = command(*arguments, monkeypatch=monkeypatch)
        told = capsys.readouterr()
        return code, told.out, told.err

    return running


def test_a_whole_checkpoint(run: Any, saved: Path) -> None:
    code, out, err = run("verify", saved)
    assert code == Code.FINE and "is whole" in out and not err
    code, out, _ = run("verify", saved, "--shallow", "--json")
    assert code == Code.FINE and json.loads(out)["whole"] is True and json.loads(out)["deep"] is False


def test_damage_is_found_and_repaired(run: Any, saved: Path) -> None:
    before = contents_of(saved)
    flip(next((saved / "model").iterdir()), 5000)
    code, out, _ = run("verify", saved)
    assert code == Code.DAMAGED and "model/w[0:2000]" in out and "4096:12096" in out and "damaged" in out
    assert out.startswith("tensor or value  ")
    code, out, _ = run("verify", saved, "--json")
    told = json.loads(out)
    assert code == Code.DAMAGED and told["tensors"] == ["model/w"] and told["damages"][0]["begin"] == 4096
    assert run("repair", saved)[0] == Code.DAMAGED
    for beside in ("step-1", "step-2"):
        holdfast.save({"model": {"w": torch.zeros(3)}}, saved.parent / "other" / beside)
    code, out, _ = run("repair", saved, "--from", saved.parent / "other")
    assert (
        code == Code.DAMAGED
        and "none of these sources has what is left" in out
        and str(saved.parent / "other") not in out
    )
    code, out, _ = run("repair", saved, "--from", saved.parent / "copy", "--dry-run")
    assert code == Code.FINE and "could be whole" in out and contents_of(saved) != before
    code, out, _ = run("repair", saved, "--from", saved.parent / "nothing", "--from", saved.parent / "copy")
    assert code == Code.NOT_A_CHECKPOINT
    code, out, _ = run("repair", saved, "--from", saved.parent / "copy", "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["whole"] and told["mended"][0]["nbytes"] == 8000
    assert contents_of(saved) == before
    assert "nothing to repair" in run("repair", saved)[1]


def test_a_missing_file_is_one_row(run: Any, tmp_path: Path) -> None:
    holdfast.save({"model": {f"w{n}": torch.ones(3) for n in range(12)}}, tmp_path / "c")
    next((tmp_path / "c" / "model").iterdir()).unlink()
    code, out, _ = run("verify", tmp_path / "c")
    rows = [line for line in out.splitlines() if "is missing" in line]
    assert code == Code.DAMAGED and len(rows) == 1
    assert rows[0].startswith("12 tensors: model/w0[0:3], model/w1[0:3] … and 10 more ")
    assert len(json.loads(run("verify", tmp_path / "c", "--json")[1])["damages"]) == 12, "the report has all of them"


def test_a_run_is_verified_step_by_step(run: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        holdfast.save({"model": {"w": torch.full((2000,), float(step))}}, tmp_path / f"step-{step}", step=step)
    code, out, _ = run("verify", tmp_path)
    assert code == Code.FINE and out.splitlines()[-1] == "4 of 4 steps are whole"
    assert [line.split()[0].rpartition("/")[2] for line in out.splitlines()[:4]] == [
        "step-1",
        "step-2",
        "step-3",
        "step-10",
    ]
    flip(next((tmp_path / "step-1" / "model").iterdir()), 5000)
    flip(tmp_path / "step-3" / "manifest.json", 200)
    code, out, _ = run("verify", tmp_path)
    assert code == Code.DAMAGED and "step-1 is damaged" in out and "step-3 cannot be checked" in out
    assert "step-10 is whole" in out and out.splitlines()[-1] == "2 of 4 steps are whole"
    code, out, _ = run("verify", tmp_path, "--json", "--shallow")
    steps = json.loads(out)["steps"]
    assert code == Code.DAMAGED and [step["whole"] for step in steps] == [True, True, False, True]
    assert steps[0]["deep"] is False and "manifest" in steps[2]["error"] and not json.loads(out)["whole"]


def test_a_lost_manifest_is_rescued(run: Any, saved: Path) -> None:
    before = contents_of(saved)
    (saved / "manifest.json").unlink()
    assert run("verify", saved)[0] == Code.NOT_A_CHECKPOINT
    code, _, err = run("rescue", saved)
    assert code == Code.MISMATCH and "--like" in err.splitlines()[-1]  # its headers do not tell what others do
    save = datafile.save_of(next(p.relative_to(saved).as_posix() for p in saved.glob("*/*.safetensors")))
    code, out, _ = run("rescue", saved, "--save", save, "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["origin"] == "headers" and told["step"] == 3 and told["lost"]
    (saved / "manifest.json").unlink()
    code, out, _ = run("rescue", saved, "--like", saved.parent / "copy")
    assert code == Code.FINE and "is a checkpoint again" in out and contents_of(saved) == before
    code, _, err = run("rescue", saved)
    assert code == Code.STORAGE and "needs no rescue" in err


def test_errors_have_no_traceback(run: Any, tmp_path: Path, saved: Path) -> None:
    code, out, err = run("verify", tmp_path / "nothing")
    assert code == Code.NOT_A_CHECKPOINT and not out and err.startswith("error: ") and "Traceback" not in err
    flip(saved / "manifest.json", 200)
    assert run("verify", saved)[0] == Code.DAMAGED
    assert run("verify", "s3")[0] == Code.NOT_A_CHECKPOINT
    assert run("verify")[0] == Code.USAGE
    assert run("verify", saved, "--nonsense")[0] == Code.USAGE
    assert run("polish", saved)[0] == Code.USAGE


def test_names_with_brackets_are_told_as_they_are(run: Any, tmp_path: Path) -> None:
    holdfast.save({"m": {"[bold]w": torch.ones(9)}}, tmp_path / "[red]c")
    flip(next((tmp_path / "[red]c" / "m").iterdir()), 4100)
    code, out, _ = run("verify", tmp_path / "[red]c")
    assert code == Code.DAMAGED and "[red]c" in out and "%5Bbold]w[0:9]" in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (holdfast.errors.Damaged("x"), 1), (ValueError("x"), 2), (holdfast.errors.NotACheckpoint("x"), 3),
        (holdfast.errors.StorageError("x"), 4), (PermissionError("x"), 4), (holdfast.errors.Mismatch("x"), 5),
        (holdfast.errors.Unsupported("x"), 5), (holdfast.errors.RankLost("x"), 6), (holdfast.SaveFailed("x"), 7),
        (KeyboardInterrupt(), 130), (AttributeError("x"), None),
    ],
)  # fmt: skip
def test_each_error_has_its_code(error: BaseException, code: int | None) -> None:
    assert code_of(error) == code


def test_every_command_has_help() -> None:
    runner = CliRunner()
    for name in VERBS:
        told = runner.invoke(application.app, [name, "--help"])
        assert told.exit_code == 0 and "--json" in told.output
    assert holdfast.__version__ in runner.invoke(application.app, ["--version"]).output


@pytest.mark.slow
def test_as_a_module_and_without_typer_in_the_library(saved: Path) -> None:
    code = """if True:
        import runpy, sys, holdfast
        assert "typer" not in sys.modules
        sys.argv = ["holdfast", "verify", sys.argv[1]]
        runpy.run_module("holdfast", run_name="__main__")  # as `python -m holdfast` does
    """
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True)
    assert done.returncode == 0 and "is whole" in done.stdout, done.stderr
