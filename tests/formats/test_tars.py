"""Tar archives against Python's own: every format it writes, every member where it lies, and nothing that leads out."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine import tars
from holdfast.formats.sources import Memory, Stretch, all_of
from holdfast.storage.local.local_place import LocalPlace

WHERE = LocalPlace("an archive")
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def packed(members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT, **more: object) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def stretch(data: bytes) -> Stretch:
    return all_of(Memory(WHERE, data))


def listed(data: bytes) -> dict[str, bytes]:
    return {name: part.read() for name, part in tars.members(stretch(data)).items()}


LONG = "/".join(["a" * 60] * 4) + "/" + "é" * 90
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=20)


@given(
    st.dictionaries(NAMES.filter(lambda name: name not in (".", "..")), st.binary(max_size=1500), max_size=5),
    st.sampled_from(["gnu", "pax"]),
)
def test_every_member_as_python_reads_it(members: dict[str, bytes], format: str) -> None:
    data = packed(list(members.items()), FORMATS[format])
    assert tars.is_tar(data[:512]) or not members
    assert listed(data) == members


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_long_names_and_what_a_folder_packs_to(format: str, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "composer_states.pt").write_bytes(b"states")
    (tmp_path / "deepspeed" / ("x" * 120)).write_bytes(b"long")
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=FORMATS[format]) as archive:
        archive.add(tmp_path, arcname="")  # as Composer does: the first entry is a folder without a name
    assert listed(target.getvalue()) == {"composer_states.pt": b"states", f"deepspeed/{'x' * 120}": b"long"}
    assert listed(packed([(LONG, b"1"), ("./b", b"2")], FORMATS[format])) == {LONG: b"1", "b": b"2"}


def test_a_name_in_two_parts() -> None:
    name = "/".join(["b" * 70] * 3)
    assert listed(packed([(name, b"1")], tarfile.USTAR_FORMAT)) == {name: b"1"}


def test_archives_of_no_format() -> None:
    """As the first tar wrote them: no magic, no type."""
    header = bytearray(packed([("old", b"abc")], tarfile.USTAR_FORMAT)[:512])
    header[156:157] = b"\0"
    header[257:512] = bytes(255)
    assert listed(summed(header) + b"abc" + bytes(509 + 1024)) == {"old": b"abc"}


def summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


class Holes:
    """A source of any size whose bytes are those of an archive's beginning and end, and else zeros."""

    path = WHERE

    def __init__(self, head: bytes, nbytes: int) -> None:
        self.head, self.nbytes, self.asked = head, nbytes, 0

    def open(self) -> tuple[int, int | None]:
        raise NotImplementedError

    def read(self, begin: int, nbytes: int) -> bytes:
        self.asked += nbytes
        return self.head[begin : begin + nbytes].ljust(nbytes, b"\0")


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_members_of_any_size_cost_their_headers(format: str) -> None:
    size = 20 << 30  # does not fit the octal digits
    info = tarfile.TarInfo("huge")
    info.size = size
    head = info.tobuf(FORMATS[format])
    source = Holes(head, len(head) + size + 1024)
    found = tars.members(all_of(source))
    assert (found["huge"].begin, found["huge"].nbytes) == (len(head), size)
    assert source.asked <= 4096
    with pytest.raises(Damaged, match="truncated"):
        tars.members(all_of(Holes(head, len(head) + size - 1)))


@pytest.mark.parametrize(
    "kind",
    [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE],
)
def test_what_is_no_plain_file(kind: bytes) -> None:
    data = packed([("a", b"")], tarfile.GNU_FORMAT, type=kind, linkname="/etc/passwd")
    with pytest.raises(Unsupported, match="its member 'a' is a .*only plain files"):
        tars.members(stretch(data))


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "a/..", "./../a"])
@pytest.mark.parametrize("format", ["gnu", "pax", "ustar"])
def test_names_that_lead_out(name: str, format: str) -> None:
    with pytest.raises(Damaged, match="a name that no file in an archive"):
        tars.members(stretch(packed([(name, b"x")], FORMATS[format])))


def test_names_that_are_none() -> None:
    with pytest.raises(Damaged, match="a name that no file in an archive"):
        tars.members(stretch(packed([("x", b"1")], tarfile.PAX_FORMAT, pax_headers={"path": "a\0b"})))


def test_the_same_name_twice() -> None:
    with pytest.raises(Damaged, match="holds 'a' twice"):
        tars.members(stretch(packed([("a", b"1"), ("./a", b"2")])))


def test_sparse_by_attributes() -> None:
    data = packed([("a", b"1")], tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.major": "1"})
    with pytest.raises(Unsupported, match="a sparse file"):
        tars.members(stretch(data))


def test_cut_off_anywhere() -> None:
    data = packed([("a" * 150, b"1" * 700), ("b", b"2" * 100)], tarfile.GNU_FORMAT)
    end = data.rindex(b"2") + 1
    for length in range(0, end, 7):
        with pytest.raises(Damaged, match="an archive$|truncated|an archive"):
            tars.members(stretch(data[:length]))


def test_every_bit_of_a_header_counts() -> None:
    data = bytearray(packed([("a", b"1" * 10)], tarfile.USTAR_FORMAT))
    for at in range(512):
        data[at] ^= 1
        try:
            assert tars.members(stretch(bytes(data))).keys() == {"a"}, at  # a space for a zero, say, beside the sum
            assert 148 <= at < 156
        except Damaged:
            pass
        data[at] ^= 1


@pytest.mark.parametrize(
    "attributes", [b"99 path=a\n", b"9 path=ab", b"0 a=b\n", b"path=a\n", b"11 path=abX", b"x", b"9999999999 a=b\n"]
)
def test_attributes_that_are_none(attributes: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(attributes)
    data = info.tobuf(tarfile.USTAR_FORMAT) + attributes.ljust(512, b"\0") + packed([("a", b"1")])
    with pytest.raises(Damaged, match="attributes are broken"):
        tars.members(stretch(data))


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\x80" + b"\xff" * 11, b"-1\0".ljust(12), b"\xff" * 12, b"9".ljust(12)]
)
def test_sizes_that_are_none(size: bytes) -> None:
    header = bytearray(packed([("a", b"1")], tarfile.USTAR_FORMAT)[:512])
    header[124:136] = size
    with pytest.raises(Damaged):
        tars.members(stretch(summed(header) + bytes(1024)))


def test_a_name_of_many_gigabytes() -> None:
    header = bytearray(packed([("a", b"1")], tarfile.GNU_FORMAT)[:512])
    header[124:136], header[156:157] = b"77777777777\0", b"L"
    with pytest.raises(Damaged, match="attributes of 8589934591 bytes"):
        tars.members(stretch(summed(header) + bytes(1024)))


def test_more_members_than_any_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_MEMBERS", 3)
    with pytest.raises(Damaged, match="too many"):
        tars.members(stretch(packed([(str(i), b"") for i in range(4)])))
