"""Pruning: what it says is what happens, and the last whole step, and what others have borrowed, always stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.commit.folder import delete_checkpoint
from holdfast.run.keep import Keep
from holdfast.run.prune import name_of, prune
from holdfast.run.retention import KeptSteps
from holdfast.storage.local.local_place import LocalPlace
from tests.citing import save_on, state_of
from tests.marks import examples


def _run(root: Path, steps: range, *, incremental: bool = True) -> None:
    base = None
    for step in steps:
        made = torch.Generator().manual_seed(step)
        state = {
            "model": {"w": torch.rand(9000, generator=made), "z": torch.arange(9000.0)},
            "optim": {"m": torch.rand(9000)},
        }
        base = holdfast.save(state, root / f"step-{step}", step=step, base=base if incremental else None)


def _free_bytes(root: Path) -> int:
    """Bytes of all files, each counted once."""
    found = {p.stat().st_ino: p.stat().st_size for p in root.rglob("*") if p.is_file()}
    return sum(found.values())


@settings(max_examples=examples(8))
@given(
    last=st.integers(1, 3), every=st.none() | st.integers(2, 4), model_every=st.none() | st.integers(2, 3),
    optimizer_last=st.none() | st.integers(1, 2),
)  # fmt: skip
def test_what_is_told_is_what_happens(
    tmp_path_factory: pytest.TempPathFactory, last: int, every: int | None, model_every: int | None,
    optimizer_last: int | None,
) -> None:  # fmt: skip
    root = LocalPlace(tmp_path_factory.mktemp("run"))
    _run(root, range(1, 7))
    keep = Keep(last=last, every=every, model_every=model_every, optimizer_last=optimizer_last)
    told = prune(root, keep)
    before = _free_bytes(root)
    done = prune(root, keep, dry_run=False)
    assert done.steps == told.steps and done.freed == told.freed
    manifests = sum(len((root / f.name / "manifest.json").read_bytes()) for f in told.steps if f.goes == "optimizer")
    # A step without its optimizer gets a new manifest, some hundred bytes shorter.
    assert abs(before - _free_bytes(root) - done.freed) <= manifests
    left = {fate.name for fate in told.steps if fate.goes != "all"}
    assert {path.name for path in root.iterdir()} == left
    for name in left:
        holdfast.tools.verify(root / name)
    assert "optim/m" in holdfast.open(root / "step-6").tensors


def test_the_newest_whole_step_stays_whatever_the_rules(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 5), incremental=False)
    for step in (3, 4):
        next((tmp_path / f"step-{step}" / "model").iterdir()).unlink()
    told = prune(tmp_path, Keep(last=1), dry_run=False)
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-4"}
    assert [fate.why[0] for fate in told.steps][1] == "newest whole step"
    assert "missing" in told.steps[3].why[-1]
    holdfast.tools.verify(tmp_path / "step-2")


def test_cited_files_stay_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "link", refuse)
    _run(tmp_path, range(1, 4))
    assert "../" in (tmp_path / "step-3" / "manifest.json").read_text()
    told = prune(tmp_path, Keep(last=1), dry_run=False)
    assert told.steps[0].lent > 0 and not (tmp_path / "step-1" / "manifest.json").exists()
    holdfast.tools.verify(tmp_path / "step-3")
    _run(tmp_path, range(4, 5))
    again = prune(tmp_path, Keep(last=1))
    before = _free_bytes(tmp_path)
    done = prune(tmp_path, Keep(last=1), dry_run=False)
    assert again.freed == done.freed == before - _free_bytes(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-4"}


def test_other_names_and_fast_tiers_are_left_alone(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 4), incremental=False)
    holdfast.save({"model": {"w": torch.ones(9)}}, tmp_path / "best")
    assert name_of(tmp_path) == "step-{step}"
    told = prune(tmp_path, Keep(last=1), dry_run=False)
    assert told.others == ("best",) and {path.name for path in tmp_path.iterdir()} == {"step-3", "best"}
    holdfast.save({"model": {"w": torch.ones(9)}}, tmp_path / "ckpt_7")
    with pytest.raises(ValueError, match="--name"):
        prune(tmp_path, Keep(last=1))
    assert len(prune(tmp_path, Keep(last=1), name="ckpt_{step}").steps) == 1
    (tmp_path / ".holdfast-tier.json").write_text("{}")
    with pytest.raises(ValueError, match="fast tier"):
        prune(tmp_path, Keep(last=1))


def test_a_step_that_is_committed_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, aside = tmp_path / "run", tmp_path / "aside"
    _run(root, range(1, 5), incremental=False)
    (root / "step-4").rename(aside)
    steps_prune = KeptSteps.prune

    def commits(*given: Any) -> None:
        aside.rename(root / "step-4")
        steps_prune(*given)

    monkeypatch.setattr(KeptSteps, "prune", commits)
    prune(root, Keep(last=1), dry_run=False)
    assert sorted(path.name for path in root.iterdir()) == ["step-3", "step-4"]
    holdfast.tools.verify(root / "step-4")


def test_what_a_swept_step_has_lent_is_freed_with_the_last_that_borrows_it(tmp_path: Path) -> None:
    save_on(state_of(1), tmp_path / "step-1")
    for step in (2, 3):
        save_on(state_of(step, model=step), tmp_path / f"step-{step}", tmp_path / "step-1")
    for step in (4, 5):
        save_on(state_of(step, model=step), tmp_path / f"step-{step}")
    delete_checkpoint(tmp_path / "step-1")
    lent = sum(path.stat().st_size for path in (tmp_path / "step-1").rglob("*.safetensors"))
    told = prune(tmp_path, Keep(last=1)).steps
    assert lent > 0 and [fate.freed for fate in told] == [
        told[0].nbytes, told[1].nbytes + lent, told[2].nbytes, 0,
    ]  # fmt: skip
