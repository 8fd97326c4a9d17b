"""Checkpoints of every format version that was ever released: still read, by both readers, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.ondisk.manifest import VERSIONS as VERSIONS_READ
from tests import format_reader
from tests.golden import make
from tests.ondisk.test_format import equal
from tests.ondisk.test_values import same

VERSIONS = sorted(p.name for p in make.HERE.glob("v*"))


def test_there_is_one_of_every_version() -> None:
    assert [f"v{number}" for number in VERSIONS_READ] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_state_is_read_to_the_last_bit(version: str) -> None:
    folder = make.HERE / version
    checkpoint = holdfast.open(folder)
    assert equal(checkpoint.state_dict(), make.expected(version))
    assert (checkpoint.step, checkpoint.world_size) == (7, make.WORLD)
    assert {name: checkpoint.attachment(name) for name in checkpoint.attachments} == make.FILES
    own = [make.of_rank(version, rank) for rank in range(make.WORLD)]
    assert equal([checkpoint.per_rank("own", r) for r in range(make.WORLD)], own)
    checkpoint.verify()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_second_reader_agrees(version: str) -> None:
    found = format_reader.read(make.HERE / version)
    assert equal(found.state, make.expected(version))
    assert equal(found.per_rank["own"], [make.of_rank(version, rank) for rank in range(make.WORLD)])
    assert found.attachments == make.FILES and found.manifest["version"] == int(version[1:])


@pytest.mark.parametrize("version", VERSIONS)
def test_todays_code_writes_what_the_golden_one_holds(version: str, tmp_path: Path) -> None:
    """Another plan may cut tensors elsewhere; whatever else differs, the format has changed."""
    make.make(version, tmp_path / "now")
    now, then = (format_reader.read_manifest(p / "manifest.json") for p in (tmp_path / "now", make.HERE / version))
    for key in ("format", "version", "world_size", "values", "containers", "aliases", "per_rank", "step"):
        assert now[key] == then[key], key
    assert list(now) == list(then)
    kinds = [{name: record[:2] for name, record in m["tensors"].items()} for m in (now, then)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_small_and_its_kinds_are_all_there(version: str) -> None:
    folder = make.HERE / version
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 200_000
    manifest = format_reader.read_manifest(folder / "manifest.json")
    cells = [record[2] for record in manifest["tensors"].values()]
    assert None in cells and any(type(c) is list for c in cells)
    assert {key for c in cells if isinstance(c, dict) for key in c} == {"cuts", "boxes"}
    assert manifest["aliases"] and manifest["per_rank"] and manifest["attachments"] and manifest["containers"]


def test_version_2_keeps_orders_and_long_values() -> None:
    folder, expected = make.HERE / "v2", make.expected("v2")
    for state in (holdfast.open(folder).state_dict(), format_reader.read(folder).state):
        for name in ("containers", "ordered", "object"):
            assert list(state[name]) == list(expected[name])
        assert same(state["long"], expected["long"])
    assert {f"long/{name}" for name in expected["long"]} <= holdfast.open(folder).manifest.values.keys()


def test_one_lost_byte_of_it_is_found(tmp_path: Path) -> None:
    folder = shutil.copytree(make.HERE / VERSIONS[-1], tmp_path / "copy")
    [file] = (folder / "model").glob("00001-of-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(holdfast.errors.Damaged, match=file.name):
        holdfast.open(folder).verify()
