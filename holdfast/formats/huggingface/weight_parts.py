"""Tensors that several files of weights hold together: in parts that ranks of DCP wrote, or one of them twice.

`huggingface` calls `united`. Never reads a tensor, except to compare those that two files hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.huggingface.safetensors_files import Contents
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.stored import Stored, joined
from holdfast.storage.place import Place

SPAN = 8 << 20
OFFSETS, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
"""Keys of DCP in the header of a file: where each of its tensors begins in the whole, and a version."""

Part = tuple[Place, Contents]
"""A file of weights and what it holds."""


class _Saved(msgspec.Struct):
    saved_offsets: tuple[int, ...]


class _Piece(NamedTuple):
    """A tensor, or a part of one that begins at ``offsets``, and the file that holds it."""

    tensor: Any
    offsets: tuple[int, ...] | None
    path: Place


def united(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, str]]:
    """All tensors of the files, those in parts put together, and the versions that the files name.

    Raises Damaged where two files hold different things under one name, Unsupported for a version from the future.
    """
    pieces: dict[str, list[_Piece]] = {}
    producer: dict[str, str] = {}
    for path, contents in parts:
        offsets = _offsets(path, contents)
        if offsets:
            producer["torch.distributed.checkpoint (safetensors)"] = contents.metadata.get(VERSION, "")
        for name, tensor in contents.tensors.items():
            pieces.setdefault(name, []).append(_Piece(tensor, offsets.get(name), path))
    return {name: _whole(name, held) for name, held in pieces.items()}, producer


def _offsets(path: Place, contents: Contents) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file that DCP wrote begins in the whole."""
    text = contents.metadata.get(OFFSETS)
    if text is None:
        return {}
    version = contents.metadata.get(VERSION, "1")
    if version.partition(".")[0] != "1":
        raise Unsupported(f"{path} is of version {version[:20]} of DCP's safetensors files; version 1 is read")
    with damaged_as(f"{path}: its {OFFSETS} is not valid"):
        saved = msgspec.json.decode(text, type=dict[str, _Saved])
    offsets = {}
    for name, tensor in contents.tensors.items():
        at = saved[name].saved_offsets if name in saved else None
        if at is None or len(at) != len(tensor.shape) or any(o < 0 for o in at):
            raise Damaged(f"{path}: its {OFFSETS} does not say where {name!r} of shape {list(tensor.shape)} belongs")
        offsets[name] = at
    return offsets


def _whole(name: str, pieces: Sequence[_Piece]) -> Any:
    """The tensor that the files hold in parts, or more than once."""
    first = pieces[0]
    if len(pieces) == 1 and not any(first.offsets or ()):
        return first.tensor
    placed: dict[tuple[tuple[int, ...], tuple[int, ...]], _Piece] = {}
    for piece in pieces:
        if kind_of(piece.tensor) is None or kind_of(piece.tensor) != kind_of(first.tensor):
            raise _mixed(name, first, piece)
        at = piece.offsets or (0,) * len(piece.tensor.shape)
        other = placed.setdefault((at, piece.tensor.shape), piece)
        if not _equal(other.tensor, piece.tensor):
            raise _mixed(name, other, piece)
        if piece.offsets is None and len(placed) > 1:  # of other shapes
            raise _mixed(name, first, piece)
    filled = [spot for spot, piece in placed.items() if 0 not in piece.tensor.shape] or list(placed)
    shape = [max(at[d] + lengths[d] for at, lengths in filled) for d in range(len(first.tensor.shape))]
    return joined(first.tensor.dtype, shape, [(at, piece.tensor) for (at, _), piece in placed.items()])


def kind_of(tensor: Any) -> tuple[str, int] | None:
    """Type and number of axes of a tensor, which all parts of it have; None for anything else."""
    return (tensor.dtype, len(tensor.shape)) if isinstance(tensor, Stored) else None


def _equal(one: Stored, other: Stored) -> bool:
    for (_, a), (_, b) in () if one is other else zip(one.pieces, other.pieces, strict=True):
        for begin in range(0, a.nbytes, SPAN):
            nbytes = min(SPAN, a.nbytes - begin)
            if a.read(begin, nbytes) != b.read(begin, nbytes):
                return False
    return True


def _mixed(name: str, one: _Piece, other: _Piece) -> Damaged:
    return Damaged(
        f"{one.path} and {other.path} both hold {name!r}, and not the same: files of two saves are mixed, or an index "
        "is missing that says which counts"
    )
