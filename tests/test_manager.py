"""The manager: rhythm, retention, falling back, sweeping, stopping on a signal; alone and on real ranks."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.engine import folder as folder_module
from tests import pool


def _state(step: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.full((50, 3), float(step))}, "step": step}


def _names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_rhythm_and_retention(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, keep=Keep(last=2, every=6), name="ckpt-{step}") as manager:
        assert manager.restore(_state()) is None and manager.latest() is None
        saved = [step for step in range(1, 14) if manager.step(step, _state(step)) is not None]
        assert saved == [2, 4, 6, 8, 10, 12] and manager.steps() == [6, 10, 12]
        assert _names(tmp_path) == ["ckpt-10", "ckpt-12", "ckpt-6"]
        latest = manager.latest()
        assert latest is not None and latest.step == 12 and not manager.should_stop


def test_best_by_metric(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 9.0, 6: 0.5, 7: float("nan"), 8: 4.0}
    with CheckpointManager(tmp_path / "min", every=1, keep=Keep(last=1, best=2)) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
        assert manager.steps() == [2, 6, 8]
    with CheckpointManager(tmp_path / "max", every=1, keep=Keep(last=1, best=1, mode="max")) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
        assert manager.steps() == [5, 8]


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 100), st.none() | st.floats(allow_nan=True), min_size=1, max_size=30),
    st.builds(Keep, last=st.integers(1, 5), every=st.none() | st.integers(1, 20), best=st.integers(0, 4)),
)
def test_kept_steps(steps: dict[int, float | None], keep: Keep) -> None:
    kept = keep.kept(steps)
    assert (
        kept <= set(steps)
        and max(steps) in kept
        and len(kept & set(sorted(steps)[-keep.last :])) == min(keep.last, len(steps))
    )
    assert all(step in kept for step in steps if keep.every and step % keep.every == 0)
    rated = [m for m in steps.values() if m is not None and m == m]
    assert not keep.best or not rated or any(steps[s] == min(rated) for s in kept)


@pytest.mark.parametrize("bad", [{"last": 0}, {"every": 0}, {"best": -1}, {"mode": "low"}])
def test_keep_is_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(**bad)


@pytest.mark.parametrize(
    "bad", [{"every": 0}, {"every": 1, "name": "fixed"}, {"every": 1, "name": "a/{step}"}, {"every": 1, "poll": 0}]
)
def test_manager_is_checked(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        CheckpointManager(tmp_path, **bad)


def _break(path: Path, how: str) -> None:
    file = next(path.rglob("*.safetensors"))
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "missing":
        file.unlink()
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        manifest = path / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "manifest"])
def test_restore_falls_back_and_says_why(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=3)) as manager:
        for step in (1, 2, 3):
            manager.step(step, _state(step))
        _break(tmp_path / "step-000000003", how)
        state = _state()
        with caplog.at_level(logging.WARNING, "holdfast"):
            loaded = manager.restore(state)
        assert loaded is not None and loaded.step == state["step"] == 2 and (state["model"]["w"] == 2).all()
        assert "step-000000003" in caplog.text
        if how != "manifest":
            manager.step(3, _state(3))
            assert holdfast.open(tmp_path / "step-000000003").verify().read, (
                "the broken step gives way to its successor"
            )
            _break(tmp_path / "step-000000003", how)
        for step in (1, 2):
            _break(tmp_path / f"step-00000000{step}", "flipped")
        if how != "flipped":
            (tmp_path / "step-000000003" / "manifest.json").unlink()
        with pytest.raises(holdfast.NotACheckpoint, match="can be restored"):
            manager.restore(_state())


def test_mismatch_does_not_fall_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.step(1, _state(1))
        manager.step(2, _state(2))
        with pytest.raises(holdfast.Mismatch):
            manager.restore({"model": {"w": torch.zeros(2)}, "step": 0})


def test_orphans_are_swept_but_never_a_living_save(tmp_path: Path) -> None:
    holdfast.save(_state(7), tmp_path / "step-000000007")
    (tmp_path / "step-000000007" / "manifest.json").unlink()
    (tmp_path / "step-000000008").mkdir()
    (tmp_path / "step-000000009").mkdir()
    (tmp_path / "step-000000009" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    holdfast.save(_state(6), tmp_path / "step-000000006")
    (tmp_path / "step-000000006" / "manifest.json").unlink()
    alive = next((tmp_path / "step-000000006").rglob("*.safetensors"))
    with CheckpointManager(tmp_path, every=1) as manager, alive.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a save under way holds it
        assert manager.restore(_state()) is None
        assert _names(tmp_path) == ["elsewhere", "step-000000006", "step-000000009"] and alive.exists()
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        assert _names(tmp_path) == ["elsewhere", "step-000000009"]


def test_leavings_beside_a_committed_step_are_swept(tmp_path: Path) -> None:
    holdfast.save(_state(1), tmp_path / "step-000000001")
    stray = tmp_path / "step-000000001" / "model" / "00000-of-00001.0123456789abcdef.safetensors"
    stray.write_bytes(b"what a killed overwrite left")
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        assert not stray.exists()
        holdfast.open(tmp_path / "step-000000001").verify()


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        first = manager.step(1, _state(1))
    holdfast.save(_state(5), tmp_path / "other")
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        second = manager.step(2, _state(2))
        assert manager.step(2, _state(2)) is None, "a step is saved once"
    assert first is not None and second is not None and first.manifest.run == second.manifest.run
    assert first.manifest.save != second.manifest.save


def test_deleting_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(_state(1), tmp_path / "c")

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module, "_delete_ours", crash)
    with pytest.raises(KeyboardInterrupt):
        folder_module.delete_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_signal_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(tmp_path, every=100)
    for step in range(1, 50):
        if step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        manager.step(step, _state(step))
        if manager.should_stop:
            break
    assert step == 5 and manager.steps() == [5]
    manager.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def train_until_told(root: str, signalled: int, at: int, poll: int) -> tuple[int, list[int]]:
    rank = dist.get_rank()
    with CheckpointManager(root, every=1000, poll=poll, deadline=20) as manager:
        for step in range(1, 200):
            dist.all_reduce(torch.ones(1))  # ranks of one training loop keep step
            if rank == signalled and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.step(step, {"w": torch.full((10,), float(step)), "step": step})
            if manager.should_stop:
                return step, manager.steps()
    return -1, []


@pytest.mark.parametrize(("signalled", "at", "poll"), [(2, 3, 1), (0, 6, 1), (1, 8, 5), (0, 10, 5)])
def test_one_signal_stops_all_ranks_at_one_step(signalled: int, at: int, poll: int, tmp_path: Path) -> None:
    results = pool.run(3, train_until_told, str(tmp_path / "run"), signalled, at, poll)
    assert len({step for step, _ in results}) == 1 and results[0][0] >= at
    assert results[0][1] == [results[0][0]], "the last step was saved, once"


def resume(root: str, steps: int) -> tuple[int, float, list[int]]:
    state: dict[str, Any] = {
        "w": holdfast.Shard(
            torch.zeros(12 // dist.get_world_size()), (12,), (dist.get_rank() * 12 // dist.get_world_size(),)
        ),
        "step": 0,
        "rng": holdfast.RNG(),
    }
    with CheckpointManager(root, every=2, keep=Keep(last=2)) as manager:
        manager.restore(state)
        start = state["step"]
        for step in range(start + 1, start + steps + 1):
            state["w"].tensor.add_(1)
            state["step"] = step
            manager.step(step, state)
        dist.barrier()  # the first rank sweeps after the save; the others see its result only then
        return start, float(state["w"].tensor[0]), manager.steps()


def test_resume_on_other_world_sizes(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for world, start in ((4, 0), (2, 4), (3, 8), (4, 12)):
        for got in pool.run(world, resume, root, 5):
            assert got == (start, start + 5.0, [start + 2, start + 4])
