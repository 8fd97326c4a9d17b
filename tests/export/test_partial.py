"""Where a target grows: who may, what an earlier call left, and how it takes its place."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

import holdfast
from holdfast.export.partial import Journal, Partial, Row
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from tests import pool


def _begun(target: Path, plan: str = "a", *, overwrite: bool = False) -> tuple[Partial, dict[int, Row]]:
    place = Partial(target)
    return place, {row.unit: row for row in place.begin(plan, {"x": 100, "sub/y": 5}, overwrite=overwrite)}


def _note(place: Partial, rank: int, *rows: Row) -> None:
    journal = Journal(place, rank)
    journal.add(rows)
    journal.close()


def test_what_is_noted_is_found_by_the_next_call(tmp_path: Path) -> None:
    place, done = _begun(tmp_path / "t")
    assert done == {} and (place.content / "x").stat().st_size == 100 and (place.content / "sub/y").exists()
    _note(place, 0, Row(1, ["s"]), Row(5, ["t", "u"], [(7, b"\0\xff")]))
    _note(place, 1, Row(2, []))
    (place.content / "leaving").write_text("of an end that was begun")
    place.leave()
    again, done = _begun(tmp_path / "t")
    assert (
        done == {1: Row(1, ["s"]), 5: Row(5, ["t", "u"], [(7, b"\0\xff")]), 2: Row(2, [])}
        and not (again.content / "leaving").exists()
    )
    _note(again, 0, Row(7, ["v"]))
    again.leave()
    third, done = _begun(tmp_path / "t")
    assert set(done) == {1, 2, 5, 7}
    third.leave()
    other, done = _begun(tmp_path / "t", "another plan")
    assert done == {} and (other.content / "x").read_bytes() == bytes(100)
    other.leave()


def test_a_line_that_was_being_written_counts_for_nothing(tmp_path: Path) -> None:
    place, _ = _begun(tmp_path / "t")
    _note(place, 3, Row(1, ["s"]))
    with (place.folder / "journal" / "00003").open("ab") as journal:
        journal.write(b'[2,["a')
    place.leave()
    again, done = _begun(tmp_path / "t")
    assert set(done) == {1}
    again.leave()


def test_nothing_is_kept_if_nothing_was_done(tmp_path: Path) -> None:
    place, _ = _begun(tmp_path / "t")
    place.leave()
    assert not list(tmp_path.iterdir())


def test_one_at_a_time(tmp_path: Path) -> None:
    place, _ = _begun(tmp_path / "t")
    with pytest.raises(holdfast.errors.StorageError, match="another process is converting") as caught:
        _begun(tmp_path / "t")
    assert caught.value.errno == errno.EBUSY
    journal = Journal(place, 1)
    journal.add([Row(0, [])])
    place.leave()
    with pytest.raises(holdfast.errors.StorageError, match="another process is converting"):
        _begun(tmp_path / "t")  # a rank that outlived the first one
    journal.close()
    again, done = _begun(tmp_path / "t")
    assert set(done) == {0}
    again.leave()


def _begin_and_die(target: Path) -> None:
    _begun(LocalPlace(target))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_holds_nobody_up(tmp_path: Path) -> None:
    process = pool.context.Process(target=_begin_and_die, args=(tmp_path / "t",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "t.partial" / "lock").exists()
    _begun(tmp_path / "t")[0].leave()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t.partial").mkdir()
    (tmp_path / "t.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(holdfast.errors.StorageError, match=r"holds other files \(thesis\.txt\)"):
        _begun(tmp_path / "t")
    assert (tmp_path / "t.partial" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("modern", [True, False], ids=["exchanged", "moved aside"])
@pytest.mark.parametrize("old", ["nothing", "empty folder", "checkpoint", "file"])
def test_put_in_place(old: str, modern: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t"
    if old in ("empty folder", "checkpoint"):
        target.mkdir()
    if old == "checkpoint":
        (target / "manifest.json").write_text("{}")
    if old == "file":
        target.write_text("old")
    if not modern:
        monkeypatch.setattr(disk, "_renameat2", lambda old, new, flag: False)
    place, _ = _begun(target, overwrite=True)
    place.publish(place.content, ["x", "sub/y"], overwrite=True)
    place.leave()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t"]
    assert sorted(p.name for p in target.iterdir()) == ["sub", "x"]


def test_a_target_that_came_in_the_meantime_is_not_replaced(tmp_path: Path) -> None:
    place, _ = _begun(tmp_path / "t")
    (tmp_path / "t").write_text("somebody's")
    with pytest.raises(holdfast.errors.StorageError, match="exists"):
        place.publish(place.content, ["x"], overwrite=False)
    assert (tmp_path / "t").read_text() == "somebody's"
    place.leave()
