"""Safetensors files as names, unread tensors and the texts of their headers; and tensors that several files share.

Every header is checked against its file. Tensors are read only where two files hold one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.sources import Stretch, all_of, file
from holdfast.formats.stored import Stored, joined, plain
from holdfast.ondisk import dtypes
from holdfast.ondisk.datafile import MAX_HEADER
from holdfast.storage.place import Place

# torch's name of each type and its bits. Types of less than a byte are packed; torch has a name for pairs of 4 bits,
# and none for 6 (such tensors are left out with a warning).
_TYPES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip


class Contents(NamedTuple):
    """What a file holds: tensors in the order of their bytes, and the texts of ``__metadata__``."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_texts = msgspec.json.Decoder(dict[str, str] | None).decode


def is_safetensors(data: Stretch) -> bool:
    """Whether this begins as a safetensors file does: a length that fits, and an object of JSON."""
    if data.nbytes < 10:
        return False
    head = data.read(0, 9)
    return int.from_bytes(head[:8], "little") <= min(data.nbytes - 8, MAX_HEADER) and head[8:] == b"{"


def load_path(path: Place) -> Contents:
    """What the file at ``path`` holds."""
    return load_file(all_of(file(path)))


def load_file(data: Stretch) -> Contents:
    """What a safetensors file holds.

    Raises Damaged if the header is none or does not describe every byte of the file exactly once, Unsupported for a
    type that no known version of the format has.
    """
    where = data.source.path
    refuse_pointer(data)
    if data.nbytes < 8:
        raise _damaged(where, f"it has {data.nbytes} bytes, no header fits in them")
    length = int.from_bytes(data.read(0, 8), "little")
    if length > min(data.nbytes - 8, MAX_HEADER):
        raise _damaged(where, f"its header claims {length} bytes, the file has {data.nbytes}")
    begin = 8 + length
    with damaged_as(f"{where}: its header is not valid: it is truncated, was altered, or is no safetensors file"):
        raw = _decode_header(data.read(8, length))
        metadata = _decode_texts(raw.pop("__metadata__", msgspec.Raw(b"null"))) or {}
        entries = {name: _decode_entry(entry) for name, entry in raw.items()}
    tensors: dict[str, Stored] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start:
            raise _damaged(where, f"{name!r} has bytes {start}:{stop}, but those before it end at {end}")
        if begin + stop > data.nbytes:
            raise _damaged(where, f"{name!r} has bytes {start}:{stop}, but the file holds {data.nbytes - begin}")
        tensors[name] = _tensor(where, name, entry, data.part(begin + start, stop - start))
        end = stop
    if begin + end != data.nbytes:
        raise _damaged(where, f"its header describes {begin + end} bytes, the file has {data.nbytes}")
    return Contents(tensors, metadata)


def refuse_pointer(data: Stretch) -> None:
    """Raise Damaged if this is not a file, but the line that Git LFS leaves in its place."""
    if data.read(0, min(24, data.nbytes)) == b"version https://git-lfs.":
        where = data.source.path
        raise Damaged(f"{where} is only the pointer of Git LFS to a file; fetch the file itself: git lfs pull")


def _tensor(where: Place, name: str, entry: _Entry, stretch: Stretch) -> Stored:
    if entry.dtype not in _TYPES:
        raise Unsupported(f"{where}: {name!r} is of type {entry.dtype[:40]!r}, which is not known; update holdfast")
    dtype, bits = _TYPES[entry.dtype]
    shape = entry.shape
    if any(n < 0 for n in shape) or prod(shape) * bits != stretch.nbytes * 8:
        raise _damaged(where, f"{name!r} has {stretch.nbytes} bytes, which is not {entry.dtype} of shape {list(shape)}")
    if bits == 4:
        if not shape or shape[-1] % 2:
            raise _damaged(where, f"{name!r} has rows of {list(shape)[-1:]} packed numbers: half a byte")
        shape = (*shape[:-1], shape[-1] // 2)
    return plain(dtype, shape, stretch) if dtypes.known(dtype) else Stored(dtype, shape, ())


def _damaged(where: Place, what: str) -> Damaged:
    error = Damaged(f"{where}: {what}: it is truncated, was altered, or is no safetensors file; fetch it again")
    error.file = str(where)
    return error


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
