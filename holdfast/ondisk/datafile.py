"""A data file: one rank's pieces of one section as one valid safetensors file.

The plan arranges pieces here and the reader parses headers here. Never touches a file: headers come and go as bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import msgspec

from holdfast.ondisk import blocks, dtypes
from holdfast.ondisk.box import Box, covers

ALIGN = 4096
VERSION = "1"
_NAME = re.compile(r"[^/]+/\d{5,}-of-\d{5,}(\.[1-9]\d*)?\.(?P<save>[0-9a-f]{16})\.safetensors")
MAX_HEADER = 100_000_000
"""safetensors readers refuse a longer header."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One box of one tensor in one data file.

    ``key`` as in the header; ``lengths`` in elements; ``begin`` in bytes from the start of the tensor bytes.
    """

    key: str
    dtype: str
    lengths: tuple[int, ...]
    nbytes: int
    begin: int = 0


@dataclass(frozen=True)
class Header:
    """A parsed header. ``pieces`` in file order, ``begin`` of each counted from the start of the file."""

    nbytes: int
    pieces: Mapping[str, Piece]
    sums: Mapping[str, Sequence[str]]
    metadata: Mapping[str, str] = field(default_factory=dict)


def file_name(section: str, rank: int, world_size: int, save: str, volume: int = 0) -> str:
    """``model/00000-of-00004.7c1e09ab52d3f410.safetensors``: relative to the checkpoint.

    The volumes after the first have their number before the save id: ``model/00000-of-00004.1.7c1e….safetensors``.
    """
    return f"{section}/{rank:05d}-of-{world_size:05d}{f'.{volume}' if volume else ''}.{save}.safetensors"


def save_of(path: str) -> str | None:
    """The save id in a data file's relative path, or None if this is no data file of ours."""
    match = _NAME.fullmatch(path)
    return match["save"] if match else None


def key_of(name_in_section: str, box: Box, shape: Sequence[int]) -> str:
    """How a piece is called in its file: the bare name if it is the whole tensor, else with its box."""
    return name_in_section if covers(box, shape) else f"{name_in_section}{box}"


def base_of(key: str) -> str:
    """The tensor's name in a piece's key. ``[`` is escaped in names, so the first one opens the box."""
    return key.partition("[")[0]


def arrange(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in file order with their ``begin``: wider types first, so each is aligned to its item size, no holes."""
    ordered = sorted(pieces, key=lambda p: dtypes.itemsize(p.dtype), reverse=True)  # stable all the same
    begin, placed = 0, []
    for piece in ordered:
        placed.append(Piece(piece.key, piece.dtype, piece.lengths, piece.nbytes, begin))
        begin += piece.nbytes
    return placed


def sums_length(pieces: Sequence[Piece], digits: int = 16) -> int:
    """How long the ``sums`` text will be, of sums of so many digits; known before the data is."""
    return digits * sum(blocks.count(p.nbytes) for p in pieces) + max(len(pieces) - 1, 0)


def build_header(
    pieces: Sequence[Piece], *, save: str, rank: int, section: str, shapes: Mapping[str, Sequence[int]], sums: str,
    strong: str | None = None,
) -> bytes:  # fmt: skip
    """The first bytes of a data file: length, JSON, spaces up to a multiple of 4096.

    ``pieces`` as arranged; ``shapes`` holds the global shape of each tensor held in part. The length depends on
    ``sums`` only through its length, so a header of zeros shows where the tensors begin. ``strong``: the SHA-256 of the
    same blocks, if a signature is to cover them.
    """
    codes = {dtype: dtypes.code_of(dtype) for dtype in {p.dtype for p in pieces}}
    odd = {base_of(p.key): p.dtype for p in pieces if codes[p.dtype] is None} if None in codes.values() else {}
    header: dict[str, dict[str, str] | _Entry] = {
        "__metadata__": {
            "holdfast": VERSION,
            "save": save,
            "rank": str(rank),
            "section": section,
            "shapes": json.dumps(shapes, separators=(",", ":"), ensure_ascii=False),
            "dtypes": json.dumps(odd, separators=(",", ":"), ensure_ascii=False),
            "sums": sums,
            **({} if strong is None else {"sha256": strong}),
        }
    }
    for p in pieces:
        code = codes[p.dtype]
        offsets = (p.begin, p.begin + p.nbytes)
        header[p.key] = _Entry("U8", _row_of_bytes(p), offsets) if code is None else _Entry(code, p.lengths, offsets)
    text = msgspec.json.encode(header)
    length = -(-(len(text) + 8) // ALIGN) * ALIGN - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def with_sums(header: bytes, sums: str, strong: str | None = None) -> bytes:
    """A header built with other sums of the same length, with these in their place."""
    for mark, text in ((_SUMS, sums), (_STRONG, strong)):
        if text is not None:
            start = header.index(mark) + len(mark)  # within a JSON text quotes would be escaped: the first one is ours
            header = header[:start] + text.encode() + header[start + len(text) :]
    return header


def stored_as_bytes(dtype: str) -> bool:
    """Whether safetensors cannot name the type, so that its pieces are ``U8``."""
    return dtypes.code_of(dtype) is None


def _row_of_bytes(piece: Piece) -> tuple[int, ...]:
    """The shape of a piece of a type that is kept as bytes."""
    size = dtypes.itemsize(piece.dtype)
    return (*piece.lengths[:-1], piece.lengths[-1] * size) if piece.lengths else (size,)


class _Entry(msgspec.Struct, gc=False):
    """A tensor of the header. What a header leaves out is None, and refused: only ``__metadata__`` lacks them all."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Meta(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_SUMS, _STRONG = b'"sums":"', b'"sha256":"'
_decode_entries = msgspec.json.Decoder(dict[str, _Entry]).decode
_decode_meta = msgspec.json.Decoder(_Meta).decode
_decode_strings = msgspec.json.Decoder(dict[str, str]).decode


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata of a header, even if the rest of it is damaged. Raises ValueError if it cannot be read."""
    try:
        return _decode_meta(memoryview(data)[8:]).metadata
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def is_named(path: str, metadata: Mapping[str, str]) -> bool:
    """Whether a file's relative path names the rank and the section that its header says."""
    section, _, name = path.rpartition("/")
    rank = metadata.get("rank", "")
    start = f"{int(rank):05d}-" if rank.isdecimal() and len(rank) < 10 else ""
    return section == metadata.get("section", section) and name.startswith(start)


def header_length(first: bytes, file_bytes: int) -> int:
    """Bytes of the whole header, from the first 8 bytes. Raises ValueError if that cannot be."""
    if len(first) < 8:
        raise ValueError(f"only {len(first)} bytes long, a header needs more")
    length = int.from_bytes(first[:8], "little") + 8
    if length > min(file_bytes, MAX_HEADER):
        raise ValueError(f"its header claims {length} bytes, the file has {file_bytes}")
    return length


def parse_header(data: bytes, file_bytes: int) -> Header:
    """Read a header (all of it, length included). Raises ValueError, saying what is wrong.

    ``file_bytes`` is the size of the file: every piece must lie within it, without overlap.
    """
    nbytes = len(data)
    if header_length(data, file_bytes) != nbytes:
        raise ValueError(f"its header claims another length than {nbytes} bytes")
    text = memoryview(data)[8:]
    try:
        meta = _decode_meta(text).metadata
        entries = _decode_entries(text)
        odd = _decode_strings(meta.get("dtypes", "{}"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"its header is not valid: {error}") from None
    entries.pop("__metadata__", None)
    pieces: dict[str, Piece] = {}
    end = 0
    for key, entry in _in_file_order(entries):
        begin, stop = entry.data_offsets  # type: ignore[misc]
        dtype, lengths, size = _logical(entry.dtype, entry.shape, odd.get(base_of(key)) if odd else None)
        if begin != end or stop - begin != size:
            raise ValueError(f"piece {key!r} has offsets {begin}:{stop} that do not fit its shape or its neighbour")
        end = stop
        pieces[key] = Piece(key, dtype, lengths, size, nbytes + begin)
    if nbytes + end != file_bytes:
        raise ValueError(f"its header describes {nbytes + end} bytes, the file has {file_bytes}")
    return Header(nbytes, pieces, _parse_sums(meta.get("sums"), pieces), meta)


def _in_file_order(entries: dict[str, _Entry]) -> Sequence[tuple[str, _Entry]]:
    for key, entry in entries.items():
        if entry.data_offsets is None:
            raise ValueError(f"piece {key!r} has no offsets")
    return sorted(entries.items(), key=lambda item: item[1].data_offsets)  # type: ignore[arg-type, return-value]


@lru_cache(maxsize=4096)
def _logical(code: str | None, shape: tuple[int, ...] | None, odd: str | None) -> tuple[str, tuple[int, ...], int]:
    """The dtype, shape and bytes of an entry; ``odd`` is its dtype if safetensors cannot name that."""
    # Thousands of pieces share a handful of types and shapes, each proved once.
    if shape is None or any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} is negative, or missing")
    if odd is not None:
        if code != "U8" or not dtypes.known(odd):
            raise ValueError(f"dtype {odd!r} is not known to this torch")
        size = dtypes.itemsize(odd)
        # The shape of a 0-dimensional tensor is [itemsize]: one axis more than its box has. The plan knows which.
        if not shape or shape[-1] % size:
            raise ValueError(f"shape {shape} holds no whole number of {odd}")
        return odd, (*shape[:-1], shape[-1] // size), prod(shape)
    name = None if code is None else dtypes.name_of_code(code)
    if name is None:
        raise ValueError(f"dtype {code!r} is not known")
    return name, shape, prod(shape) * dtypes.itemsize(name)


def strong_sums(text: str, header: Header) -> dict[str, tuple[str, ...]]:
    """The SHA-256 of every block, from a text like ``sums``. Raises ValueError if it is not one for each."""
    return _parse_sums(text, header.pieces, blocks.STRONG)


def _parse_sums(text: str | None, pieces: Mapping[str, Piece], digits: int = 16) -> dict[str, tuple[str, ...]]:
    if text is None:
        return {}
    parts = text.split(",") if pieces else []
    if len(parts) != len(pieces):
        raise ValueError(f"it has sums for {len(parts)} pieces and holds {len(pieces)}")
    sums: dict[str, tuple[str, ...]] = {}
    for part, (key, piece) in zip(parts, pieces.items(), strict=True):
        if len(part) == digits and 0 < piece.nbytes <= blocks.BLOCK:
            sums[key] = (part,)
        elif len(part) != digits * blocks.count(piece.nbytes):
            raise ValueError(f"piece {key!r} has the wrong number of sums")
        else:
            sums[key] = tuple(part[i : i + digits] for i in range(0, len(part), digits))
    return sums
