"""What lies near in a folder: found without a walk through all that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import StorageError
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
