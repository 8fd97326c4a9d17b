"""Peers' checkpoints that are kept packed (tests/golden/peers): unpacked, and compared with their truth."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from tests.formats.truth import GOLDEN, leaves, same


def unpacked(name: str, into: Path) -> Path:
    """The folder of a packed checkpoint."""
    with zipfile.ZipFile(GOLDEN / "peers" / f"{name}.zip") as archive:
        archive.extractall(into)
    return into / "ckpt"


def check(state: dict[str, Any], ckpt: Path) -> None:
    """Every tensor of the truth is in the state, under its name, to the last bit; and no other is in its items."""
    truth = torch.load(ckpt.parent / "truth.pt")
    held = {at.replace("/", "."): value for at, value in leaves(state) if isinstance(value, torch.Tensor)}
    assert [name for name, tensor in truth.items() if name not in held or not same(held[name], tensor)] == []
    items = {name.partition(".")[0] for name in truth}
    assert [name for name in held if name.partition(".")[0] in items and name not in truth] == []
