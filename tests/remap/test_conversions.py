"""Conversions under a map on ranks: the same files as alone, from cells, into stores, resumed after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.remap import Remap, Rename
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.export import states
from tests.export.killing import killed_in_its_middle
from tests.remap import mesh_trials
from tests.remap.mesh_trials import SMALL, WIDE, sized
from tests.remap.models import HUB_TO_NATIVE, translated

TO_HUB = HUB_TO_NATIVE.inverse()
WIDE_TO_HUB = Remap(TO_HUB.rules, {**HUB_TO_NATIVE.values, "width": WIDE["WIDTH"]})
OTHER = Remap([Rename("norm.weight", "norm.scale")]) @ WIDE_TO_HUB


def converted(
    source: str, target: str, options: dict[str, Any], remap: Remap = TO_HUB
) -> holdfast.export.work.Converted:
    return holdfast.convert(source, target, only="model", remap=remap, **options)


def to_a_store(source: str, folder: str) -> None:
    target = StorePlace(Local(Path(folder)), "made")
    for overwrite in (False, True):
        holdfast.convert(source, target, only="model", remap=TO_HUB, overwrite=overwrite)


@pytest.fixture
def cells(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    path, truth = str(tmp_path / "c"), str(tmp_path / "truth.pt")
    pool.run(4, mesh_trials.save, "Native", "FSDP2 x TP x EP 2x2", path, truth, SMALL)
    return path, torch.load(truth, weights_only=True)


def is_right(path: Path, native: dict[str, torch.Tensor]) -> bool:
    made = translated(holdfast.open(path).state_dict("model")["model"])
    return all(torch.equal(made[name], tensor) for name, tensor in native.items())


@pytest.mark.parametrize("to", ["huggingface", "torch", "dcp", "holdfast"])
@pytest.mark.fast_cases("holdfast")
def test_two_ranks_write_the_same_files(to: str, cells: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, native = cells
    converted(path, str(tmp_path / "one"), {"to": to})
    pool.run(2, converted, path, str(tmp_path / "two"), {"to": to})
    pool.run(2, converted, path, str(tmp_path / "two"), {"to": to, "overwrite": True})
    assert is_right(tmp_path / "two", native)
    assert states.files(tmp_path / "one") == states.files(tmp_path / "two")


def test_into_a_store(cells: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    pool.run(2, to_a_store, cells[0], str(tmp_path / "store"))
    assert is_right(tmp_path / "store" / "made", cells[1])


def converted_and_killed(source: str, target: str) -> None:
    """Convert window by window, and be killed in its middle."""
    killed_in_its_middle(target, lambda: converted(source, target, {"to": "huggingface"}, WIDE_TO_HUB))


@pytest.mark.slow
def test_killed_the_same_map_goes_on_and_another_does_not(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    pool.run(1, mesh_trials.save, "Native", "one process", path, str(tmp_path / "truth.pt"), WIDE)
    for name in ("same", "other"):
        (died,) = pool.attempt(1, converted_and_killed, path, str(tmp_path / name))
        pool.close(1)
        assert died.kinds == ["Killed"] and not (tmp_path / name).exists()
    resumed = converted(path, str(tmp_path / "same"), {"to": "huggingface"}, WIDE_TO_HUB)
    fresh = converted(path, str(tmp_path / "fresh"), {"to": "huggingface"}, WIDE_TO_HUB)
    assert resumed.bytes_resumed > 0 and resumed.bytes_read < fresh.bytes_read
    assert states.files(tmp_path / "same") == states.files(tmp_path / "fresh")
    assert not converted(path, str(tmp_path / "other"), {"to": "huggingface"}, OTHER).bytes_resumed
    with sized(WIDE):
        assert is_right(tmp_path / "same", torch.load(tmp_path / "truth.pt", weights_only=True))
