"""Who may read what is written: the umask decides, and what lies aside for a while is for the user alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.storage.local import local_place
from tests.formats.truth import GOLDEN


@pytest.fixture(params=[0o077, 0o027, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _modes(folder: Path) -> set[tuple[bool, int]]:
    return {(p.is_dir(), stat.S_IMODE(p.lstat().st_mode)) for p in [folder, *folder.rglob("*")]}


def test_a_save_takes_its_rights_from_the_umask(umask: int, tmp_path: Path) -> None:
    first = holdfast.save({"model": {"w": torch.ones(9)}}, tmp_path / "step-1", files={"a.json": b"{}"})
    holdfast.save({"model": {"w": torch.ones(9)}, "x": 1}, tmp_path / "step-2", base=first)
    with holdfast.Saver() as saver:
        saver.save({"model": {"w": torch.ones(9)}}, tmp_path / "step-3")
    for step in ("step-1", "step-2", "step-3"):
        assert _modes(tmp_path / step) == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}


def test_a_conversion_and_a_copy_take_theirs_too(umask: int, tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(9)}}, tmp_path / "step-1")
    holdfast.convert(tmp_path / "step-1", tmp_path / "hf", to="huggingface")
    holdfast.copy(tmp_path / "step-1", tmp_path / "copy")
    for made in ("hf", "copy"):
        assert all(mode & umask == 0 for _, mode in _modes(tmp_path / made))


def test_what_is_unpacked_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        checkpoint = holdfast.open(GOLDEN / "composer_targz_2r" / "ckpt")
        [root] = tmp_path.glob("holdfast-scratch-*")
        assert {mode for is_folder, mode in _modes(root) if is_folder} == {0o700}
        checkpoint.verify()
    finally:
        os.umask(before)


def test_a_folder_that_others_may_use_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"holdfast-scratch-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"holdfast-scratch-{os.geteuid()}").chmod(0o777)
    with pytest.raises(holdfast.errors.StorageError, match="only this user"):
        local_place.private_folder("scratch")
