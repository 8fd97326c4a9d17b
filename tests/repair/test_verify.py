"""`verify`: every damaged byte is found, by any number of ranks, and told by the tensors that it hits."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.commit.transfer import home
from holdfast.read.source import PART, STRIDE
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.damaging import contents_of, flip, spots, state_of
from tests.marks import examples


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = LocalPlace(tmp_path_factory.mktemp("verify")) / "step-1"
    holdfast.save(state_of(1, blocks=1), path, step=1, files={"config": b"depth: 3"})
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "c")
    return tmp_path / "c"


def found_in(path: Any) -> set[tuple[str, str, Any, int, int]]:
    report = holdfast.tools.verify(path, raises=False)
    assert report.whole == (not report.damages)
    return {(d.file, d.tensor, d.box, d.begin, d.nbytes) for d in report.damages}


@given(data=st.data())
@settings(max_examples=examples(12))
def test_exactly_what_was_damaged_is_told(data: st.DataObject, saved: Path, tmp_path_factory: Any) -> None:
    copied = LocalPlace(tmp_path_factory.mktemp("damage")) / "c"
    shutil.copytree(saved, copied)
    there = list(spots(holdfast.open(copied)))
    chosen = data.draw(st.sets(st.integers(0, len(there) - 1)), "blocks")
    hit = [there[number] for number in sorted(chosen)]
    for spot in hit:
        flip(spot.file, spot.begin + data.draw(st.integers(0, spot.nbytes - 1), "byte"))
    assert found_in(copied) == {(str(s.file), s.tensor, s.box, s.begin, s.nbytes) for s in hit}
    names = {s.tensor for s in hit if s.tensor}
    told = holdfast.tools.verify(copied, raises=False).tensors
    assert set(told) == names | ({"model/tied"} if "model/small" in names else set())
    if hit:
        with pytest.raises(holdfast.errors.Damaged) as caught:
            holdfast.tools.verify(copied)
        assert all(f"{s.tensor}{s.box}" in str(caught.value) for s in hit if s.tensor)


@pytest.mark.parametrize("how", ["missing", "cut", "grown", "header"])
@pytest.mark.parametrize("deep", [True, False])
def test_a_file_that_is_no_good_hits_all_that_lies_in_it(how: str, deep: bool, copied: Path) -> None:
    file = next((copied / "model").iterdir())
    if how == "missing":
        file.unlink()
    elif how == "header":
        flip(file, 200)
    else:
        os.truncate(file, file.stat().st_size + (1 if how == "grown" else -1))
    report = holdfast.tools.verify(copied, deep=deep, raises=False)
    assert {d.tensor for d in report.damages} == {"model/w", "model/small", "model/n"}
    assert {d.file for d in report.damages} == {str(file)}
    assert set(report.tensors) == {"model/w", "model/small", "model/n", "model/tied"}


def test_shallow_looks_at_no_tensor_bytes(copied: Path) -> None:
    flip(next((copied / "model").iterdir()), 5000)
    report = holdfast.tools.verify(copied, deep=False)
    assert report.whole and not report.deep and report.nbytes < 5 * 4096
    (copied / "attachments" / "config").write_bytes(b"depth: 4")
    with pytest.raises(holdfast.errors.Damaged, match="config is altered"):
        holdfast.tools.verify(copied, deep=False)


def test_a_value_of_a_rank_is_named(copied: Path) -> None:
    spot = [s for s in spots(holdfast.open(copied)) if not s.tensor]
    assert len(spot) == 2, "the value and the tensor in it"
    for one in spot:
        flip(one.file, one.begin)
    assert {d.value for d in holdfast.tools.verify(copied, raises=False).damages} == {"rng@0"}


def test_a_whole_one_counts_every_byte(saved: Path) -> None:
    report = holdfast.tools.verify(saved)
    files = list(saved.rglob("*.safetensors"))
    assert report.whole and report.nbytes == sum(p.stat().st_size for p in files) and not report.unverified


def test_no_byte_of_cached_pages_is_passed_over(tmp_path: Path) -> None:
    """They are read and summed a part at a time: blocks shorter, as long as one, a little longer, and many long."""
    sizes = (100, STRIDE, 7, STRIDE + 4, PART, PART + 4, 20 * STRIDE + 12, 300)
    state = {f"t{i}": torch.randint(256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    holdfast.save(state, tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "c")  # its pages are in memory
    for spot in spots(holdfast.open(tmp_path / "c")):
        if spot.tensor:
            borders = {0, STRIDE - 1, STRIDE, PART - 1, PART, spot.nbytes - 1}
            for at in sorted(at for at in borders if at < spot.nbytes):
                flip(spot.file, spot.begin + at)
                assert found_in(tmp_path / "c") == {(str(spot.file), spot.tensor, spot.box, spot.begin, spot.nbytes)}
                with pytest.raises(holdfast.errors.Damaged, match="have another checksum"):
                    holdfast.load(tmp_path / "c", {name: torch.zeros_like(t) for name, t in state.items()})
                flip(spot.file, spot.begin + at)
    assert holdfast.tools.verify(tmp_path / "c").whole


@pytest.mark.parametrize("ranks", [2, 3, 7, 40])
def test_parts_are_the_whole(ranks: int, copied: Path) -> None:
    for spot in list(spots(holdfast.open(copied)))[::2]:
        flip(spot.file, spot.begin)
    opened = holdfast.open(copied)
    whole = opened.reader.examine()
    parts = [holdfast.open(copied).reader.examine(share=(r, ranks)) for r in range(ranks)]
    assert sorted(f for part in parts for f in part.faults) == sorted(whole.faults) != []
    assert sum(part.nbytes for part in parts) == whole.nbytes
    if ranks == 2:
        assert max(part.nbytes for part in parts) < 0.75 * whole.nbytes


def test_a_block_is_of_the_stretch_in_which_it_begins(copied: Path) -> None:
    opened = holdfast.open(copied)
    number = next(i for i, file in enumerate(opened.manifest.data_files) if file.path.startswith("model/"))
    start = sum(file.bytes for file in opened.manifest.data_files[:number])
    spot = next(s for s in spots(opened) if s.tensor == "model/w")
    flip(spot.file, spot.begin)
    at = start + spot.begin  # as many parts as bytes: each is one of them
    for part, found in ((at - 1, 0), (at, 1), (at + 1, 0)):
        assert len(holdfast.open(copied).reader.examine(share=(part, opened.nbytes)).faults) == found


def verified(path: str) -> list[Any]:
    report = holdfast.tools.verify(path, raises=False, deadline=240)
    return [report.nbytes, [(d.tensor, d.begin, d.what) for d in report.damages], report.tensors]


def raising(path: str) -> None:
    holdfast.tools.verify(path, deadline=240)


def test_ranks_share_the_work_and_the_verdict(copied: Path) -> None:
    assert len({str(one) for one in pool.run(3, verified, str(copied))}) == 1
    assert pool.run(3, verified, str(copied))[0][0] == holdfast.tools.verify(copied).nbytes
    for spot in list(spots(holdfast.open(copied)))[::2]:
        flip(spot.file, spot.begin)
    told = pool.run(3, verified, str(copied))
    alone = holdfast.tools.verify(copied, raises=False)
    assert told[0] == told[1] == told[2]
    assert told[0][1] == [(d.tensor, d.begin, d.what) for d in alone.damages] and len(alone.damages) > 2
    errors = pool.attempt(3, raising, str(copied))
    assert len({error.text for error in errors}) == 1 and "Damaged" in errors[0].kinds
    shutil.rmtree(copied)
    errors = pool.attempt(3, raising, str(copied))
    assert len({error.text for error in errors}) == 1 and "NotACheckpoint" in errors[0].kinds


def test_in_a_store(copied: Path) -> None:
    place = StorePlace(Memory(), "run/step-1")
    holdfast.copy(copied, place)
    assert holdfast.tools.verify(place).whole
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    flip(spot.file, spot.begin + 7)
    broken = StorePlace(Memory(), "run/step-1")
    for path, data in contents_of(copied).items():
        broken.store.put((broken / path).key, [data], len(data))
    assert {(d.tensor, d.begin) for d in holdfast.tools.verify(broken, raises=False).damages} == {
        ("model/w", spot.begin)
    }
    assert home(copied) != broken


def test_a_bad_sector_is_damage_and_a_refusal_is_not(copied: Path) -> None:
    """A device that fails names the tensor there; that there are no descriptors left says nothing of the bytes."""
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    number = errno.EIO

    def fail(call: disk.Call, do: Any) -> Any:
        end = call.offset + (len(call.data) if call.data is not None else 0)
        if call.verb == "read" and call.path == str(spot.file) and call.offset <= spot.begin + 5000 < end:
            raise OSError(number, os.strerror(number))
        return do()

    with disk.hooked(fail):
        report = holdfast.tools.verify(copied, raises=False)
        assert {(d.tensor, d.begin, d.nbytes) for d in report.damages} == {("model/w", spot.begin, spot.nbytes)}
        assert "Input/output error" in report.damages[0].what
        number = errno.EMFILE
        with pytest.raises(holdfast.errors.StorageError, match="too many open files"):
            holdfast.tools.verify(copied)


@pytest.mark.parametrize("ranks", [1, 3])
def test_foreign_formats_are_shared_out_too(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {f"t{n}": torch.full((100 + n,), float(n)) for n in range(9)}}, path)
    data = bytearray(path.read_bytes())
    for n in (2, 7):
        data[data.index(torch.full((100 + n,), float(n)).numpy().tobytes()) + 4] ^= 1
    path.write_bytes(data)
    parts = [holdfast.open(path).reader.examine(share=(r, ranks)) for r in range(ranks)]
    assert {d.tensor for part in parts for d in part.others} == {"model/t2", "model/t7"}
    assert sum(part.nbytes for part in parts) == sum(400 + 4 * n for n in range(9))
    assert holdfast.tools.verify(path, raises=False).tensors == ("model/t2", "model/t7")
    assert holdfast.tools.verify(path, deep=False).nbytes == 0
