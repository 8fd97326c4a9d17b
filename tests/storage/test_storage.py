"""What lies near in a folder, found without a walk through all that is there; files that are set aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage import storage
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import location
from holdfast.testing import faults
from tests.rights import refused


def made(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")
    return root


def test_upper_files_come_first_and_deeper_folders_are_named(tmp_path: Path) -> None:
    made(tmp_path, "z", "a/b/c/d", "a/b/e", "a/f").joinpath("empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert tmp_path.files_near(levels=3) == ["z", "a/f", "a/b/e", "a/b/c/"]
    assert tmp_path.files_near(levels=1) == ["z", "a/", "empty/"]
    assert (tmp_path / "none").files_near(levels=2) == (tmp_path / "empty").files_near(levels=2) == []


def test_many_entries_are_not_all_looked_at(tmp_path: Path) -> None:
    made(tmp_path, *(f"{folder}/{number}" for folder in "abc" for number in range(9)))
    assert tmp_path.files_near(levels=2, each=4) == [f"{folder}/{number}" for folder in "abc" for number in range(4)]
    assert tmp_path.files_near(levels=2, most=5) == ["a/0", "a/1", "b/", "c/"]


def test_what_cannot_be_listed_is_named(tmp_path: Path) -> None:
    made(tmp_path, "a/b", "c").joinpath("a").chmod(0)
    with refused():
        assert tmp_path.files_near(levels=2) == ["c", "a/"]
        with pytest.raises(StorageError, match="cannot list .*/a: "):
            (tmp_path / "a").files_near(levels=2)
    (tmp_path / "a").chmod(0o700)


def test_files_are_set_aside_on_disk_and_deleted_in_a_store(tmp_path: Path) -> None:
    made(tmp_path, "a/x", "b/y")
    stored = StorePlace(Memory(), "run")
    (stored / "x").write_small(b"1")
    storage.set_aside([location(tmp_path) / "a/x", location(tmp_path) / "a/none", stored / "x"], "aside")
    assert location(tmp_path).files_below() == ["a/aside", "b/y"] and not stored.files_below()


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_a_disk_too_full_for_another_name_loses_the_file(tmp_path: Path, error: str) -> None:
    made(tmp_path, "a/x")
    with faults("replace", error=error):
        storage.set_aside([location(tmp_path) / "a/x"], "aside")
    assert not location(tmp_path).files_below()


def test_a_file_that_cannot_be_set_aside_is_named(tmp_path: Path) -> None:
    made(tmp_path, "a/x")
    with faults("replace", error="EIO"), pytest.raises(StorageError, match="cannot rename .*/a/x: "):
        storage.set_aside([location(tmp_path) / "a/x"], "aside")
    assert (tmp_path / "a/x").exists()
