"""The command `holdfast view`: what it writes, what it leaves alone, and what it says of a wrong path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli.errors import Code


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    holdfast.save({"model": {"w": torch.ones(4)}, "step": 3}, tmp_path / "run" / "step-3", step=3)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "step-3"


def test_a_page_is_named_after_the_checkpoint(run: Any, saved: Path, tmp_path: Path) -> None:
    code, out, err = run("view", saved)
    assert code == Code.FINE and not err and str(tmp_path / "step-3.html") in out
    assert "model/w" in (tmp_path / "step-3.html").read_text()
    code, out, _ = run("view", f"{saved}/", "-o", "other.html", "--json")
    assert code == Code.FINE and json.loads(out)["page"] == str(tmp_path / "other.html")
    assert json.loads(out)["bytes"] == (tmp_path / "other.html").stat().st_size
    code, out, _ = run("view", saved, "-o", "-", "--stats", "model")
    assert code == Code.FINE and out.startswith("<!doctype html>") and '"edges"' in out


def test_pages_are_made_anew_and_other_files_are_left_alone(run: Any, saved: Path, tmp_path: Path) -> None:
    assert run("view", saved)[0] == run("view", saved)[0] == Code.FINE
    (tmp_path / "mine.html").write_text("my notes")
    code, _, err = run("view", saved, "-o", "mine.html")
    assert code == Code.USAGE and "not a page of holdfast" in err and (tmp_path / "mine.html").read_text() == "my notes"
    code, _, err = run("view", saved, "-o", "nowhere/page.html")
    assert code == Code.USAGE and "no folder" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.html", "run", "step-3.html"]


def test_wrong_calls_say_what_to_do(run: Any, saved: Path, tmp_path: Path) -> None:
    assert run("view", tmp_path / "nothing")[0] == Code.NOT_A_CHECKPOINT
    code, _, err = run("view", saved, "--serve", "-o", "page.html")
    assert code == Code.USAGE and "--serve" in err
    code, _, err = run("view", saved, "--timeline", tmp_path / "run")
    assert code == Code.NOT_A_CHECKPOINT and "HOLDFAST_TIMELINE" in err
    code, _, err = run("view", saved, "--stats", "model/v")
    assert code == Code.MISMATCH and "model/v" in err and not (tmp_path / "step-3.html").exists()


def test_a_signature_is_told(run: Any, saved: Path, tmp_path: Path) -> None:
    public = holdfast.tools.signing.generate(tmp_path / "key")
    holdfast.tools.sign(saved, tmp_path / "key")
    assert "signed, not checked" in run("view", saved, "-o", "-")[1]
    assert "by the key" in run("view", saved, "-o", "-", "--require", public)[1]
    holdfast.tools.signing.generate(tmp_path / "other")
    code, _, err = run("view", saved, "-o", "-", "--require", tmp_path / "other.pub")
    assert code != Code.FINE and "which is none of those required" in err


def test_a_path_by_dots_and_one_that_is_no_text(
    run: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    saved.rename(odd)
    assert run("view", odd, "-o", "odd.html")[0] == Code.FINE
    assert '"title":"odd?"' in (tmp_path / "odd.html").read_text()
    odd.rename(saved)
    monkeypatch.chdir(saved / "model")
    assert run("view", "..")[0] == Code.FINE
    assert (saved / "model" / "step-3.html").is_file()
