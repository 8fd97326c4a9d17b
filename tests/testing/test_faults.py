"""Faults of a disk on order: they hit the call that they name, in every thread and process, and then no more."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.local.durable import write_small
from holdfast.testing import Hit, count_calls, faults, flip, short_writes, slow, torn_writes
from holdfast.testing.orders import CHANGING, GROUPS, JOURNAL, LOOKING, VERBS
from tests.marks import examples


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(5000.0) + step}, "step": step}


def small(folder: Path) -> None:
    write_small(str(folder / "small"), b"x" * 1000)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2, 0])
def test_the_nth_call_fails_and_no_other(tmp_path: Path, nth: int, times: int) -> None:
    failed = []
    with faults("make folder", nth=nth, times=times, error="EDQUOT") as met:
        for n in range(1, 6):
            try:
                disk.make_folder(tmp_path / str(n))
            except OSError as error:
                assert error.errno == errno.EDQUOT and error.filename == str(tmp_path / str(n))
                failed.append(n)
    assert failed == [n for n in range(1, 6) if n >= nth and (not times or n < nth + times)]
    assert met.count == 5 and [(hit.verb, hit.number) for hit in met.hits] == [("make folder", n) for n in failed]
    disk.make_folder(tmp_path / "after")


def test_only_under_a_path_and_of_one_rank(tmp_path: Path) -> None:
    inside, beside = tmp_path / "a", tmp_path / "ab"
    for folder in (inside, beside):
        folder.mkdir()
    with faults("any", times=0, under=inside) as met:
        small(beside)
        with pytest.raises(OSError, match="Input/output error"):
            small(inside)
    assert met.count == len(met.hits) > 0
    with faults("any", rank=1) as met:
        small(inside)
    assert met.count == 0


def test_a_journal_is_counted_only_if_it_is_named(tmp_path: Path) -> None:
    assert JOURNAL == storage.JOURNAL
    journal = tmp_path / JOURNAL
    with faults("any", times=0) as all_of_it, faults("any", times=0, under=tmp_path) as of_root:
        manager = holdfast.CheckpointManager(tmp_path, every=9, worker="none", signals=())
        with count_calls(under=journal) as named, count_calls(under=journal / "now.json") as one, manager:
            manager.step(1, state_of(1))
        assert (journal / "now.json").exists()
    assert all_of_it.count == of_root.count == 0
    assert named.count > one.count > 0


def test_a_link_fits_by_either_name(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "in").mkdir()
    with faults("link", under=tmp_path / "in"), pytest.raises(OSError):
        disk.link(tmp_path / "small", tmp_path / "in" / "small")


def test_done_and_failed_all_the_same(tmp_path: Path) -> None:
    with faults("make folder", done=True), pytest.raises(OSError):
        disk.make_folder(tmp_path / "made")
    assert (tmp_path / "made").is_dir()


def test_torn_and_short_writes(tmp_path: Path) -> None:
    with torn_writes(), pytest.raises(OSError):
        disk_write(tmp_path / "torn", b"0123456789")
    assert (tmp_path / "torn").read_bytes() == b"01234"
    with short_writes() as met:
        holdfast.save(state_of(1), tmp_path / "c")
        disk_write(tmp_path / "short", b"0123456789")
    assert len(met.hits) > 5
    assert (tmp_path / "short").read_bytes() == b"0123456789"
    holdfast.open(tmp_path / "c").verify()


def disk_write(path: Path, data: bytes) -> None:
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        disk.write_all(fd, data, 0, path)
    finally:
        os.close(fd)


@settings(max_examples=examples(12))
@example(seed=639, nth=1)  # beyond the end of the file, if that is not minded
@given(seed=st.integers(0, 1 << 30), nth=st.sampled_from([1, 3, 4]))
def test_a_bit_that_flips_on_its_way_is_found(tmp_path_factory: pytest.TempPathFactory, seed: int, nth: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "c"
    with flip("write", nth=1 + nth // 3, seed=seed, under=path) as met:
        holdfast.save(state_of(1), path)
    assert len(met.hits) == 1
    with pytest.raises(holdfast.errors.Damaged):
        holdfast.open(path).verify()
    holdfast.save(state_of(2), path, overwrite=True)
    with flip("read", nth=nth, seed=seed, under=path) as met, pytest.raises(holdfast.HoldfastError):
        holdfast.load(path, state_of(0))
        raise AssertionError(f"not found: {met.hits}")
    holdfast.open(path).verify()


def test_slow(tmp_path: Path) -> None:
    began = time.monotonic()
    with slow("write", seconds_per_call=0.02, bytes_per_second=1e4):
        small(tmp_path)
    assert time.monotonic() - began >= 0.12, "1000 bytes, and a call"
    assert (tmp_path / "small").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("started", ["before", "inside"])
def test_the_writer_process_meets_them_too(tmp_path: Path, started: str) -> None:
    with holdfast.Saver() as saver:
        if started == "before":
            saver.prepare(state_of(0))
            saver.save(state_of(0), tmp_path / "0").wait()
        failed = pytest.raises(holdfast.SaveFailed, match="cannot sync .*Input/output error")
        with faults("sync", error="EIO", times=0, under=tmp_path / "1") as met, failed:
            saver.save(state_of(1), tmp_path / "1").wait()
        assert met.hits and {hit.pid for hit in met.hits} != {os.getpid()}
        saver.save(state_of(2), tmp_path / "2").wait()
        with count_calls(under=tmp_path) as calls:
            saver.save(state_of(3), tmp_path / "3").wait()
        assert len({hit.pid for hit in calls.hits}) == 2 and len(calls.hits) == calls.count
    assert not (tmp_path / "1").exists()


def test_an_order_that_ends_lets_calls_under_way_pass(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(call: disk.Call, do: Any) -> Any:
        inside.set()
        assert go.wait(240)
        return do()

    thread = threading.Thread(target=small, args=(tmp_path,))
    with faults("any", nth=1000) as met, disk.hooked(wait):
        thread.start()
        assert inside.wait(240)
    go.set()
    thread.join()
    assert (tmp_path / "small").exists() and met.count == 0


def test_what_cannot_be_ordered_is_said() -> None:
    for asked in [
        lambda: faults("wriet"), lambda: faults(error="ENOTHING"), lambda: faults(nth=0), lambda: flip("sync"),
        lambda: faults(times=-1),
    ]:  # fmt: skip
        with pytest.raises(ValueError), asked():
            pass


def test_every_verb_of_the_disk_has_a_name() -> None:
    text = disk.Call.__doc__ or ""
    assert all(f'"{verb}"' in text for verb in VERBS)
    assert set(text.split('"')[1::2]) == set(VERBS)
    assert set(CHANGING) | set(LOOKING) == set(VERBS) and all(set(group) <= set(VERBS) for group in GROUPS.values())


def test_hits_are_told(tmp_path: Path) -> None:
    with count_calls("write") as calls:
        small(tmp_path)
    assert isinstance(calls.hits[0], Hit) and calls.hits[0].offset == 0
    assert Path(calls.hits[0].path).parent == tmp_path
