"""Data files: headers that any safetensors reader opens, and a parser that no bytes can surprise."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ondisk import blocks, datafile, dtypes
from holdfast.ondisk.box import Box
from holdfast.ondisk.datafile import Header, Piece, arrange, build_header, parse_header, sums_length
from tests.marks import examples

NAMED = [
    "float64", "int64", "uint64", "float32", "int32", "uint32", "bfloat16", "float16", "int16", "uint16",
    "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool",
]  # fmt: skip
UNNAMED = ["complex128", "complex64", "float8_e4m3fnuz", "float8_e8m0fnu", "uint1"]
HUGE = 3 * blocks.BLOCK + 5

keys = st.text("abw.0é/ ", min_size=1, max_size=6)
suffixes = st.sampled_from(["", "[0:2]", "[0:1,2:4]"])


@st.composite
def piece_lists(draw: st.DrawFn, huge: bool = True) -> list[Piece]:
    found = []
    for name in draw(st.lists(keys, unique=True, max_size=5)):
        dtype = draw(st.sampled_from(NAMED + UNNAMED))
        least = 1 if datafile.stored_as_bytes(dtype) else 0
        lengths = tuple(draw(st.lists(st.integers(0, 4), min_size=least, max_size=3)))
        if huge and draw(st.integers(0, 9)) == 0:
            lengths = (HUGE,)
        nbytes = prod(lengths) * dtypes.itemsize(dtype)
        found.append(Piece(name + draw(suffixes), dtype, lengths, nbytes))
    return arrange(found)


def sums_of(pieces: list[Piece], digit: str = "a") -> str:
    return ",".join(digit * 16 * blocks.count(p.nbytes) for p in pieces)


def header_of(pieces: list[Piece], shapes: dict[str, tuple[int, ...]] | None = None) -> bytes:
    return build_header(pieces, save="0" * 16, rank=3, section="model", shapes=shapes or {}, sums=sums_of(pieces))


def data_bytes(pieces: list[Piece]) -> int:
    return sum(p.nbytes for p in pieces)


@given(piece_lists())
def test_parse_is_the_inverse_of_build(pieces: list[Piece]) -> None:
    header = header_of(pieces, {"w": (5, 7)})
    assert len(header) % 4096 == 0
    found = parse_header(header, len(header) + data_bytes(pieces))
    assert found.nbytes == len(header)
    assert list(found.pieces) == [p.key for p in pieces], "in file order"
    for piece in pieces:
        again = found.pieces[piece.key]
        assert (again.dtype, again.lengths, again.nbytes) == (piece.dtype, piece.lengths, piece.nbytes)
        assert again.begin == len(header) + piece.begin
        assert again.begin % dtypes.itemsize(piece.dtype) == 0, "aligned to its item size"
        assert found.sums[piece.key] == ("a" * 16,) * blocks.count(piece.nbytes)
    assert found.metadata["holdfast"] == "1" and found.metadata["rank"] == "3" and found.metadata["section"] == "model"
    assert json.loads(found.metadata["shapes"]) == {"w": [5, 7]}


@given(piece_lists())
def test_arranged_without_holes_and_wide_types_first(pieces: list[Piece]) -> None:
    end = 0
    for piece in pieces:
        assert piece.begin == end
        end += piece.nbytes
    sizes = [dtypes.itemsize(p.dtype) for p in pieces]
    assert sizes == sorted(sizes, reverse=True)


@given(piece_lists())
def test_room_for_sums_is_known_before(pieces: list[Piece]) -> None:
    assert sums_length(pieces) == len(sums_of(pieces))
    zeros = build_header(pieces, save="0" * 16, rank=3, section="model", shapes={}, sums="0" * sums_length(pieces))
    assert len(zeros) == len(header_of(pieces))


@given(piece_lists(huge=False), st.randoms())
def test_any_safetensors_reader_opens_it(pieces: list[Piece], random: Any) -> None:
    header = header_of(pieces)
    payload = bytes(random.randrange(2) for _ in range(data_bytes(pieces)))
    found = safetensors.torch.load(header + payload)
    assert set(found) == {p.key for p in pieces}
    for piece in pieces:
        stored = found[piece.key]
        assert bytes(stored.contiguous().view(-1).view(torch.uint8).tolist()) == payload[piece.begin :][: piece.nbytes]
        if datafile.stored_as_bytes(piece.dtype):
            assert stored.dtype is torch.uint8
            assert tuple(stored.shape[:-1]) == piece.lengths[:-1]
        else:
            assert (dtypes.name_of(stored.dtype), tuple(stored.shape)) == (piece.dtype, piece.lengths)


def test_a_number_of_a_type_without_a_name_is_one_row_of_bytes() -> None:
    [piece] = arrange([Piece("c", "complex64", (), 8)])
    header = header_of([piece])
    found = parse_header(header, len(header) + 8).pieces["c"]
    assert (found.dtype, found.nbytes) == ("complex64", 8)
    assert safetensors.torch.load(header + bytes(8))["c"].shape == (8,)


def test_names_of_data_files() -> None:
    path = datafile.file_name("model", 3, 4, "7c1e09ab52d3f410")
    assert path == "model/00003-of-00004.7c1e09ab52d3f410.safetensors"
    assert datafile.save_of(path) == "7c1e09ab52d3f410"
    assert datafile.save_of(datafile.file_name("a b", 123456, 1000000, "0" * 16)) == "0" * 16
    for other in ("manifest.json", "model/x.safetensors", path + "~", "a/" + path, path.upper(), path + "\n"):
        assert datafile.save_of(other) is None


@given(keys)
def test_keys_of_pieces(name: str) -> None:
    assert datafile.key_of(name, Box((0, 0), (4, 5)), (4, 5)) == name
    part = datafile.key_of(name, Box((0, 2), (4, 3)), (4, 5))
    assert part == f"{name}[0:4,2:5]" and datafile.base_of(part) == name


# Damage: whatever the bytes are, the parser reads them or raises ValueError, and never lets a piece leave the file.


def read_or_refuse(data: bytes, file_bytes: int) -> Header | None:
    try:
        length = datafile.header_length(data[:8], file_bytes)
        found = parse_header(data[:length], file_bytes)
    except ValueError as error:
        assert str(error)
        return None
    end = found.nbytes
    for piece in found.pieces.values():
        assert piece.begin == end and piece.nbytes == prod(piece.lengths) * dtypes.itemsize(piece.dtype)
        assert all(n >= 0 for n in piece.lengths)
        end += piece.nbytes
        assert len(found.sums.get(piece.key, ())) in (0, blocks.count(piece.nbytes))
    assert end == file_bytes
    return found


@given(piece_lists(huge=False), st.data())
def test_truncated(pieces: list[Piece], data: st.DataObject) -> None:
    file = header_of(pieces) + bytes(data_bytes(pieces))
    kept = data.draw(st.integers(0, len(file) - 1))
    assert read_or_refuse(file[:kept], kept) is None
    assert read_or_refuse(file, len(file) + data.draw(st.integers(1, 9))) is None


@settings(max_examples=examples(300))
@given(piece_lists(huge=False), st.data())
def test_altered_bytes(pieces: list[Piece], data: st.DataObject) -> None:
    file = bytearray(header_of(pieces) + bytes(data_bytes(pieces)))
    used = len(bytes(file).split(b"   ")[0])
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, used - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(file), len(file))


def with_json(text: bytes, payload: int) -> tuple[bytes, int]:
    return struct.pack("<Q", len(text)) + text, len(text) + 8 + payload


numbers = st.one_of(st.integers(-3, 20), st.sampled_from([1 << 31, 1 << 62, 1 << 64, 1 << 70, -(1 << 63)]))
number_lists = st.lists(numbers, max_size=3)
odd_values = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=3), number_lists)
entries = st.one_of(
    odd_values,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "U8", "I8", "C64", "BOOL", ""]), odd_values),
            "shape": st.one_of(st.lists(st.integers(-2, 3), max_size=3), odd_values),
            "data_offsets": st.one_of(st.lists(st.integers(-2, 12), min_size=2, max_size=2), odd_values),
        }
    ),
)
metadata = st.dictionaries(
    st.sampled_from(["sums", "dtypes", "shapes", "holdfast", "x"]),
    st.one_of(
        st.sampled_from(['{"a":"complex64"}', '{"a":"load"}', '{"a":7}', "[]", "{", "null", "7", '{"a":null}']),
        st.sampled_from(["a" * 16, "a" * 16 + ",", ",", ""]), odd_values,
    ),
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from(["a", "b", "a[0:1]"]), entries), metadata, st.integers(0, 24))
def test_lying_headers(pieces: dict[str, Any], meta: dict[str, Any], payload: int) -> None:
    data, size = with_json(json.dumps({"__metadata__": meta, **pieces}).encode(), payload)
    read_or_refuse(data, size)


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"null", b"7", b"\xff", b'{"\xff":1}', b'{"\\ud800":{"dtype":"U8"}}',
    b'{"a":' + b"[" * 100_000, b"[" * 100_000, b'{"__metadata__":' + b'{"a":' * 100_000,
    b'{"__metadata__":{"dtypes":"' + b"[" * 100_000 + b'"}}',
    b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b'{"__metadata__":{"dtypes":"{\\"a\\":\\"complex64\\"}"},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    b'{"__metadata__":{"sums":""},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    b'{"__metadata__":{"sums":"0"}}' + b"x",
    b'{"a":{"shape":[1],"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', b'{"a":{}}',
    b'{"a":{"dtype":"F32","shape":[1]}}', b'{"a":{"dtype":null,"shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":null}}',
    b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"x":"no tensor"}}', b'{"__metadata__":7}',
])  # fmt: skip
def test_broken_headers_are_refused(text: bytes) -> None:
    for payload in (0, 1, 4, 8):
        data, size = with_json(text, payload)
        assert read_or_refuse(data, size) is None


def test_a_length_that_is_not_the_headers_is_refused() -> None:
    good = header_of([])
    assert parse_header(good, len(good)).pieces == {}
    for length in (0, 7, len(good) - 9, len(good) - 7, 1 << 63):
        with pytest.raises(ValueError):
            parse_header(struct.pack("<Q", length) + good[8:], len(good))
    for size in range(8):
        with pytest.raises(ValueError):
            datafile.header_length(good[:size], size)
    assert datafile.header_length(good[:8], len(good)) == len(good)
    with pytest.raises(ValueError):
        datafile.header_length(struct.pack("<Q", datafile.MAX_HEADER), 1 << 40)


@given(piece_lists())
def test_sums_are_put_in_their_place(pieces: list[Piece]) -> None:
    shapes = {'"sums":"': (1,), "a": (2,)}
    zeros = build_header(
        pieces, save="0" * 16, rank=3, section='"sums":"', shapes=shapes, sums="0" * sums_length(pieces)
    )
    sums = sums_of(pieces, "b")
    again = build_header(pieces, save="0" * 16, rank=3, section='"sums":"', shapes=shapes, sums=sums)
    assert datafile.with_sums(zeros, sums) == again


def test_files_of_other_writers_have_no_sums() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.zeros(2, dtype=torch.bool)}
    data = safetensors.torch.save(tensors, {"made": "elsewhere"})
    found = read_or_refuse(data, len(data))
    assert found is not None and set(found.pieces) == {"a", "b"} and found.sums == {}
