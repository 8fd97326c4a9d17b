"""Checkpoints with known places in them, and ways to damage them: for the tests of verify, repair, rescue and scrub.

Never changes a file by another way than a failing disk, or a careless hand, would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.ondisk import datafile
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box

ROWS = BLOCK // 4096
"""Rows of 1024 numbers that are one block."""


def state_of(step: int = 1, blocks: int = 3) -> dict[str, Any]:
    """A weight of some blocks and a half, small tensors, one empty, one tied, one of an odd type, values."""
    made = torch.Generator().manual_seed(step)
    weight = torch.randn(blocks * ROWS + ROWS // 2, 1024, generator=made)
    small = torch.randn(5, 7, generator=made)
    return {
        "model": {"w": weight, "small": small, "tied": small, "none": torch.zeros(0, 4), "n": torch.tensor(step)},
        "frozen": {"w": torch.arange(ROWS * 2048, dtype=torch.float32).view(-1, 1024)},
        "step": step,
        "rng": holdfast.PerRank({"k": [step, 2], "t": torch.arange(4)}),
    }


class Spot(NamedTuple):
    """A block of a data file, and what the manifest says of it."""

    file: Path
    begin: int
    nbytes: int
    tensor: str
    box: Box | None


def spots(opened: Checkpoint) -> Iterator[Spot]:
    """Every block of every tensor, worked out from the headers alone, row by row."""
    owners = {}
    for name, record in opened.manifest.tensors.items():
        for box, index in record.boxes():
            owners[index, datafile.key_of(name.partition("/")[2] or name, box, record.shape)] = name, box
    for index, file in enumerate(opened.manifest.data_files):
        path = opened.path / file.path
        header = datafile.parse_header(path.read_bytes()[: file.header_bytes], file.bytes)
        for key, piece in header.pieces.items():
            for at in range(0, piece.nbytes, BLOCK):
                name, cell = owners.get((index, key), ("", None))
                nbytes = min(BLOCK, piece.nbytes - at)
                yield Spot(path, piece.begin + at, nbytes, name, _rows(cell, piece.nbytes, at, nbytes))


def _rows(cell: Box | None, total: int, at: int, nbytes: int) -> Box | None:
    """Blocks of the tensors here hold whole rows, or whole tensors."""
    if cell is None or nbytes == total:
        return cell
    row = total // cell.lengths[0]
    return Box((cell.offsets[0] + at // row, *cell.offsets[1:]), (nbytes // row, *cell.lengths[1:]))


def flip(path: Path, at: int) -> None:
    """One bit of one byte, in place: hard links and all see it."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def contents_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
