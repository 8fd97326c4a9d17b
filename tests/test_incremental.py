"""Incremental saves: what is as it was is cited and not written, and every step restores exactly what was saved."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine import base as module
from holdfast.ondisk.manifest import Manifest
from tests import format_reader

KB = 256
"""Elements of float32 in a KiB."""


def _tensor(seed: int, kib: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randint(-100, 100, (kib, KB), generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def _state(step: int, frozen: int = 6) -> dict[str, Any]:
    """Of 99 parts frozen and one that trains, like LoRA."""
    model = {f"layer.{i}": _tensor(i) for i in range(frozen)}
    return {"model": {**model, "lora": _tensor(1000 + step, 4)}, "optim": {"m": _tensor(2000 + step, 4)}, "step": step}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and set(one) == set(other) and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return bool(one == other)


def _is(path: Path | Any, state: Mapping[str, Any], *, reader: bool = True) -> Manifest:
    """The checkpoint is whole, and is exactly this state; a reader of the bare format finds the same."""
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    assert _equal(checkpoint.state_dict(), state)
    if reader:
        assert _equal(format_reader.read(path).state, state)
    return checkpoint.manifest


def _own(record: Manifest) -> int:
    """Bytes that this save wrote."""
    return sum(file.bytes for file in record.data_files if file.save is None)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_is_as_it_was_is_linked_and_not_written(tmp_path: Path) -> None:
    first = holdfast.save(_state(1, 30), tmp_path / "1")
    second = holdfast.save(_state(2, 30), tmp_path / "2", base=first)
    record = _is(tmp_path / "2", _state(2, 30))
    borrowed = [file for file in record.data_files if file.save is not None]
    assert [file.save for file in borrowed] == [first.manifest.save] and ".." not in borrowed[0].path
    assert os.path.samefile(tmp_path / "2" / borrowed[0].path, tmp_path / "1" / borrowed[0].path)
    assert _own(second.manifest) < 0.015 * first.nbytes + 2 * 4096, "what changed, and two headers"
    shutil.rmtree(tmp_path / "1")
    _is(tmp_path / "2", _state(2, 30))


@pytest.mark.parametrize("given", ["path", "text", "checkpoint", "opened"])
def test_the_base_can_be_named_in_every_way(given: str, tmp_path: Path) -> None:
    first = holdfast.save(_state(1), tmp_path / "1")
    path = tmp_path / "1"
    named = {"path": path, "text": str(path), "checkpoint": first, "opened": holdfast.open(path)}
    second = holdfast.save(_state(2), tmp_path / "2", base=named[given])
    assert _own(second.manifest) < 0.2 * first.nbytes
    _is(tmp_path / "2", _state(2))


def test_a_section_without_changes_has_no_file_of_its_own(tmp_path: Path) -> None:
    same = {"model": {"w": _tensor(1), "none": torch.empty(0, 3)}, "step": 1}
    holdfast.save(same, tmp_path / "1")
    second = holdfast.save({**same, "step": 2}, tmp_path / "2", base=tmp_path / "1")
    record = _is(tmp_path / "2", {**same, "step": 2})
    assert len(record.data_files) == 1 and record.data_files[0].save is not None and second.step == 2
    third = holdfast.save({**same, "step": 3}, tmp_path / "3", base=second)
    assert _own(third.manifest) == 0
    _is(tmp_path / "3", {**same, "step": 3})


def test_values_that_differ_by_rank_are_written_each_time(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        mine = holdfast.PerRank({"n": step, "t": torch.full((3,), step)})
        return {"model": {"w": _tensor(1), "mine": mine}, "step": step}

    first = holdfast.save(state(1), tmp_path / "1")
    second = holdfast.save(state(2), tmp_path / "2", base=first)
    second.verify()
    assert second.per_rank("model/mine", 0)["n"] == 2 and format_reader.read(tmp_path / "2").per_rank["model/mine"]
    assert len(second.manifest.data_files) == 2


CHANGES = {
    "renamed": lambda m: {**{f"{k}.new": v for k, v in m.items()}},
    "new": lambda m: {**m, "more": _tensor(77)},
    "removed": lambda m: {k: v for k, v in m.items() if k != "layer.2"},
    "another shape": lambda m: {**m, "layer.0": m["layer.0"].view(-1)},
    "transposed": lambda m: {**m, "layer.0": m["layer.0"].t()},
    "another type": lambda m: {**m, "layer.0": m["layer.0"].to(torch.bfloat16)},
    "other bits of the same size": lambda m: {**m, "layer.0": m["layer.0"].view(torch.int32)},
    "all changed": lambda m: {k: v + 1 for k, v in m.items()},
    "most changed": lambda m: {k: v + (k != "layer.1") for k, v in m.items()},
    "less than half changed": lambda m: {k: v + (k in ("layer.1", "layer.2")) for k, v in m.items()},
    "one bit": lambda m: {**m, "layer.3": _flipped(m["layer.3"])},
    "scattered in memory": lambda m: {k: v.t().contiguous().t() for k, v in m.items()},
    "tied": lambda m: {**m, "tied": m["layer.0"]},
}
CITED = {"new": 6, "removed": 5, "less than half changed": 4, "one bit": 5, "scattered in memory": 6, "tied": 6}
CITED |= dict.fromkeys(["another shape", "transposed", "another type", "other bits of the same size"], 5)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change: str, tmp_path: Path) -> None:
    before = {f"layer.{i}": _tensor(i) for i in range(6)}
    after = {"model": CHANGES[change](before)}
    holdfast.save({"model": before}, tmp_path / "1")
    holdfast.save(after, tmp_path / "2", base=tmp_path / "1")
    record = _is(tmp_path / "2", after)
    borrowed = {index for index, file in enumerate(record.data_files) if file.save is not None}
    cited = [name for name, tensor in record.tensors.items() if {int(tensor.files)} & borrowed]
    assert len(cited) == CITED.get(change, 0), cited
    _is(tmp_path / "1", {"model": before})


@pytest.mark.parametrize("links", [True, False])
def test_a_long_chain(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What little changes with each save is found again later, from where it lies; dead bytes stay few."""
    if not links:
        _forbid_links(monkeypatch, errno.EMLINK)
    state = {"model": {f"t{i}": _tensor(i, 16) for i in range(20)}, "step": 0}
    states, previous = [], None
    for step in range(20):
        state = {"model": {**state["model"], f"t{step}": _tensor(100 + step, 16)}, "step": step}
        states.append(state)
        previous = holdfast.save(state, tmp_path / str(step), base=previous)
        dead = sum(file.bytes - file.header_bytes for file in previous.manifest.data_files) - 20 * 16 * 1024
        assert 0 <= dead <= 20 * 16 * 1024
    for step, one in enumerate(states):
        record = _is(tmp_path / str(step), one)
        if not links:
            named = {file.path.split("/")[1]: file.save for file in record.data_files if file.path.startswith("../")}
            assert all(holdfast.open(tmp_path / name).manifest.save == save for name, save in named.items())
    if links:
        for step in range(0, 20, 2):
            shutil.rmtree(tmp_path / str(step))
        for step in range(1, 20, 2):
            _is(tmp_path / str(step), states[step])


def _forbid_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.link

    def link(source: Any, target: Any, **more: Any) -> None:
        if str(target).endswith(".safetensors"):
            raise OSError(number, os.strerror(number), str(source), None, str(target))
        real(source, target, **more)

    monkeypatch.setattr(module.os, "link", link)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS])
def test_where_there_are_no_hard_links_files_are_cited_where_they_lie(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid_links(monkeypatch, number)
    first = holdfast.save(_state(1), tmp_path / "1")
    second = holdfast.save(_state(2), tmp_path / "2", base=first)
    third = holdfast.save(_state(3), tmp_path / "3", base=second)
    paths = [file.path for file in third.manifest.data_files if file.save is not None]
    assert paths == [f"../1/{first.manifest.data_files[0].path}"], "from the folder that holds it"
    for step in (1, 2, 3):
        _is(tmp_path / str(step), _state(step))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC, errno.EIO])
def test_a_link_that_fails_otherwise_costs_a_copy(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = holdfast.save(_state(1), tmp_path / "1")
    _forbid_links(monkeypatch, number)
    second = holdfast.save(_state(2), tmp_path / "2", base=first)
    assert all(file.save is None for file in second.manifest.data_files)
    _is(tmp_path / "2", _state(2))
