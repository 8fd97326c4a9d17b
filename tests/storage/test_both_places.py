"""What a place answers, on disk and in a store alike; and that a local one is a path of pathlib's."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path, PosixPath

import pytest

from holdfast.storage import storage
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Memory


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return LocalPlace(tmp_path, "run") if request.param == "disk" else StorePlace(Memory(), "run")


def test_small_files(place: Place) -> None:
    file = place / "step" / "a.json"
    assert not file.is_file() and file.size() is None
    for read in (file.read_small, lambda: file.read_start(3)):
        with pytest.raises(FileNotFoundError):
            read()
    file.write_small(b"first")
    assert file.read_small() == b"first" and file.read_start(3) == (b"fir", 5) and file.read_start(9) == (b"first", 5)
    assert file.is_file() and file.size() == 5 and file.modified() > 0
    file.replace_small(b"second", "half")
    assert file.read_small() == file.read_bytes() == b"second"
    assert not file.create_small(b"third", "half") and file.read_small() == b"second"
    file.delete()
    file.delete()
    assert not file.is_file()
    file.parent.make_home()
    assert file.create_small(b"third", "half") and file.read_small() == b"third"
    assert file.parent.files_below() == ["a.json"]


def test_what_lies_below(place: Place) -> None:
    assert place.files_below() == [] and place.sizes_below() == {} and place.folder_names() == []
    for path in ("b/c/d", "b/a", "a"):
        (place / path).write_small(path.encode())
    assert place.files_below() == ["a", "b/a", "b/c/d"] and place.sizes_below() == {"a": 1, "b/a": 3, "b/c/d": 5}
    assert place.folder_names() == ["b"] and place.file_names() == ["a"]
    assert {*place.modified_below()} == {"a", "b/a", "b/c/d"} and all(place.modified_below().values())
    assert {path.name for path in place.iterdir()} == {"a", "b"} and all(
        type(p) is type(place) for p in place.iterdir()
    )
    assert set(place.files_near(levels=3)) == {"a", "b/a", "b/c/d"}
    storage.delete(place / "a", place / "b/a", place / "no")
    place.delete_empty_folders()
    assert place.files_below() == ["b/c/d"]


def test_folders_are_asked_for_everywhere(place: Place) -> None:
    (place / "a").make_folder()
    place.make_folders(["b", "c/d"])
    place.make_home()
    place.sync_folder()
    assert (place / "c" / "d").is_dir() is place.has_folders
    for name in ("a", "b", "c/d", "c"):
        (place / name).delete_if_empty()
    assert place.folder_names() == []


def test_what_a_save_under_way_may_need(place: Place) -> None:
    (place / "a").write_small(b"x")
    assert place.living([]) == [] and not place.may_live([])
    assert place.living(["a"]) == ([] if place.has_locks else ["a"])
    assert place.may_live(["a"]) is not place.has_locks
    if place.has_locks:
        fd = (place / "a").open_locked()
        assert place.living(["a"]) == ["a"] and (place / "a").in_use() and place.may_live(["a"])
        os.close(fd)


def test_what_only_one_kind_can_do_is_refused_by_the_other(place: Place) -> None:
    file = place / "a"
    place.make_folder()
    if place.has_descriptors:
        fd, _ = file.open_to_write(4096)
        os.close(fd)
        for descriptor in file.open_to_read():
            if descriptor is not None:
                os.close(descriptor)
        assert os.fspath(file) == str(file)
    else:
        for refused in (lambda: file.open_to_write(1), file.open_to_read, file.open_locked, file.in_use):
            with pytest.raises(OSError, match="has no"):
                refused()
        with pytest.raises(TypeError):
            os.fspath(file)


def test_the_same_files_as_a_store(place: Place) -> None:
    (place / "b" / "a").write_small(b"x")
    stored = storage.as_store(place)
    assert isinstance(stored, StorePlace) and (stored / "b" / "a").read_small() == b"x"
    assert stored.files_below() == place.files_below() and storage.as_store(stored) == stored


def test_a_local_place_is_a_path(tmp_path: Path) -> None:
    place, path = LocalPlace(tmp_path, "run", "step.tar.gz"), PosixPath(tmp_path, "run", "step.tar.gz")
    assert place == path and path == place and hash(place) == hash(path) and {path: 1}[place] == 1
    assert str(place) == str(path) and os.fspath(place) == os.fspath(path) and isinstance(place, Path)
    place.parent.mkdir()
    place.write_text("x")
    near = [
        place / "a", place.parent, place.with_name("b"), place.with_suffix(".x"), place.joinpath("a", "b"),
        place.real(), place.absolute(), *place.parents, *place.parent.iterdir(),
        *place.parent.glob("*"), *place.parent.rglob("*"),
        LocalPlace.cwd(), place.relative_to(tmp_path),
    ]  # fmt: skip
    assert all(type(other) is LocalPlace for other in near)


def test_what_others_pickle_names_no_class_of_ours(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    assert (
        pickle.dumps(place) == pickle.dumps(PosixPath(tmp_path))
        and type(pickle.loads(pickle.dumps(place))) is PosixPath
    )
    assert type(copy.deepcopy([place])[0]) is type(copy.copy(place)) is LocalPlace
