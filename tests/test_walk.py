"""The files that a tensor passes on its way to disk and back."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast
from tests.walk import walk


def test_a_tensor_is_followed_through_a_save_and_a_load(tmp_path: Path) -> None:
    tensor = torch.randn(1000)
    saved = walk(lambda: holdfast.save({"w": tensor}, tmp_path / "c"), tensor)
    assert {"save.py", "state/tensors.py", "storage/local/disk.py"} <= set(saved.files)
    target = tensor.clone()
    loaded = walk(lambda: holdfast.load(tmp_path / "c", {"w": target}), target)
    assert loaded.files[0] == "load.py" and {"read/read.py", "storage/local/disk.py"} <= set(loaded.files)
