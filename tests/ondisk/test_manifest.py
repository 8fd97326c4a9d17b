"""The manifest: what is encoded comes back, and nothing that was altered, cut, or made up gets past `decode`."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.ondisk import dtypes, manifest
from holdfast.ondisk.box import Box, Grid, whole
from holdfast.ondisk.cells import Cells, TensorRecord, cells_for
from holdfast.ondisk.manifest import FileRecord, Manifest, expand, ranges
from tests.marks import examples
from tests.ondisk.test_box import box_in, counted, cut_points, shapes, tilings

SAVE = "7c1e09ab52d3f410"


def file_rows(count: int) -> list[list[str | int]]:
    return [
        manifest.file_row(FileRecord(f"model/{i:05d}-of-{count:05d}.{SAVE}.safetensors", 8192, 4096, "0" * 32))
        for i in range(count)
    ]


def small(**changes: Any) -> Manifest:
    """A manifest with one of everything."""
    fields: dict[str, Any] = {
        "save": SAVE, "run": "0123456789abcdef", "step": 7, "created": "2026-01-02T03:04:05.678+00:00",
        "producer": {"holdfast": "0.1", "torch": "2.13.0", "python": "3.11.0"}, "world_size": 4,
        "files": [*file_rows(4), ["../step-000000001/model/x.safetensors", 8192, 4096, "0" * 32, "f" * 16]],
        "tensors": {
            "model/whole": TensorRecord("float32", (3, 4), None, "0"),
            "model/rows": TensorRecord("bfloat16", (8, 4), [2, 4], "0-3"),
            "model/cuts": TensorRecord("bool", (9, 2), Cells(cuts=((0, 3, 4, 9), (0, 2))), "0,2,4"),
            "model/boxes": TensorRecord(
                "int8", (2, 2), Cells(boxes=(((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1)))), "1,0,3"
            ),
            "model/none": TensorRecord("float64", (0, 5), None, ""),
            "model/one": TensorRecord("complex64", (), None, "2"),
        },
        "values": {"step": 7, "lr": 1e-3, "é/½": "text\u2028", "x": {"$": "float", "v": "nan"}},
        "containers": {"betas": "tuple", "nothing": "dict"}, "aliases": {"model/tied": "model/whole"},
        "per_rank": {"rng": "0-3"}, "attachments": [("attachments/config.json", 12, "0" * 32)],
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def sealed(body: bytes) -> bytes:
    """A manifest with a good digest, whatever it says: as a program with a fault would write it."""
    return body[:-1] + b',"digest":"' + xxhash.xxh3_128_hexdigest(body[:-1]).encode() + b'"}'


def lying(**changes: Any) -> bytes:
    """Sealed without the check that `encode` makes."""
    return sealed(msgspec.json.encode(small(**changes)))


def test_encode_and_decode() -> None:
    data = manifest.encode(small())
    assert manifest.decode(data, "here") == small()
    assert manifest.encode(manifest.decode(data, "here")) == data
    assert manifest.decode(data + b"\n", "here") == small()
    fields = json.loads(data)
    assert list(fields)[:2] == ["format", "version"] and list(fields)[-1] == "digest"
    assert fields["digest"] == xxhash.xxh3_128_hexdigest(data[: data.rindex(b',"digest"')])
    assert fields["tensors"]["model/cuts"] == ["bool", [9, 2], {"cuts": [[0, 3, 4, 9], [0, 2]]}, "0,2,4"]
    assert fields["tensors"]["model/boxes"][2] == {"boxes": [[[0, 0], [1, 2]], [[1, 0], [1, 1]], [[1, 1], [1, 1]]]}
    assert [len(row) for row in fields["files"]] == [4, 4, 4, 4, 5]


names = st.text('ab/é"\\\n½', max_size=6)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(names, st.one_of(st.none(), st.booleans(), numbers, names)), st.integers(0, 9))
def test_values_come_back(leaves: dict[str, Any], step: int) -> None:
    above = {path[:at] for path in leaves for at in range(len(path)) if path[at] == "/"}
    leaves = {path: value for path, value in leaves.items() if path not in above}  # no leaf lies below another
    made = small(values=leaves, step=step)
    assert manifest.decode(manifest.encode(made), "here") == made


# Cells.


@given(st.lists(st.integers(0, 30)))
def test_ranges_and_back(indices: list[int]) -> None:
    assert expand(ranges(indices)) == tuple(indices)


def test_ranges_are_short() -> None:
    assert ranges([]) == "" and ranges([7]) == "7" and ranges([0, 1, 2, 3]) == "0-3"
    assert ranges([0, 2, 4, 5, 6]) == "0,2,4-6" and ranges([3, 2, 1]) == "3,2,1" and ranges([1, 1]) == "1,1"


@given(st.text("0123456789-, ٣", max_size=8))
def test_text_that_is_no_ranges_is_refused(text: str) -> None:
    try:
        found = expand(text)
    except ValueError:
        return
    parts = [part.partition("-") for part in text.split(",")] if text else []
    assert list(found) == [i for a, _, b in parts for i in range(int(a), int(b or a) + 1)]
    assert " " not in text and text.isascii()


def record_of(shape: tuple[int, ...], pieces: list[Box]) -> tuple[TensorRecord, dict[Box, int]]:
    cells, order = cells_for(shape, pieces)
    assert sorted(order) == list(range(len(pieces)))
    return TensorRecord("int8", shape, cells, ranges(order)), {piece: i for i, piece in enumerate(pieces)}


@given(shapes, st.data())
def test_cells_of_grids(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Grid(data.draw(cut_points(shape)))
    pieces = data.draw(st.permutations(list(grid.boxes())))
    record, file_of = record_of(shape, pieces)
    assert dict(record.boxes()) == file_of, "the n-th file is that of the n-th cell"
    lengths = [[b - a for a, b in zip(c, c[1:])] for c in grid.cuts]
    regular = all(all(n == row[0] for n in row[:-1]) and row[-1] <= row[0] for row in lengths)
    if len(pieces) == 1:
        assert record.cells is None
    elif regular:
        assert record.cells == [row[0] for row in lengths]
    else:
        assert record.cells == Cells(cuts=grid.cuts)


@given(tilings(), st.data())
def test_cells_of_any_tiling(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, pieces = case
    record, file_of = record_of(shape, pieces)
    assert dict(record.boxes()) == file_of
    box = data.draw(box_in(shape, smallest=0))
    met = record.touching(box)
    assert sorted(met) == sorted((p, i) for p, i in file_of.items() if shares_an_element(shape, p, box))
    made = small(tensors={"model/t": record}, files=file_rows(len(pieces)), aliases={}, per_rank={})
    assert manifest.decode(manifest.encode(made), "here").tensors["model/t"] == record


def shares_an_element(shape: tuple[int, ...], a: Box, b: Box) -> bool:
    return bool(np.any(counted(shape, [a, b]) == 2))


@given(shapes)
def test_empty_tensors_have_no_cells(shape: tuple[int, ...]) -> None:
    record = TensorRecord("int8", (*shape, 0), *[cells_for((*shape, 0), [whole((*shape, 0))])[0], ""])
    assert record.boxes() == [] and record.touching(whole((*shape, 0))) == [] and record.nbytes == 0


def test_a_thousand_ranks_cost_no_more_than_one() -> None:
    one, _ = record_of((4096, 64), [whole((4096, 64))])
    many, _ = record_of((4096, 64), [Box((4 * i, 0), (4, 64)) for i in range(1024)])
    assert len(str(many)) < len(str(one)) + 20 and many.files == "0-1023"


# Damage.


def refused(data: bytes) -> Exception:
    with pytest.raises((Damaged, NotACheckpoint, Unsupported)) as caught:
        manifest.decode(data, "/ckpt/manifest.json")
    assert "/ckpt/manifest.json" in str(caught.value) or isinstance(caught.value, Unsupported)
    return caught.value


def test_every_alteration_of_one_byte_is_found() -> None:
    data = manifest.encode(small())
    for at, byte in enumerate(data):
        for other in {byte ^ (1 << bit) for bit in range(8)} | {0, 32, 34, 48, 57, 92, 93, 125, 255} - {byte}:
            refused(data[:at] + bytes([other]) + data[at + 1 :])


def test_every_byte_that_is_missing_or_too_many_is_found() -> None:
    data = manifest.encode(small())
    for at in range(len(data)):
        refused(data[:at])
        refused(data[:at] + data[at + 1 :])
        for extra in b' \n0"}':
            refused(data[:at] + bytes([extra]) + data[at:])
    for extra in (b"x", b"\0", b"{}", data):
        refused(data + extra)


@given(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)))
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize("data", [
    b"", b"[" * 100_000, b'{"format":"holdfast","version":1,"x":' + b"[" * 100_000,
    b'{"format":"\xff","version":1}', b'{"format":"holdfast","version":1}', b'{"format":"holdfast","version":"1"}',
])  # fmt: skip
def test_broken_json_is_damaged(data: bytes) -> None:
    assert isinstance(refused(data), Damaged)


def test_deep_nesting_under_a_good_digest_is_damaged() -> None:
    body = manifest._encoder.encode(small())
    deep = body.replace(b'"step":7,"lr"', b'"step":' + b"[" * 50_000 + b"]" * 50_000 + b',"lr"')
    assert deep != body and isinstance(refused(sealed(deep)), Damaged)


def test_other_programs_files_are_no_checkpoints() -> None:
    for data in (b"{}", b'{"name":"app"}', b'{"format":"pt","version":1}', b'{"manifest_version":2,"icons":{}}'):
        assert isinstance(refused(data), NotACheckpoint)


def test_a_version_from_the_future_names_both() -> None:
    for version in (3, 17):
        error = refused(lying(version=version))
        assert isinstance(error, Unsupported)
        assert f"version {version}" in str(error) and "versions 1 to 2" in str(error)
    newer = sealed(b'{"format":"holdfast","version":3,"tensors":["unlike",7]}')
    assert isinstance(refused(newer), Unsupported)


def test_a_dtype_that_this_torch_lacks_is_unsupported_by_name() -> None:
    error = refused(lying(tensors={"model/whole": TensorRecord("float3_e1m1", (3,), None, "0")}))
    assert isinstance(error, Unsupported) and "model/whole" in str(error) and "float3_e1m1" in str(error)


PATHS = [
    "/etc/passwd", "../x", "..", ".", "", "a/../b", "a//b", "a/./b", "./a", "a/", "a\\b", "..\\a", "a/..", "a\0b",
    "../../x/y",
]  # fmt: skip
BORROWED = [
    "/a/b", "../../x/y", "../x/../y", "..", "../x", "../", "..//x", "a/../../x", "../x/./y", "../x/", "..\\x\\y",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_leave_the_folder(path: str) -> None:
    assert isinstance(refused(lying(files=[*file_rows(4), [path, 8192, 4096, "0" * 32]])), Damaged)
    assert isinstance(refused(lying(attachments=[(path, 1, "0" * 32)])), Damaged)
    assert isinstance(refused(lying(attachments=[("attachments/" + path, 1, "0" * 32)])), Damaged)


@pytest.mark.parametrize("path", BORROWED)
def test_borrowed_paths_that_leave_the_root(path: str) -> None:
    assert isinstance(refused(lying(files=[*file_rows(4), [path, 8192, 4096, "0" * 32, "f" * 16]])), Damaged)


def test_only_a_borrowed_file_may_lie_beside() -> None:
    beside = "../step-000000001/model/x.safetensors"
    assert isinstance(refused(lying(files=[*file_rows(4), [beside, 8192, 4096, "0" * 32]])), Damaged)
    assert isinstance(refused(lying(attachments=[(beside, 1, "0" * 32)])), Damaged)
    assert isinstance(refused(lying(attachments=[("model/x", 1, "0" * 32)])), Damaged)


def test_paths_of_odd_sections_are_fine() -> None:
    for section in ("a:b", "C:", "...", "a b", "日本", "%2F", "~", "-"):
        rows = [*file_rows(4), [f"{section}/x.safetensors", 8192, 4096, "0" * 32]]
        assert manifest.decode(lying(files=rows), "here").data_files[4].path.startswith(section)


def box_cells(*found: tuple[tuple[int, ...], tuple[int, ...]]) -> Cells:
    return Cells(boxes=found)


LYING_TENSORS = {
    "more cells than files": TensorRecord("int8", (8,), [2], "0-2"),
    "more files than cells": TensorRecord("int8", (8,), [2], "0-3,0"),
    "a file that is not there": TensorRecord("int8", (8,), [2], "2-5"),
    "a file far away": TensorRecord("int8", (8,), None, "999999999999"),
    "a long range": TensorRecord("int8", (1 << 60,), [1], f"0-{(1 << 60) - 1}"),
    "no ranges": TensorRecord("int8", (8,), [2], "0-x"),
    "ranges that go down": TensorRecord("int8", (8,), [2], "3-0"),
    "a whole tensor in two files": TensorRecord("int8", (8,), None, "0,1"),
    "a whole tensor in no file": TensorRecord("int8", (8,), None, ""),
    "a negative shape": TensorRecord("int8", (-8,), None, "0"),
    "cells of nothing": TensorRecord("int8", (8,), [0], "0"),
    "cells that go back": TensorRecord("int8", (8,), [-2], "0-3"),
    "cells of another rank": TensorRecord("int8", (8,), [2, 2], "0-3"),
    "an empty tensor in a file": TensorRecord("int8", (0, 8), None, "0"),
    "cuts of another rank": TensorRecord("int8", (8,), Cells(cuts=((0, 8), (0, 1))), "0"),
    "cuts that begin late": TensorRecord("int8", (8,), Cells(cuts=((1, 8),)), "0"),
    "cuts that end early": TensorRecord("int8", (8,), Cells(cuts=((0, 7),)), "0"),
    "cuts out of order": TensorRecord("int8", (8,), Cells(cuts=((0, 5, 3, 8),)), "0-2"),
    "a cut twice": TensorRecord("int8", (8,), Cells(cuts=((0, 3, 3, 8),)), "0-2"),
    "a single cut": TensorRecord("int8", (8,), Cells(cuts=((8,),)), ""),
    "boxes of another rank": TensorRecord("int8", (8,), box_cells(((0, 0), (8, 1))), "0"),
    "a crooked box": TensorRecord("int8", (8,), box_cells(((0,), (8, 1))), "0"),
    "an empty box": TensorRecord("int8", (8,), box_cells(((0,), (8,)), ((8,), (0,))), "0,1"),
    "a box outside": TensorRecord("int8", (8,), box_cells(((0,), (4,)), ((6,), (4,))), "0,1"),
    "a hole": TensorRecord("int8", (8,), box_cells(((0,), (4,)), ((5,), (3,))), "0,1"),
    "an overlap": TensorRecord("int8", (8,), box_cells(((0,), (5,)), ((4,), (4,))), "0,1"),
    "an overlap as large as a hole": TensorRecord("int8", (8,), box_cells(((0,), (5,)), ((4,), (3,))), "0,1"),
    "neither cuts nor boxes": TensorRecord("int8", (8,), Cells(), "0"),
}


@pytest.mark.parametrize("fault", LYING_TENSORS)
def test_lying_cells_are_damaged_by_name(fault: str) -> None:
    error = refused(lying(tensors={"model/t": LYING_TENSORS[fault]}, aliases={}))
    assert isinstance(error, Damaged) and "model/t" in str(error)
    with pytest.raises(ValueError, match="model/t"):
        manifest.encode(small(tensors={"model/t": LYING_TENSORS[fault]}, aliases={}))


LYING: dict[str, dict[str, Any]] = {
    "a file without a digest": {"files": [["a/b", 8192, 4096]]},
    "a file with too much": {"files": [["a/b", 8192, 4096, "0", "1", "2"]]},
    "a file of text": {"files": [["a/b", "8192", 4096, "0"]]},
    "a header longer than its file": {"files": [*file_rows(4), ["a/b", 4096, 8192, "0"]]},
    "a header of nothing": {"files": [*file_rows(4), ["a/b", 4096, 0, "0"]]},
    "a negative file": {"files": [*file_rows(4), ["a/b", -4096, -8192, "0"]]},
    "a file twice": {"files": [*file_rows(4), file_rows(4)[0]]},
    "an alias of nothing": {"aliases": {"model/x": "model/nowhere"}},
    "an alias that is a tensor": {"aliases": {"model/whole": "model/rows"}},
    "an alias of an alias": {"aliases": {"model/a": "model/whole", "model/b": "model/a"}},
    "a container of no kind": {"containers": {"x": "set"}},
    "too few ranks": {"per_rank": {"rng": "0-2"}},
    "too many ranks": {"per_rank": {"rng": "0-4"}},
    "files of ranks that are not there": {"per_rank": {"rng": "2-5"}},
    "an attachment of negative size": {"attachments": [("attachments/x", -1, "0" * 32)]},
}


@pytest.mark.parametrize("fault", LYING)
def test_lying_manifests_are_damaged(fault: str) -> None:
    assert isinstance(refused(lying(**LYING[fault])), Damaged)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=examples(200))
@given(st.sampled_from([f for f in Manifest.__struct_fields__ if f not in ("format", "version")]), json_values)
def test_any_field_may_be_anything(field: str, value: Any) -> None:
    fields = json.loads(manifest._encoder.encode(small()))
    fields[field] = value
    try:
        found = manifest.decode(sealed(json.dumps(fields).encode()), "here")
    except (Damaged, Unsupported):
        return
    for record in found.tensors.values():
        assert sum(box.size for box, _ in record.boxes()) == prod(record.shape)
        assert all(0 <= index < len(found.data_files) for _, index in record.boxes())
        assert dtypes.known(record.dtype)
