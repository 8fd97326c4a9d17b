"""Damage on order: it hits what it says it hits, and verify and load name the same file and tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.testing import Damage, corrupt_block, drop_file, flip_bit, truncate
from tests.marks import examples


def state() -> dict[str, object]:
    return {
        "model": {"a": torch.arange(3_000_000.0), "b": torch.ones(7), "empty": torch.ones(0)},
        "optimizer": {"m": torch.zeros(50, 50)},
        "mine": holdfast.PerRank([1, 2], elsewhere="first"),
        "step": 3,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save(state(), tmp_path / "c", files={"notes.txt": b"notes"})
    return tmp_path / "c"


def refused(path: Path, damage: Damage) -> None:
    with pytest.raises(holdfast.errors.Damaged) as caught:
        holdfast.open(path).verify()
    assert damage.file in str(caught.value)
    if damage.tensor is not None:
        assert damage.tensor.partition("/")[2] in str(caught.value)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 1000))
def test_a_corrupt_block_is_found_where_it_was_said_to_be(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("damage") / "c"
    holdfast.save(state(), path)
    damage = corrupt_block(path, seed=seed)
    assert damage.part == "data" and damage.tensor in holdfast.open(path).tensors
    refused(path, damage)


def test_the_block_that_was_asked_for(saved: Path) -> None:
    damage = corrupt_block(saved, tensor="model/a", block=1)
    assert (damage.tensor, damage.block) == ("model/a", 1)
    refused(saved, damage)
    first = holdfast.open(saved).read("model/a", [slice(0, (8 << 20) // 4)], verify="blocks")
    assert torch.equal(first, torch.arange(3_000_000.0)[: (8 << 20) // 4]), "the first block is whole"
    with pytest.raises(ValueError, match="no block 2"):
        corrupt_block(saved, tensor="model/a", block=2)
    with pytest.raises(ValueError, match="no tensor"):
        corrupt_block(saved, tensor="model/empty")


@pytest.mark.parametrize("file", ["*", "*.safetensors", "manifest.json", "attachments/*"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.fast_cases("0-manifest.json", "2-attachments/*")
def test_a_flipped_bit_is_found(saved: Path, file: str, seed: int) -> None:
    before = {f: f.read_bytes() for f in saved.rglob("*") if f.is_file()}
    damage = flip_bit(saved, file=file, seed=seed)
    changed = [f for f, data in before.items() if f.read_bytes() != data]
    assert changed == [Path(damage.file)]
    old, new = before[changed[0]], changed[0].read_bytes()
    assert [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b] == [damage.offset]
    assert (old[damage.offset] ^ new[damage.offset]).bit_count() == 1
    expected = {"manifest.json": "manifest", "attachments/*": "attachment"}.get(file)
    assert expected in (None, damage.part)
    if damage.part == "manifest":
        with pytest.raises(holdfast.HoldfastError):
            holdfast.open(saved).verify()
    else:
        refused(saved, damage)


def test_a_bit_of_a_header_and_of_a_tensor_are_told_apart(saved: Path) -> None:
    assert flip_bit(saved, file="model/*", offset=20, bit=0).part == "header"
    damage = flip_bit(saved, file="optimizer/*", offset=8192)
    assert damage.part == "data" and damage.tensor == "optimizer/m"


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_and_a_missing_file_are_found(saved: Path, seed: int) -> None:
    refused(saved, truncate(saved, seed=seed))
    refused(saved, drop_file(saved, seed=seed))


def test_what_cannot_be_damaged_is_said(saved: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        drop_file(saved, file="nothing*")
    with pytest.raises(ValueError, match="cannot be cut"):
        truncate(saved, size=1 << 40)
    with pytest.raises(ValueError, match="no byte"):
        flip_bit(saved, offset=1 << 40)
    with pytest.raises(holdfast.errors.NotACheckpoint):
        corrupt_block(saved.parent)
    assert flip_bit(_loose(saved.parent)).part == "other"


def _loose(folder: Path) -> Path:
    (folder / "loose").write_bytes(b"x")
    return folder / "loose"


@pytest.mark.slow
def test_only_the_contracts_need_pytest() -> None:
    script = (
        "import sys; sys.modules['pytest'] = None; import holdfast\n"
        "names = [n for n in holdfast.testing.__all__ if not n.endswith('Contract')]\n"
        "assert all(callable(getattr(holdfast.testing, n)) for n in names if n not in ('SAVING', 'LOADING'))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
