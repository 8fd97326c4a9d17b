"""Parts as bytes: what goes in comes out, and nothing else does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Damaged
from holdfast.ondisk import part
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Part

SAVE = "0123456789abcdef"
MANIFEST = Manifest(
    save=SAVE, run="f" * 16, step=7, created="2025-01-01T00:00:00.000+00:00", producer={}, world_size=2,
    files=[], tensors={}, values={"step": 7}, containers={}, aliases={}, per_rank={}, attachments=[],
)  # fmt: skip

names = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
files = st.lists(
    st.tuples(
        names.filter(lambda name: name not in (".", "..")).map("model/{}".format), st.integers(1 << 27, 1 << 60),
        st.integers(8, 100_000_000), st.text(max_size=16),
    )
)  # fmt: skip
parts = st.integers(1, 1 << 20).flatmap(
    lambda ranks: st.builds(
        Part, save=st.just(SAVE), rank=st.integers(0, ranks - 1), world_size=st.just(ranks), files=files,
        manifest=st.sampled_from([None, msgspec.structs.replace(MANIFEST, world_size=ranks)]),
    )
)  # fmt: skip


@given(parts)
def test_a_part_comes_back(one: Part) -> None:
    found = part.decode(part.encode(one), "here")
    assert found == one
    assert found.records == [FileRecord(*file) for file in one.files]


@given(parts, st.data())
def test_a_truncated_or_altered_part_is_refused(one: Part, data: st.DataObject) -> None:
    whole = part.encode(one)
    at = data.draw(st.integers(0, len(whole) - 1))
    altered = bytearray(whole)
    altered[at] ^= data.draw(st.integers(1, 255))
    for wrong in (whole[:at], bytes(altered)):
        with pytest.raises(Damaged, match="the/part"):
            part.decode(wrong, "the/part")


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": [("../../etc/passwd", 100, 50, "")]}, {"files": [("/dev/zero", 1 << 60, 1 << 59, "")]},
        {"files": [("a/../b", 100, 50, "")]}, {"files": [("../step-1/model/x", 100, 50, "")]},
        {"files": [("model/x", 100, 101, "")]}, {"files": [("model/x", 1 << 60, 1 << 59, "")]},
        {"version": 2, "reused": [part.ReusedFile(("../../x/y", 100, 50, "", SAVE), "0")]},
        {"save": "../../../../tmp/x"}, {"rank": 1}, {"rank": -1}, {"world_size": 1 << 50},
        {"manifest": MANIFEST}, {"manifest": msgspec.structs.replace(MANIFEST, world_size=1, save="../x")},
        {"manifest": msgspec.structs.replace(MANIFEST, world_size=1, attachments=[("attachments/../../x", 1, "")])},
    ],
)  # fmt: skip
def test_a_part_that_leads_elsewhere_or_claims_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    one = msgspec.structs.replace(Part(save=SAVE, rank=0, world_size=1, files=[]), **wrong)
    with pytest.raises(Damaged, match="the/part is no part"):
        part.decode(part.encode(one), "the/part")


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        part.decode(data, "here")


def test_another_format_or_version_is_refused() -> None:
    for wrong in ({"format": "other"}, {"version": 2}):
        one = Part(save=SAVE, rank=0, world_size=1, files=[], **wrong)  # type: ignore[arg-type]
        with pytest.raises(Damaged, match="another version"):
            part.decode(part.encode(one), "here")


@given(st.integers(0, 1 << 20))
def test_names_of_parts(rank: int) -> None:
    assert part.save_of(part.file_name(rank, SAVE)) == SAVE


@pytest.mark.parametrize(
    "path",
    ["parts/00000.0123456789abcdef.json.tmp", "parts/0.0123456789abcdef.json", "parts/00000.0123.json",
     "00000.0123456789abcdef.json", "a/parts/00000.0123456789abcdef.json", "parts/.00000.0123456789abcdef.json.5.tmp"],
)  # fmt: skip
def test_names_of_others(path: str) -> None:
    assert part.save_of(path) is None
