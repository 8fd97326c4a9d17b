"""Targets in a store: grown on local disk, uploaded whole, the file that makes them one last."""

from __future__ import annotations

import errno
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.export import conversion
from holdfast.export.partial import LAST, Partial
from holdfast.export.to_store import grown_at
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Failing, Memory

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "step": 7}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("to", ["holdfast", "huggingface", "torch", "dcp"])
def test_every_format(source: Path, to: str, scratch: Path) -> None:
    store = Memory()
    target = holdfast.storage.Place(store, f"made/{to}")
    converted = holdfast.convert(source, target, to=to)
    assert converted.path == target
    found = holdfast.open(target)
    name = next(name for name in found.tensors if name.endswith("w"))
    assert torch.equal(found.read(name), STATE["model"]["w"])
    assert converted.nbytes == sum(entry.nbytes for entry in store.list("made", deep=True).files)
    assert [path.name for path in scratch.iterdir()] == ["source"]  # nothing stays behind

    with pytest.raises(holdfast.errors.StorageError, match="pass overwrite=True"):
        holdfast.convert(source, target, to=to)
    holdfast.convert(source, target, to=to, overwrite=True)
    holdfast.open(target).verify()


def test_every_failing_verb_shows_nothing_half_and_is_made_up_for(source: Path) -> None:
    memory = Memory()
    counted = Failing(memory)
    holdfast.convert(source, holdfast.storage.Place(counted, "t0"), to="dcp")
    for nth in range(1, counted.count + 1):
        target = holdfast.storage.Place(memory, f"t{nth}")
        failing = Failing(memory, nth, times=100)
        with pytest.raises(holdfast.errors.StorageError):
            holdfast.convert(source, holdfast.storage.Place(failing, target.key), to="dcp")
        if any(entry.key.rpartition("/")[2] in LAST for entry in memory.list(target.key, deep=True).files):
            assert nth == counted.count  # only the mark was still to go
            holdfast.open(target).verify()
        holdfast.convert(source, target, to="dcp")
        assert torch.equal(holdfast.open(target).read("model/w"), STATE["model"]["w"])


def test_one_of_ours_is_replaced_without_a_moment_without(source: Path, tmp_path: Path) -> None:
    store = Memory()
    target = holdfast.storage.Place(store, "t")
    holdfast.convert(source, target)
    before = {entry.key for entry in store.list("t", deep=True).files}
    holdfast.save({**STATE, "step": 8}, tmp_path / "newer")
    counted = Failing(store)
    holdfast.convert(tmp_path / "newer", holdfast.storage.Place(counted, "t"), overwrite=True)
    assert before.isdisjoint(entry.key for entry in store.list("t", deep=True).files if "manifest" not in entry.key)
    steps = []
    for nth in range(1, counted.count + 1):
        fresh = Memory()
        holdfast.convert(source, holdfast.storage.Place(fresh, "t"))
        with suppress(holdfast.errors.StorageError):
            holdfast.convert(
                tmp_path / "newer", holdfast.storage.Place(Failing(fresh, nth, times=100), "t"), overwrite=True
            )
        found = holdfast.open(holdfast.storage.Place(fresh, "t"))
        found.verify()
        steps.append(found.step)
    assert steps == sorted(steps) and set(steps) == {7, 8}


def test_a_second_call_is_refused_until_all_is_uploaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, upload, seconds = holdfast.storage.Place(Memory(), "t"), conversion.upload, []

    def slow(grown: LocalPlace, place: StorePlace) -> int:
        with pytest.raises(holdfast.errors.StorageError, match="another process is converting") as caught:
            Partial(grown).give_up()
        seconds.append(caught.value.errno)
        return upload(grown, place)

    monkeypatch.setattr(conversion, "upload", slow)
    holdfast.convert(source, target)
    assert seconds == [errno.EBUSY]
    holdfast.open(target).verify()


def test_what_is_somebody_elses_is_never_replaced(source: Path) -> None:
    store = Memory()
    store.create("t/photos/cat.jpg", b"cat")
    with pytest.raises(holdfast.errors.StorageError, match="does not look like a checkpoint"):
        holdfast.convert(source, holdfast.storage.Place(store, "t"), overwrite=True)
    assert bytes(store.get("t/photos/cat.jpg").data) == b"cat"


def test_a_target_grows_at_one_place_for_each_url() -> None:
    store = Memory()
    assert grown_at(holdfast.storage.Place(store, "a/t")) == grown_at(holdfast.storage.Place(store, "a/t"))
    assert grown_at(holdfast.storage.Place(store, "a/t")) != grown_at(holdfast.storage.Place(store, "b/t"))
