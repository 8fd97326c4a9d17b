"""Zip archives read as byte ranges: what zipfile and torch write, and what nobody should believe."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine import zips
from holdfast.formats.machine.zips import Archive, is_zip
from holdfast.formats.sources import Memory, Stretch, all_of, file
from holdfast.storage.local.local_place import LocalPlace
from tests.marks import examples

WHERE = LocalPlace("some/archive.zip")


def stretch(data: bytes) -> Stretch:
    return all_of(Memory(WHERE, data))


def written(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, **options: Any) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method, **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target.getvalue()


def contents(archive: Archive) -> dict[str, bytes]:
    return {name: archive.member(name).read() for name in archive.names}


MEMBERS = {"a/data.pkl": b"x" * 100, "a/data/0": bytes(range(256)) * 40, "a/empty": b"", "é": b"1"}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_zipfile_writes(method: int) -> None:
    archive = Archive(stretch(written(MEMBERS, method)))
    assert contents(archive) == MEMBERS
    assert all(archive.nbytes(name) == len(data) for name, data in MEMBERS.items())
    assert "a/empty" in archive and "b" not in archive
    for name, data in MEMBERS.items():
        member = archive.member(name).member
        assert (member is None) == (not data)
        if member is not None:
            assert (member.nbytes, member.crc32) == (len(data), zlib.crc32(data))


@settings(max_examples=examples(60))
@given(
    st.dictionaries(st.text(min_size=1, max_size=20).filter(lambda n: "\0" not in n and n.isprintable()),
                    st.binary(max_size=3000), max_size=8),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), st.binary(max_size=700), st.booleans(),
)  # fmt: skip
def test_any_members_and_any_comment(members: dict[str, bytes], method: int, comment: bytes, streamed: bool) -> None:
    target = io.BytesIO()
    # Into something that cannot seek, sizes and sums follow the data in descriptors.
    sink = _NoSeek(target) if streamed else target
    with zipfile.ZipFile(sink, "w", method) as archive:  # type: ignore[arg-type]
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = comment
    if members:
        assert contents(Archive(stretch(target.getvalue()))) == members


class _NoSeek(io.RawIOBase):
    def __init__(self, target: io.BytesIO) -> None:
        self.target = target

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.target.write(data)


def test_a_comment_that_looks_like_a_directory() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a", b"1")
        archive.comment = b"PK\x05\x06" + bytes(18) + b"more"
    assert contents(Archive(stretch(target.getvalue()))) == {"a": b"1"}


@pytest.mark.slow
def test_many_members() -> None:
    members = {f"m/{n}": str(n).encode() for n in range(70_000)}  # more than 16 bits count
    archive = Archive(stretch(written(members)))
    assert len(archive.names) == 70_000
    assert [archive.member(f"m/{n}").read() for n in (0, 7, 69_999)] == [b"0", b"7", b"69999"]


def test_sizes_and_offsets_of_64_bits(tmp_path: Path) -> None:
    path, size = tmp_path / "large.zip", 5 << 30
    wide = struct.pack("<HHQQ", 1, 16, size, size)
    first = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 1, 20) + b"a" + wide
    second_at = len(first) + size
    sizes = struct.pack("<HHHHIIIHH", 0, 0, 0, 0, zlib.crc32(b"123"), 3, 3, 1, 0)
    at = second_at + 34
    directory = (
        b"PK\x01\x02" + struct.pack("<HHHHHHI", 45, 45, 0, 0, 0, 0, 0) + b"\xff" * 8
        + struct.pack("<HHHHHII", 1, 20, 0, 0, 0, 0, 0)
        + b"a" + wide
        + b"PK\x01\x02" + struct.pack("<HH", 45, 45) + sizes[:-2] + struct.pack("<HHHHII", 12, 0, 0, 0, 0, 0xFFFFFFFF)
        + b"b" + struct.pack("<HHQ", 1, 8, second_at)
    )  # fmt: skip
    with path.open("wb") as target:
        target.write(first)
        target.seek(second_at)  # the first member is a hole
        target.write(b"PK\x03\x04" + struct.pack("<H", 45) + sizes + b"b123" + directory)
        end = at + len(directory)
        target.write(b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 2, 2, len(directory), at))
        target.write(b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1))
        target.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0))
    with zipfile.ZipFile(path) as theirs:
        assert theirs.read("b") == b"123" and theirs.getinfo("a").file_size == size
    archive = Archive(all_of(file(path)))
    assert archive.member("b").read() == b"123"
    member = archive.member("a")
    assert (member.begin, member.nbytes) == (len(first), size)


def _with_wide_numbers(data: bytes) -> bytes:
    """The archive ``data`` of one stored member with its sizes and places in zip64 fields throughout."""
    at = struct.unpack("<I", data[-6:-2])[0]
    entry = data[at : len(data) - 22]
    size, n = struct.unpack("<I", entry[24:28])[0], struct.unpack("<H", entry[28:30])[0]
    extra = struct.pack("<HHHH", 7, 4, 0, 0) + struct.pack("<HHQQQ", 1, 24, size, size, 0)
    wide = entry[:20] + b"\xff" * 8 + entry[28:30] + struct.pack("<H", len(extra)) + entry[32:42] + b"\xff" * 4
    wide += entry[46 : 46 + n] + extra
    end = at + len(wide)
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, len(wide), at)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
    return (
        data[:at]
        + wide
        + record
        + locator
        + b"PK\x05\x06"
        + struct.pack("<HHHHIIH", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    )


def test_wide_numbers_throughout() -> None:
    data = _with_wide_numbers(written({"a": b"hello"}))
    with zipfile.ZipFile(io.BytesIO(data)) as theirs:
        assert theirs.read("a") == b"hello"
    assert contents(Archive(stretch(data))) == {"a": b"hello"}
    for cut in (data.replace(b"\x01\x00\x18\x00", b"\x09\x00\x18\x00"), data.replace(b"PK\x06\x06", b"PK\x06\x08")):
        with pytest.raises(Damaged):
            contents(Archive(stretch(cut)))


def test_an_archive_inside_of_something_else() -> None:
    inner = written(MEMBERS)
    outer = Memory(WHERE, b"before" + inner + b"after")
    archive = Archive(Stretch(outer, 6, len(inner)))
    assert contents(archive) == MEMBERS
    member = archive.member("a/data/0")
    assert member.source is outer and member.member is not None and member.member.begin == member.begin


def test_opening_reads_the_directory_and_a_member_its_header() -> None:
    source = Counting(WHERE, written({"a": bytes(100_000), "b": bytes(100_000)}))
    archive = Archive(all_of(source))
    member = archive.member("b")
    assert sum(source.reads) < 1000 and archive.nbytes("a") == member.nbytes == 100_000


@dataclass(frozen=True, eq=False)
class Counting(Memory):
    """Memory that notes how much is read of it."""

    reads: list[int] = field(default_factory=list)

    def read(self, begin: int, nbytes: int) -> bytes:
        self.reads.append(nbytes)
        return Memory.read(self, begin, nbytes)


@pytest.mark.parametrize("sums", [True, False])
def test_what_torch_writes(sums: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save({"a": torch.arange(1000.0), "b": torch.zeros(0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    data = (tmp_path / "x.pt").read_bytes()
    archive = Archive(stretch(data))
    assert archive.member("x/data/0").read() == torch.arange(1000.0).numpy().tobytes()
    assert (archive.member("x/data/0").member is not None) == sums
    assert archive.member("x/data/1").nbytes == 0


def test_what_is_no_archive() -> None:
    assert not is_zip(stretch(b"")) and not is_zip(stretch(b"PK\x03\x04")) and not is_zip(stretch(bytes(100)))
    assert is_zip(stretch(written({}))) and is_zip(stretch(written(MEMBERS)))
    assert not is_zip(stretch(b"#!/bin/sh\n" + written(MEMBERS)))


# Archives that lie


def refused(data: bytes, match: str, kind: type[Exception] = Damaged) -> None:
    with pytest.raises(kind, match=match) as caught:
        contents(Archive(stretch(data)))
    assert str(WHERE) in str(caught.value)


def test_bytes_before_an_archive_that_begins_like_one() -> None:
    refused(written({"x": b"1"}) + written(MEMBERS), "does not lie where it says")


def test_truncated_anywhere() -> None:
    data = written(MEMBERS)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            Archive(stretch(data[:length]))


def _entry(data: bytes, field: int, value: bytes, which: int = 0) -> bytes:
    """The archive with a field of its n-th directory entry replaced."""
    at = -1
    for _ in range(which + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    return data[: at + field] + value + data[at + field + len(value) :]


def test_members_that_share_bytes() -> None:
    data = written({"a": b"1" * 50, "b": b"2" * 50})
    second = struct.unpack("<I", data[data.rindex(b"PK\x01\x02") + 42 :][:4])[0]
    refused(_entry(data, 42, struct.pack("<I", 0), which=1), "shares bytes")
    refused(_entry(data, 42, struct.pack("<I", second)), "shares bytes")
    refused(_entry(data, 20, struct.pack("<II", 80, 80)), "shares bytes")
    refused(_entry(data, 20, struct.pack("<II", 80, 80), which=1), "shares bytes")
    # Within the room that the directory leaves, but not within what the local header leaves.
    local = bytearray(data)
    local[28:30] = struct.pack("<H", 40)
    refused(bytes(local), "reaches into the next")


def test_a_bomb_of_quoted_members() -> None:
    # Every member's data hold all later members, local headers and all: 1000 members unpack to 1000 times the file.
    kernel = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = kernel.compress(bytes(1_000_000)) + kernel.flush()
    body, directory = b"", b""
    for n in range(200):
        name = f"{n:04}".encode()
        header = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, 0, len(packed), 1_000_000, 4, 0)
        body += b"PK\x03\x04" + header + name
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + header + struct.pack("<HHHII", 0, 0, 0, 0, 34 * n) + name
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 200, 200, len(directory), len(body) + len(packed), 0)
    refused(body + packed + directory + end, "shares bytes")


def test_sizes_that_lie() -> None:
    stored, deflated = written({"a": bytes(100)}), written({"a": bytes(100_000)}, zipfile.ZIP_DEFLATED)
    refused(_entry(stored, 24, struct.pack("<I", 99)), "claims to unpack")
    refused(_entry(stored, 20, struct.pack("<II", 1 << 31, 1 << 31)), "shares bytes")
    refused(_entry(deflated, 24, struct.pack("<I", 1 << 31)), "claims to unpack")
    refused(_entry(deflated, 24, struct.pack("<I", 99_999)), "more than its 99999 bytes")
    refused(_entry(deflated, 24, struct.pack("<I", 100_001)), "other bytes")
    refused(_entry(deflated, 16, struct.pack("<I", 1)), "other bytes")
    refused(_entry(deflated, 20, struct.pack("<I", 90)), "cannot be unpacked|other bytes|claims")


def test_headers_that_contradict_each_other() -> None:
    data = written({"a": b"12345"})
    refused(b"PK\x03\x05" + data[4:], "does not begin")
    refused(data.replace(b"a12345", b"b12345", 1), "does not begin")
    refused(data[:8] + b"\x08\x00" + data[10:], "two headers")
    refused(data[:6] + b"\x01\x00" + data[8:], "two headers")
    refused(_entry(data, 42, struct.pack("<I", 3)), "does not begin|shares bytes")


def test_what_is_not_read() -> None:
    data = written({"a": b"12345"})
    refused(_entry(data, 8, b"\x01\x00"), "encrypted", Unsupported)
    refused(_entry(data, 34, b"\x03\x00"), "several parts", Unsupported)
    refused(_entry(data, 10, struct.pack("<H", 12)), "method 12", Unsupported)


def test_directories_that_lie() -> None:
    data = written({"a": b"12345", "b": b"1"})
    end = len(data) - 22

    def with_end(field: int, value: bytes) -> bytes:
        return data[: end + field] + value + data[end + field + len(value) :]

    refused(with_end(10, struct.pack("<H", 3)), "directory")
    refused(with_end(10, struct.pack("<H", 1)), "directory")
    refused(with_end(10, struct.pack("<H", 60_000)), "claims 60000 members")
    refused(with_end(12, struct.pack("<I", 5)), "does not lie where")
    refused(with_end(16, struct.pack("<I", 5)), "does not lie where")
    refused(with_end(12, struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF)), "does not lie where")
    refused(_entry(data, 28, struct.pack("<H", 500)), "directory|shares")
    with pytest.warns(UserWarning, match="Duplicate"):
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("a", b"1")
            archive.writestr("a", b"2")
    refused(target.getvalue(), "two members 'a'")


SEEDS = [written(MEMBERS), written(MEMBERS, zipfile.ZIP_DEFLATED), _with_wide_numbers(written({"a": b"hello"}))]


@pytest.mark.timeout(120)
@settings(max_examples=examples(400), suppress_health_check=list(HealthCheck))
@given(st.sampled_from(range(len(SEEDS))), st.data())
def test_mutated_archives(seed: int, draw: st.DataObject) -> None:
    data = SEEDS[seed]
    altered = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        # Mostly where headers are: in the data an altered byte is found by the sum alone.
        at = draw.draw(st.integers(0, 40) | st.integers(max(0, len(data) - 300), len(data) - 1))
        altered[at : at + 1] = draw.draw(st.binary(max_size=8))
    try:
        found = contents(Archive(stretch(bytes(altered))))
        assert sum(map(len, found.values())) <= zips.MAX_DEFLATION * len(altered)
    except (Damaged, Unsupported) as error:
        assert str(WHERE) in str(error)
