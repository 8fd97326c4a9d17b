"""Going back to an earlier step, or to the best one: what is restored, what counts afterwards, and what is deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.doctor.checkpoints import diagnose
from holdfast.errors import Damaged, Mismatch, NotACheckpoint, StorageError
from holdfast.inspect.history import Past
from holdfast.inspect.runs import runs_in
from holdfast.inspect.standing import standing
from holdfast.inspect.survey import survey
from holdfast.run import going_back
from holdfast.run.going_back import FILE, WentBack
from holdfast.run.prune import prune
from holdfast.storage.memory import Memory
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.storage.uploads import Upload
from holdfast.storage.urls import location
from holdfast.testing import faults
from tests import pool


@pytest.fixture(params=["disk", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | Place:
    return tmp_path / "run" if request.param == "disk" else StorePlace(Memory(), "run")


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "step": step}


@contextmanager
def run(root: Path | Place, **options: Any) -> Iterator[CheckpointManager]:
    defaults = {"every": 100, "keep": Keep(last=20), "name": "step-{step}", "worker": "thread"}
    with CheckpointManager(root, **{**defaults, **options}) as manager:
        yield manager


def train(manager: CheckpointManager, first: int, last: int, *, course: int = 0, **metrics: float) -> None:
    """Steps of hundred, each saved with a value that says on which ``course`` it was made."""
    for step in range(first, last + 1, 100):
        manager.step(step, state_at(step + course), metric=metrics.get(f"at_{step}"))
        manager.wait()


def value(root: Path | Place, step: int) -> float:
    return float(holdfast.open(root / f"step-{step}").read("w")[0])


def test_training_goes_on_from_an_earlier_step(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 600)
    state = state_at(0)
    with run(root) as manager:
        loaded = manager.restore(state, step=300)
        assert loaded is not None and loaded.step == 300 and state["step"] == 300 and state["w"][0] == 300
        assert manager.steps() == [100, 200, 300, 400, 500, 600], "until it saves, nothing has changed"
        train(manager, 400, 400, course=7)
        assert manager.steps() == [100, 200, 300, 400]
        newest = manager.latest()
        assert newest is not None and newest.step == 400
    assert value(root, 400) == 407, "a later step is in the way of its successor no more"
    assert value(root, 600) == 600, "a later step stays until training has come past it"

    # The next start goes on from the new course, not from the higher number of the old one.
    with run(root) as manager:
        loaded = manager.restore(state)
        assert loaded is not None and loaded.step == 400 and state["w"][0] == 407
        train(manager, 500, 700, course=7)
        assert manager.steps() == [100, 200, 300, 400, 500, 600, 700]
    assert [value(root, step) for step in (500, 600, 700)] == [507, 607, 707]


def test_a_restart_before_the_first_save_has_not_gone_back(tmp_path: Path) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 300)
    with run(tmp_path) as manager:
        manager.restore(state_at(0), step=100)
    assert not (tmp_path / FILE).exists()
    with run(tmp_path) as manager:
        loaded = manager.restore(state_at(0))
        assert loaded is not None and loaded.step == 300


def test_a_crash_between_the_mark_and_the_save_goes_on_from_the_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 300)
    with run(tmp_path) as manager:
        manager.restore(state_at(0), step=100)
        full = holdfast.testing.faults("write", error="ENOSPC", under=tmp_path / "step-150")
        with full, pytest.raises(holdfast.SaveFailed):
            manager.save(150, state_at(150))
    with run(tmp_path) as manager:
        loaded = manager.restore(state_at(0))
        assert loaded is not None and loaded.step == 100


def test_the_steps_left_behind_are_deleted_as_training_comes_past_them(root: Path | Place) -> None:
    with run(root, keep=Keep(last=3)) as manager:
        train(manager, 100, 600)  # 400, 500, 600 stay
        manager.save(650, state_at(650))
    with run(root, keep=Keep(last=3)) as manager:
        manager.restore(state_at(0), step=500)
        manager.save(610, state_at(617))
        assert manager.steps() == [500, 610]
        assert value(root, 650) == 650
        with pytest.raises(NotACheckpoint):
            holdfast.open(root / "step-600")
        train(manager, 700, 700, course=7)
        assert manager.steps() == [500, 610, 700]
        with pytest.raises(NotACheckpoint):
            holdfast.open(root / "step-650")


def test_the_steps_left_behind_lose_no_section(tmp_path: Path) -> None:
    keep = Keep(last=9, optimizer_last=9, optimizer="w")
    with run(tmp_path, keep=keep) as manager:
        train(manager, 100, 300)
    with run(tmp_path, keep=keep) as manager:
        manager.restore(state_at(0), step=100)
        train(manager, 150, 150)
    assert value(tmp_path, 200) == 200 and value(tmp_path, 300) == 300


def test_going_back_and_forth_again(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 500)
    with run(root) as manager:
        manager.restore(state_at(0), step=200)
        manager.save(250, state_at(250))
        assert manager.steps() == [100, 200, 250]
    with run(root) as manager:  # the first course was the better one after all
        loaded = manager.restore(state_at(0), step=500)
        assert loaded is not None and loaded.step == 500
        train(manager, 600, 600)
        assert manager.steps() == [100, 200, 250, 300, 400, 500, 600]
    with run(root) as manager:
        loaded = manager.restore(state_at(0))
        assert loaded is not None and loaded.step == 600


def test_the_best_step(root: Path | Place) -> None:
    with run(root, keep=Keep(last=1, best=2)) as manager:
        assert manager.best() is None
        with pytest.raises(NotACheckpoint, match="no step in .* was saved with a metric: pass metric="):
            manager.restore(state_at(0), step="best")
        train(manager, 100, 500, at_100=0.9, at_200=0.2, at_300=0.4, at_400=0.3, at_500=float("nan"))
        best = manager.best()
        assert best is not None and best.step == 200 and manager.steps() == [200, 400, 500]
    with run(root, keep=Keep(last=1, best=2, mode="max")) as manager:
        best = manager.best()
        assert best is not None and best.step == 400
        state = state_at(0)
        loaded = manager.restore(state, step="best")
        assert loaded is not None and loaded.step == 400 and state["step"] == 400


def test_a_step_that_is_not_there_or_not_whole(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 300)
        state = state_at(0)
        with pytest.raises(NotACheckpoint, match="there is no step 250 in .*; its steps are 100, 200, 300"):
            manager.restore(state, step=250)
        lacking = next(path for path in (root / "step-200").files_below() if path.endswith(".safetensors"))
        (root / "step-200" / lacking).delete()
        with pytest.raises(Damaged, match="step-200 cannot be restored: .* is missing.*holdfast doctor .*step-200"):
            manager.restore(state, step=200)
        assert state["step"] == 0, "no other step is tried"


@pytest.mark.parametrize("step", [-1, True])
def test_what_is_no_step(tmp_path: Path, step: int) -> None:
    with run(tmp_path) as manager, pytest.raises(ValueError, match='is the number of a step, or "best"'):
        manager.restore(state_at(0), step=step)


def test_a_mark_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 100)
    (tmp_path / FILE).write_text("{")
    with run(tmp_path) as manager, pytest.raises(Damaged, match=r"\.went-back cannot be read"):
        manager.restore(state_at(0))


def test_a_mark_that_cannot_be_read_fails_no_save_and_no_sweep(
    root: Path | Place, caplog: pytest.LogCaptureFixture
) -> None:
    with run(root) as manager:
        train(manager, 100, 200)
        (manager.root / FILE).replace_small(b"{", f"{FILE}.tmp")
    with run(root, keep=Keep(last=1), worker="none") as manager:
        train(manager, 300, 400)
    assert [value(root, step) for step in (100, 200, 300, 400)] == [100, 200, 300, 400]
    messages = " ".join(record.message for record in caplog.records)
    assert "cannot tell whether training left" in messages and "sweeping" in messages


def test_with_a_fast_tier(tmp_path: Path) -> None:
    store = StorePlace(Memory(), "run")
    options = {"fast": tmp_path / "fast", "upload": holdfast.storage.Upload(every=100), "keep_fast": Keep(last=9)}
    with run(store, **options) as manager:
        train(manager, 100, 500)
    with run(store, **options) as manager:
        loaded = manager.restore(state_at(0), step=200)
        assert loaded is not None and loaded.step == 200
        train(manager, 300, 300, course=7)
        assert manager.steps() == [100, 200, 300]
    assert value(store, 300) == value(tmp_path / "fast", 300) == 307, (
        "the store has the new step in the old one's place"
    )
    for fast in ("fast", "another-disk"):
        with run(store, **{**options, "fast": tmp_path / fast}) as manager:
            loaded = manager.restore(state_at(0))
            assert loaded is not None and loaded.step == 300
    with run(store, **options) as manager, pytest.raises(NotACheckpoint, match="there is no step 250 of"):
        manager.restore(state_at(0), step=250)


def test_the_mark_names_saves(tmp_path: Path) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 300)
        saves = {manager.root / f"step-{step}": holdfast.open(tmp_path / f"step-{step}") for step in (200, 300)}
        manager.restore(state_at(0), step=100)
        train(manager, 200, 200)
    mark = msgspec.json.decode((tmp_path / FILE).read_bytes(), type=WentBack)
    assert mark == WentBack(100, frozenset(checkpoint.manifest.save for checkpoint in saves.values()))


def test_keeping_the_best_without_a_metric_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(tmp_path, every=10, keep=Keep(best=2)) as manager, caplog.at_level(logging.WARNING, "holdfast"):
        manager.step(10, state_at(10), metric=0.5)
        manager.step(11, state_at(11))
        assert not caplog.records, "a step that is not saved needs none"
        manager.step(20, state_at(20))
        manager.step(30, state_at(30))
    (record,) = caplog.records
    assert "Keep(best=2) keeps the steps with the best metric, and step 20 is saved without one" in record.message


def _goes_back(root: str) -> list[Any]:
    with run(Path(root), worker="process") as manager:
        train(manager, 100, 300)
    with run(Path(root), worker="process") as manager:
        errors = []
        try:
            manager.restore(state_at(0), step=250)
        except NotACheckpoint as error:
            errors.append(str(error))
        manager.restore(state_at(0), step=100)
        train(manager, 200, 200, course=7)
        return [errors, manager.steps(), value(Path(root), 200)]


def test_all_ranks_go_back(tmp_path: Path) -> None:
    first, second = pool.run(2, _goes_back, str(tmp_path))
    assert first == second and first[1:] == [[100, 200], 207]
    assert "there is no step 250 in" in first[0][0]


def _reads_of_the_mark(root: str) -> list[str]:
    """Where this rank looks for a mark while it saves in a run that has steps."""
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch, run(Path(root), worker="none") as manager:
        read = going_back.read
        patch.setattr(going_back, "read", lambda root: reads.append(root.name) or read(root))
        train(manager, 200, 300)
    return reads


def test_the_first_rank_alone_reads_the_mark_when_it_saves(tmp_path: Path) -> None:
    with run(tmp_path / "run") as manager:
        train(manager, 100, 100)
    first, second = pool.run(2, _reads_of_the_mark, str(tmp_path / "run"))
    assert first == ["run"] and second == []


def test_lists_and_reports_say_which_steps_were_left_behind(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 500, at_200=0.5, at_300=0.4, at_500=0.1)
    with run(root) as manager:
        manager.restore(state_at(0), step=200)
        assert {step.health for step in survey(root)} == {"whole"}, "until it saves, nothing has changed"
        train(manager, 300, 300, course=7, at_300=0.3)
    health = {step.step: step.health for step in survey(root)}
    assert health == {100: "whole", 200: "whole", 300: "whole", 400: "left behind", 500: "left behind"}
    history = Past(root).look()
    now = standing(str(root), history)
    assert now.left_behind == [400, 500] and now.there == [100, 200, 300, 400, 500]
    assert now.best is not None and now.best.step == 300
    text = "\n".join(finding.text for finding in diagnose(root))
    assert "the newest is step-300; training went back, and goes on without 2 later ones" in text


def test_the_newest_of_a_run_is_none_that_was_left_behind(tmp_path: Path) -> None:
    with run(tmp_path / "run") as manager:
        train(manager, 100, 300)
    with run(tmp_path / "run") as manager:
        manager.restore(state_at(0), step=100)
        manager.save(150, state_at(150))
    [line] = runs_in(tmp_path)
    assert line.newest is not None and line.newest.step == 150 and line.steps == 4


def test_steps_are_listed_though_the_mark_cannot_be_read(tmp_path: Path) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 100)
    (tmp_path / FILE).write_text("{")
    assert [step.health for step in survey(tmp_path)] == ["whole"]
    assert Past(tmp_path).look().behind == frozenset()
    assert any(finding.verdict == "fail" and FILE in finding.text for finding in diagnose(tmp_path))


def test_prune_keeps_the_step_that_training_goes_on_from(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 500, at_100=0.9, at_200=0.5, at_300=0.4, at_500=0.1)
    with run(root) as manager:
        manager.restore(state_at(0), step=200)
        train(manager, 300, 300, course=7, at_300=0.6)
        manager.save(450, state_at(450))
    done = prune(root, Keep(last=1, best=1), dry_run=False)
    assert {fate.step: (fate.goes, fate.why) for fate in done.steps} == {
        100: ("all", ("no rule keeps it",)),
        200: ("nothing", ("best 1 (metric 0.5)",)),
        300: ("all", ("no rule keeps it",)),
        450: ("nothing", ("newest",)),
        500: ("nothing", ("left behind",)),
    }
    with run(root) as manager:
        loaded = manager.restore(state_at(0))
        assert loaded is not None and loaded.step == 450


# Steps that have lost their manifest


def without_manifest(root: Path | Place, step: int) -> Place:
    folder = location(root) / f"step-{step}"
    (folder / "manifest.json").delete()
    return folder


@pytest.mark.parametrize("journal", [True, False])
def test_a_named_step_without_a_manifest_stays(root: Path | Place, journal: bool) -> None:
    """`restore` once swept it first, and then said that there was no such step."""
    with run(root, journal=journal) as manager:
        train(manager, 100, 300)
    folder = without_manifest(root, 300)
    lost = pytest.raises(NotACheckpoint, match=r"step-300 holds data but no manifest.*rescue")
    with run(root, journal=journal) as manager, lost:
        files = folder.files_below()
        manager.restore(state_at(0), step=300)
    assert folder.files_below() == files
    holdfast.tools.rescue(folder, like=root / "step-200")
    with run(root, journal=journal) as manager:
        loaded = manager.restore(state := state_at(0), step=300)
        assert loaded is not None and float(state["w"][0]) == 300


def test_a_named_step_without_a_manifest_stays_on_the_fast_tier(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"fast": tmp_path / "fast", "upload": Upload(every=1000, newest=False)}
    with run(tmp_path / "run", **tiers) as manager:
        train(manager, 100, 300)
    folder = without_manifest(tmp_path / "fast", 300)
    with run(tmp_path / "run", **tiers) as manager:
        with pytest.raises(NotACheckpoint, match=r"fast/step-300 holds data but no manifest.*rescue"):
            manager.restore(state_at(0), step=300)
        assert folder.files_below()


def test_a_step_that_lost_its_manifest_stays_as_long_as_the_rules_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 300)
    folder = without_manifest(tmp_path, 300)
    caplog.set_level(logging.INFO, "holdfast")
    with run(tmp_path, keep=Keep(last=2)) as manager:
        loaded = manager.restore(state_at(0))
        assert loaded is not None and loaded.step == 200 and folder.files_below()
        manager.save(250, state_at(250))
        assert folder.files_below()
        warned = [record for record in caplog.records if "is left alone" in record.getMessage()]
        assert len(warned) == 1 and f"holdfast rescue {folder} --like" in warned[0].getMessage()
        train(manager, 400, 500)
        assert manager.steps() == [400, 500] and not folder.files_below()


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_step_whose_deletion_was_interrupted_goes_though_new_rules_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nth: int
) -> None:
    """A run that goes on with ``Keep(last=2)`` once left such a step alone, and said that it had lost its manifest."""
    with run(tmp_path) as manager:
        train(manager, 100, 200)
    folder = tmp_path / "step-100"
    with faults("delete", nth=nth, times=0, under=folder) as interrupted, pytest.raises(StorageError):
        prune(tmp_path, Keep(last=1), dry_run=False)
    assert interrupted.hits and folder.exists() and not (folder / "manifest.json").exists()
    caplog.set_level(logging.INFO, "holdfast")
    with run(tmp_path, keep=Keep(last=2)) as manager:
        loaded = manager.restore(state_at(0))
    assert loaded is not None and loaded.step == 200 and not folder.exists()
    said = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
    assert said == [f"sweeping {folder}: a checkpoint that was being deleted"]


def test_training_saves_a_step_again_that_lost_its_manifest(tmp_path: Path) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 300)
    without_manifest(tmp_path, 300)
    with run(tmp_path) as manager:
        manager.restore(state_at(0))
        train(manager, 300, 300, course=7)
        assert manager.steps() == [100, 200, 300] and value(tmp_path, 300) == 307


def test_whole_data_files_without_a_journal_are_not_deleted_in_silence(
    root: Path | Place, caplog: pytest.LogCaptureFixture
) -> None:
    with run(root, journal=False) as manager:
        train(manager, 100, 200)
    folder = without_manifest(root, 200)
    caplog.set_level(logging.INFO, "holdfast")
    with run(root, journal=False) as manager:
        manager.restore(state_at(0))
    if not folder.is_remote:  # in a store they are too young to be a dead save's
        assert not folder.files_below()
        assert any("data files and no manifest.json: they are deleted" in r.getMessage() for r in caplog.records)


def test_a_killed_save_is_deleted_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(tmp_path) as manager:
        train(manager, 100, 200)
    holdfast.save(state_at(300), tmp_path / "step-300")
    folder = without_manifest(tmp_path, 300)
    caplog.set_level(logging.INFO, "holdfast")
    with run(tmp_path) as manager:
        manager.restore(state_at(0))
    assert not folder.files_below() and not [r for r in caplog.records if r.levelno >= logging.WARNING]


# Which metric is the better one


def test_the_mode_is_recorded_with_the_metric(root: Path | Place, caplog: pytest.LogCaptureFixture) -> None:
    with run(root, keep=Keep(last=20, best=2, mode="max")) as manager:
        train(manager, 100, 400, at_100=0.8, at_200=0.9, at_300=0.6, at_400=0.65)
    with run(root) as manager:
        best = manager.best()
        assert best is not None and best.step == 200
        loaded = manager.restore(state_at(0), step="best")
        assert loaded is not None and loaded.step == 200
    pruned = prune(root, Keep(last=1, best=1))
    assert [fate.step for fate in pruned.steps if fate.goes == "nothing"] == [200, 400]
    assert not [record for record in caplog.records if "mode=" in record.getMessage()]
    with run(root, keep=Keep(mode="min")) as manager:
        for _ in range(2):
            best = manager.best()
            assert best is not None and best.step == 300, "what is said counts"
        assert len([record for record in caplog.records if "mode='min' counts" in record.getMessage()]) == 1


def test_a_run_goes_on_with_the_mode_that_it_has_recorded(tmp_path: Path) -> None:
    with run(tmp_path, keep=Keep(last=1, best=1, mode="max")) as manager:
        train(manager, 100, 200, at_100=0.9, at_200=0.5)
    with run(tmp_path, keep=Keep(last=1, best=1)) as manager:
        manager.restore(state_at(0))
        train(manager, 300, 500, at_300=0.7, at_400=0.95, at_500=0.6)
        assert manager.steps() == [400, 500]
    with run(tmp_path) as manager:
        best = manager.best()
        assert best is not None and best.step == 400


def test_the_mode_is_recorded_on_tiers(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"fast": tmp_path / "fast", "upload": Upload(every=1000, newest=False)}
    with run(tmp_path / "run", **tiers, keep=Keep(best=1, mode="max")) as manager:
        train(manager, 100, 200, at_100=0.9, at_200=0.5)
    with run(tmp_path / "run", **tiers) as manager:
        best = manager.best()
        assert best is not None and best.step == 100


def test_a_mismatch_names_the_call_that_takes_its_advice(root: Path | Place) -> None:
    with run(root) as manager:
        train(manager, 100, 100)
        with pytest.raises(Mismatch, match=r'missing="keep".*\n(.*\n)*missing=, .* are options of holdfast\.load'):
            manager.restore({**state_at(0), "more": torch.zeros(1)})
        with pytest.raises(Mismatch, match=r"cast=True.*\n(.*\n)*missing=, .* are options of holdfast\.load"):
            manager.restore({**state_at(0), "w": torch.zeros(8, dtype=torch.float64)})
        manager.save(200, {"cast=True": torch.zeros(8)})
        with pytest.raises(Mismatch) as caught:  # none of these options helps, whatever the tensor is called
            manager.restore({"cast=True": torch.zeros(3, 3)})
        assert "cast=True: saved with shape" in str(caught.value) and "options of" not in str(caught.value)
