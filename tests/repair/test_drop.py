"""Sections that a checkpoint loses: a new manifest over the same files, for readers of every kind, at any moment."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Keep
from holdfast.commit import sections
from holdfast.formats.own import read_manifest
from holdfast.run.retention import KeptSteps
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Memory
from tests import format_reader
from tests.citing import is_state, needed, save_on, state_of

CONFIG = {"config.json": b"{}"}


def rich(step: int = 3) -> dict[str, Any]:
    """A state with one of everything, tied weights and values of each rank among it."""
    weight = torch.randn(40, 3)
    return {
        "model": {"w": weight, "tied": weight, "empty": torch.empty(0, 2)},
        "optimizer": {"state": {"m": torch.randn(40, 3)}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "optim_extra": {"none": {}, "mine": holdfast.PerRank([1])},
        "loose": torch.arange(4),
        "rng": holdfast.PerRank([7]),
        "step": step,
    }


@pytest.fixture(params=["disk", "store"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return StorePlace(Memory(), "run/step-3") if request.param == "store" else tmp_path / "run" / "step-3"


def test_what_is_left_is_the_same(path: Place) -> None:
    state = rich()
    before = holdfast.save(state, path, files=CONFIG).manifest
    sizes = path.sizes_below()
    told = holdfast.tools.drop(path, "optim*", dry_run=True)
    assert path.sizes_below() == sizes and read_manifest(path) == before
    assert holdfast.tools.drop(path, "optim*") == told
    assert set(told.sections) == {"optimizer", "optim_extra"} and told.files == 2
    gone = set(sizes) - set(path.files_below())
    assert {name.partition("/")[0] for name in gone} == set(told.sections)
    assert sum(sizes[name] for name in gone) == told.nbytes
    after = read_manifest(path)
    assert (after.save, after.run, after.step, after.created) == (before.save, before.run, before.step, before.created)
    assert after.producer["dropped"] == "optimizer/optim_extra"
    assert all(row in before.files for row in after.files)
    opened = holdfast.open(path)
    opened.verify()
    found = opened.state_dict()
    assert set(found) == {"model", "loose", "step"} and opened.differing == ["rng"] and opened.per_rank("rng", 0) == [7]
    assert torch.equal(found["model"]["w"], state["model"]["w"]) and found["model"]["w"] is found["model"]["tied"]
    assert opened.attachment("config.json") == b"{}"
    into = {**rich(), "rng": holdfast.PerRank(None)}
    holdfast.load(path, into, only=["model", "loose", "rng"])
    assert torch.equal(into["model"]["w"], state["model"]["w"]) and into["rng"].value == [7]
    again = holdfast.tools.drop(path, "optim*")
    assert again.sections == () and again.files == 0, "gone already"


def test_another_reader_of_the_format_reads_it(tmp_path: Path) -> None:
    state = rich()
    holdfast.save(state, tmp_path / "c")
    holdfast.tools.drop(tmp_path / "c", ("optimizer", "optim_extra"))
    found = format_reader.read(tmp_path / "c").state
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert not any(name.startswith("optim") for name in found)


def test_loading_what_is_gone_is_refused_and_says_what_is_left(path: Place) -> None:
    holdfast.save(state_of(3), path)
    holdfast.tools.drop(path, "optimizer")
    into = state_of(0, model=5)
    with pytest.raises(
        holdfast.errors.Mismatch, match=r"optimizer was dropped by Keep.*only=\[.*\"model\".* loads what is left"
    ):
        holdfast.load(path, into)
    assert (into["model"]["w"] == 51).all(), "nothing was changed"
    holdfast.load(path, into, only="model")
    assert (into["model"]["w"] == 1).all()
    del into["optimizer"]
    holdfast.load(path, into)


def test_what_cannot_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "c"
    weight = torch.randn(3)
    holdfast.save({"ema": {"w": weight}, "model": {"w": weight}, "optimizer": {"m": torch.randn(3)}}, path)
    told = r"no section 'optimiser' \(did you mean optimizer\?\); it has ema, .*optimizer"
    for wrong in ("optimiser", ["optimiser"], ["optimizer", "optimiser"]):
        with pytest.raises(holdfast.errors.Mismatch, match=told):
            holdfast.tools.drop(path, wrong)
    for empty in ("", [], ["optimizer", ""]):
        with pytest.raises(holdfast.errors.Mismatch, match="sections=.* (names nothing|has an empty name)"):
            holdfast.tools.drop(path, empty)
    assert set(holdfast.open(path).state_dict()) == {"ema", "model", "optimizer"}, "nothing is gone"
    with pytest.raises(ValueError, match="no tensor left"):
        holdfast.tools.drop(path, "*")
    with pytest.raises(holdfast.errors.Unsupported, match=r"model/w shares the bytes of ema/w"):
        holdfast.tools.drop(path, "ema")
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.tools.drop(tmp_path / "none", "optimizer")
    torch.save({"w": weight}, tmp_path / "model.pt")
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.tools.drop(tmp_path / "model.pt", "w")
    holdfast.open(path).verify()
    assert holdfast.tools.drop(path, ["model", "optimizer"]).files == 1, "the other name of what stays has no bytes"
    is_the_rest = holdfast.open(path).state_dict()
    assert torch.equal(is_the_rest["ema"]["w"], weight)


def test_a_newer_writers_manifest_is_not_written_again(tmp_path: Path) -> None:
    import msgspec
    import xxhash

    holdfast.save(state_of(3), tmp_path / "c")
    target = tmp_path / "c" / "manifest.json"
    fields = msgspec.json.decode(target.read_bytes())
    del fields["digest"]
    body = msgspec.json.encode({**fields, "more": 1})[:-1]
    target.write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}')
    with pytest.raises(holdfast.errors.Unsupported, match="says more than"):
        holdfast.tools.drop(tmp_path / "c", "optimizer")


def test_shared_files_go_with_the_last_that_names_them(tmp_path: Path) -> None:
    states = {1: state_of(1), 2: state_of(2, model=1)}
    save_on(states[1], tmp_path / "step-1")
    save_on(states[2], tmp_path / "step-2", tmp_path / "step-1")
    holdfast.tools.drop(tmp_path / "step-1", "optimizer")
    is_state(tmp_path / "step-1", states[1], ("optimizer",))
    is_state(tmp_path / "step-2", states[2])
    assert len(list((tmp_path / "step-1" / "optimizer").iterdir())) == 1
    holdfast.tools.drop(tmp_path / "step-2", "optimizer")
    is_state(tmp_path / "step-2", states[2], ("optimizer",))
    assert not (tmp_path / "step-1" / "optimizer").exists()
    assert set(tmp_path.files_below()) == needed(tmp_path)


def test_a_reader_that_opened_it_before(path: Place) -> None:
    holdfast.save(state_of(3), path)
    early, reading = holdfast.open(path), holdfast.open(path)
    reading.read("optimizer/v")
    holdfast.tools.drop(path, "optimizer")
    for opened in (early, reading):
        assert torch.equal(opened.read("model/w"), state_of(3)["model"]["w"])
        with pytest.raises(holdfast.errors.Damaged, match=r"optimizer/.* is missing"):
            opened.read("optimizer/w")


def test_a_save_in_between_is_left_alone(path: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(state_of(3), path)
    newer = state_of(3, model=9)
    without = sections.without

    def slow(*args: Any) -> Any:
        holdfast.save(newer, path, overwrite=True)
        return without(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sections, "without", slow)
        with pytest.raises(holdfast.errors.NotACheckpoint, match="was replaced meanwhile"):
            holdfast.tools.drop(path, "optimizer")
    is_state(path, newer)
    assert not any("dropping" in name for name in path.files_below())


@pytest.mark.parametrize("verb", ["unlink", "replace"])
def test_a_disk_that_refuses(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(3)
    holdfast.save(state, tmp_path / "step-3")

    real = getattr(os if verb == "replace" else Path, verb)

    def refuse(path: Any, *args: Any, **options: Any) -> None:
        if verb == "replace" or path.suffix == ".safetensors":
            raise OSError(5, "made to fail")
        real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os if verb == "replace" else Path, verb, refuse)
        if verb == "replace":
            with pytest.raises(holdfast.errors.StorageError):
                holdfast.tools.drop(tmp_path / "step-3", "optimizer")
        else:
            holdfast.tools.drop(tmp_path / "step-3", "optimizer")
    is_state(tmp_path / "step-3", state, () if verb == "replace" else ("optimizer",))
    KeptSteps(tmp_path, "step-{step}").clean(())
    assert set(tmp_path.files_below()) == needed(tmp_path)


# What `Keep` drops


def full(path: Place) -> bool:
    return "dropped" not in read_manifest(path).producer


@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("incremental", [False, True])
def test_old_steps_lose_their_optimizers(kind: str, incremental: bool, tmp_path: Path) -> None:
    root: Place = StorePlace(Memory(), "run") if kind == "store" else tmp_path
    keep = Keep(last=4, optimizer_last=2, model_every=5)
    with holdfast.CheckpointManager(
        root, every=1, keep=keep, name="step-{step}", worker="thread", incremental=incremental, journal=False
    ) as manager:
        for step in range(1, 14):
            manager.step(step, state_of(step, optimizer=step, model=step // 2))
            manager.wait()
        manager.wait()
    # In a manager that saves on top of the last step that one is held until the next has ended.
    assert manager.steps() == [5, 10, 11, 12, 13] if not incremental else manager.steps()[-4:] == [10, 11, 12, 13]
    for step in manager.steps():
        lost = () if step >= 12 else ("optimizer",)
        if full(root / f"step-{step}") and step < 12:
            assert incremental
            lost = ()
        is_state(root / f"step-{step}", state_of(step, optimizer=step, model=step // 2), lost)
    if not incremental:
        assert set(root.files_below()) == needed(root)


def test_restore_prefers_a_whole_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        holdfast.save(state_of(step, model=step), tmp_path / f"step-{step}")
    for step in (3, 2):
        holdfast.tools.drop(tmp_path / f"step-{step}", "optimizer")
    with holdfast.CheckpointManager(tmp_path, every=1, name="step-{step}", worker="none") as manager:
        into = state_of(0)
        with caplog.at_level(logging.INFO, "holdfast"):
            loaded = manager.restore(into)
        assert loaded is not None and loaded.step == into["step"] == 1
        assert "step-3 is passed over: it has no optimizer any more" in caplog.text
        loaded = manager.restore(into, only=["model", "step"])
        assert loaded is not None and loaded.step == into["step"] == 3 and (into["model"]["w"] == 31).all()
        latest = manager.latest()
        assert latest is not None and latest.step == 3
        holdfast.tools.drop(tmp_path / "step-1", "optimizer")
        with pytest.raises(holdfast.errors.Mismatch, match="was dropped"):
            manager.restore(into)
        del into["optimizer"]
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 3


def test_a_pattern_that_fits_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = Keep(last=3, optimizer_last=1, optimizer="adam")
    manager = holdfast.CheckpointManager(tmp_path, every=1, keep=keep, worker="none")
    with caplog.at_level(logging.WARNING, "holdfast"), manager:
        for step in range(1, 6):
            manager.step(step, state_of(step))
    assert [r.getMessage().count("Keep(optimizer='adam')") for r in caplog.records] == [1]
    assert all(full(path) for path in tmp_path.glob("step-*"))


@pytest.mark.parametrize("tiers", [False, True])
def test_steps_that_a_restore_passed_over_are_made_again(tiers: bool, tmp_path: Path) -> None:
    """Whole steps without an optimizer lie between the restored one and the end: training comes to them again."""
    root = tmp_path / "fast" if tiers else tmp_path
    for step in (1, 2, 3):
        holdfast.save(state_of(step, model=step), root / f"step-{step}")
    for step in (3, 2):
        holdfast.tools.drop(root / f"step-{step}", "optimizer")
    home: dict[str, Any] = (
        {"root": StorePlace(Memory(), "run"), "fast": root, "keep_fast": Keep(last=9)} if tiers else {"root": root}
    )
    with holdfast.CheckpointManager(**home, every=1, name="step-{step}", keep=Keep(last=9), worker="none") as manager:
        loaded = manager.restore(state_of(0))
        assert loaded is not None and loaded.step == 1
        for step in (2, 3, 4):
            manager.step(step, state_of(step, optimizer=step, model=7))
    for step in (2, 3, 4):
        is_state(root / f"step-{step}", state_of(step, optimizer=step, model=7), ())
