"""`verify` of a foreign checkpoint: it reads every byte, and says what it could not check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast


def test_a_flipped_bit_in_a_torch_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {"a": torch.arange(100.0), "b": torch.ones(50)}}, path)
    stats = holdfast.open(path).verify()
    assert stats.unverified == 0 and stats.nbytes == 600
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(100.0).numpy().tobytes())
    data[at + 17] ^= 4
    path.write_bytes(data)
    with pytest.raises(holdfast.errors.Damaged, match=r"model/a.*CRC-32"):
        holdfast.open(path).verify()


def test_what_has_no_sums_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {"a": torch.arange(100.0)}}, path, _use_new_zipfile_serialization=False)
    assert holdfast.open(path).verify().unverified == 400


def test_a_file_cut_short_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {"a": torch.arange(1000.0)}}, path, _use_new_zipfile_serialization=False)
    checkpoint = holdfast.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(holdfast.errors.Damaged, match="model/a"):
        checkpoint.verify()
