"""Archives of one kind: the tensor is looked for once, and found in others only if they say the same."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.errors import Damaged
from holdfast.formats.dcp import distcp, outlines
from holdfast.formats.dcp.distcp import Entry
from holdfast.formats.sources import Stretch, file
from holdfast.storage.local.local_place import LocalPlace
from tests.formats.test_torch_files import saved
from tests.marks import examples


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "_outlines", {})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where archives begin that were looked into."""
    begins: list[int] = []
    load_file = distcp.load_file
    monkeypatch.setattr(distcp, "load_file", lambda data: [begins.append(data.begin), load_file(data)][1])
    return begins


def _located(folder: Path, archives: list[bytes], shape: tuple[int, ...], dtype: str = "float32") -> list[Stretch]:
    path = folder / "__0_0.distcp"
    path.write_bytes(b"".join(archives))
    source, at, chunks = file(LocalPlace(path)), 0, []
    for archive in archives:
        chunks.append(distcp.chunk(Entry(f"at {at}", source, at, len(archive), ()), dtype, shape))
        at += len(archive)
    return [chunk.located() for chunk in chunks]


@pytest.mark.parametrize("numel", [1, 30, 3000, 100_000])
def test_one_look_for_many(numel: int, tmp_path: Path, looks: list[int]) -> None:
    tensors = [torch.arange(numel, dtype=torch.float32) + i for i in range(4)]
    stretches = _located(tmp_path, [saved(tensor) for tensor in tensors], (numel,))
    for tensor, stretch in zip(tensors, stretches, strict=True):
        data = tensor.numpy().tobytes()
        assert stretch.read() == data
        assert stretch.member is not None
        assert stretch.member[1:] == (len(data), zlib.crc32(data))
    assert len(looks) == 1


def test_what_describes_another_tensor_is_looked_into(tmp_path: Path, looks: list[int]) -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    columns = torch.arange(12.0).reshape(4, 3).t()  # as long, and laid out otherwise
    shared = torch.arange(24.0)[6:18].view(3, 4)
    tensors = [rows, columns, rows, shared, rows]
    for tensor, stretch in zip(tensors, _located(tmp_path, [*map(saved, tensors)], (3, 4)), strict=True):
        assert torch.equal(torch.frombuffer(bytearray(stretch.read()), dtype=torch.float32).view(3, 4), tensor)
    assert len(looks) == 3


def _with_members(archive: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target.getvalue()


@pytest.mark.parametrize(("member", "old", "new"), [
    ("data.pkl", b"FloatStorage", b"HalfStorages"), ("data.pkl", b"K\x03K\x04\x86", b"K\x02K\x06\x86"),
    ("byteorder", b"little", b"bigger"),
])  # fmt: skip
def test_an_altered_description_is_looked_into(member: str, old: bytes, new: bytes, tmp_path: Path) -> None:
    archive = _with_members(saved(torch.arange(12.0).view(3, 4)), lambda name, data: data)
    altered = _with_members(archive, lambda name, data: data.replace(old, new) if name.endswith(member) else data)
    assert len(altered) == len(archive)
    _located(tmp_path, [archive, archive], (3, 4))
    with pytest.raises(distcp.Unsupported if member == "byteorder" or b"Half" in new else Damaged):
        _located(tmp_path, [archive, altered], (3, 4))


def test_every_byte_that_describes_counts(tmp_path: Path) -> None:
    """Whatever byte of an archive is another one: what is found, or refused, is what is found without an outline."""
    archive = saved(torch.arange(4.0))
    (known,) = _located(tmp_path, [archive], (4,))
    for at in range(0, len(archive), max(100 // examples(100), 1)):  # with the quick profile every sixth byte
        altered = archive[:at] + bytes([archive[at] ^ 0x40]) + archive[at + 1 :]
        with_outline = _outcome(tmp_path, altered)
        kept = dict(outlines._outlines)
        outlines._outlines.clear()
        assert with_outline == _outcome(tmp_path, altered), at
        outlines._outlines.clear()
        outlines._outlines.update(kept)
    assert known.read() == torch.arange(4.0).numpy().tobytes()


def _outcome(folder: Path, archive: bytes) -> object:
    try:
        (stretch,) = _located(folder, [archive], (4,))
        return stretch.begin, stretch.nbytes, stretch.member, stretch.read()
    except Exception as error:
        return type(error), str(error)


def test_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "_MOST", 3)
    for numel in range(1, 9):
        _located(tmp_path, [saved(torch.ones(numel))], (numel,))
        assert len(outlines._outlines) <= 3
