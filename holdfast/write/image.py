"""A data file before it is written, its header before any sum is known, and what is known of it once it is durable.

`images` makes them of a plan, `write` brings them to disk. Pure, but for the descriptors that `OpenFiles` closes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property

import torch

from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.datafile import Piece
from holdfast.storage.place import Place


@dataclass(frozen=True)
class Image:
    """A data file before it is written: where it goes, its pieces in file order, and each piece's tensor."""

    path: str
    section: str
    pieces: list[Piece]
    sources: list[torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    volume: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Its tensor bytes."""
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True)
class Written:
    """A durable data file: path relative to the checkpoint, size, its header's size, digest, and SHA-256 if signed."""

    path: str
    bytes: int
    header_bytes: int
    header_digest: str
    header_sha256: str = ""


KEPT = 8
"""Files of a save on one rank that stay open, and so locked, until its outcome is known. A lock on any file tells that
the save lives, so the rest of them are opened as they are needed: there may be more of them than descriptors."""


@dataclass
class OpenFiles:
    """The files of a save, and descriptors of the first of them, kept open until its outcome is known."""

    paths: list[Place] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def header_of(image: Image, save: str, rank: int, *, strong: bool) -> bytes:
    """The header, as long as it will be, before any sum is known."""
    header = datafile.build_header(
        image.pieces, save=save, rank=rank, section=image.section, shapes=image.shapes,
        sums="0" * datafile.sums_length(image.pieces),
        strong="0" * datafile.sums_length(image.pieces, blocks.STRONG) if strong else None,
    )  # fmt: skip
    if len(header) > datafile.MAX_HEADER:
        raise HoldfastError(
            f"{image.path} would have a header of {len(header)} bytes for {len(image.pieces)} pieces, more than the "
            f"{datafile.MAX_HEADER} that readers of safetensors accept: put the tensors under more than one first key "
            "of the state, or under shorter names"
        )
    return header
