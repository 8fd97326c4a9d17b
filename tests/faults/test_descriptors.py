"""A save may have more data files than the process may open; and a save that fails, wherever, leaves none open."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.storage.local import disk
from holdfast.write.datafiles import KEPT
from tests.faults.descriptor_trials import descriptors, is_whole, state
from tests.patience import wait_until
from tests.programs import run_module


def trial(*arguments: object) -> Any:
    """What a trial printed, run by itself."""
    ran = run_module("tests.faults.descriptor_trials", *arguments)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("limit", "sections"),
    [
        (64, 150),
        (1024, 1200),
    ],
)
@pytest.mark.slow
def test_more_files_than_descriptors(limit: int, sections: int, tmp_path: Path) -> None:
    found = trial("more", tmp_path, limit, sections)
    assert found["before"] == found["after"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocking", "thread", "process"])
def test_descriptors_that_run_out_fail_the_save_and_no_other(kind: str, tmp_path: Path) -> None:
    assert trial("none", tmp_path, 96, kind) == []


VERBS = ["create", "open", "write", "sync", "cut", "reserve", "link", "delete", "make folder", "sync folder", "list"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("worker", [None, "thread", "process"])
@pytest.mark.fast_cases("None-13")
def test_a_call_that_fails_leaves_no_descriptor(worker: Any, number: int, tmp_path: Path) -> None:
    """From the n-th call of a kind on all of them fail, those that clean up too."""
    many = state(KEPT + 3)

    def save(path: Path) -> None:
        if worker is None:
            holdfast.save(many, path)
        else:
            with holdfast.Saver(worker=worker) as saver:
                saver.save(many, path).wait()

    save(tmp_path / "first")
    before, failures = descriptors(), 0
    for verb in VERBS:
        for nth in (0, 3, KEPT + 1):
            path, seen = tmp_path / f"{verb} {nth}", []

            def fail(call: disk.Call, do: Any, verb: str = verb, nth: int = nth, seen: list[Any] = seen) -> Any:
                if call.verb == verb:
                    seen.append(call)
                    if len(seen) > nth:
                        raise OSError(number, os.strerror(number), call.path)
                return do()

            with disk.hooked(fail):
                try:
                    save(path)
                except holdfast.SaveFailed as error:
                    assert isinstance(error, OSError) and error.errno == number, error
                    failures += 1
            wait_until(lambda: descriptors() == before)
    assert failures > len(VERBS)
    save(tmp_path / "last")
    is_whole(tmp_path / "last", KEPT + 3, 1.0)
    assert descriptors() == before


class Failing:
    """Its state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError(errno.EIO, "the tokenizer's file is gone")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("worker", [None, "thread", "process"])
def test_an_error_of_the_state_is_a_failed_save(worker: Any, tmp_path: Path) -> None:
    broken = {**state(3), "tokenizer": Failing()}
    holdfast.save(state(3), tmp_path / "first")
    before = descriptors()
    with pytest.raises(holdfast.SaveFailed, match="the tokenizer's file is gone") as caught:
        if worker is None:
            holdfast.save(broken, tmp_path / "c")
        else:
            with holdfast.Saver(worker=worker) as saver:
                saver.save(broken, tmp_path / "c").wait()
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.EIO
    wait_until(lambda: descriptors() == before)


def test_a_folder_with_unlocked_files_is_in_use_as_long_as_its_save_lives(tmp_path: Path) -> None:
    """Only the first files are locked: whoever would take the folder sees the save by those."""
    locked: list[int] = []

    def look(call: disk.Call, do: Any) -> Any:
        if call.verb == "link":  # the commit
            files = sorted((tmp_path / "c").glob("*/*.safetensors"))
            locked.append(sum(path.in_use() for path in files))
            with pytest.raises(holdfast.SaveFailed, match="another save is writing"):
                holdfast.save({"t": torch.ones(1)}, tmp_path / "c", group=None)
        return do()

    with disk.hooked(look), holdfast.Saver(worker="thread") as saver:
        saver.save(state(KEPT + 5), tmp_path / "c").wait()
    assert locked and locked[0] == KEPT
    is_whole(tmp_path / "c", KEPT + 5, 1.0)
