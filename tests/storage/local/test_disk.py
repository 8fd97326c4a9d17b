"""Hooks see every call on local files: its verb, its paths and its bytes; and may let any of them fail."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.storage.local import disk
from holdfast.storage.local.disk import Call


def test_the_last_hook_is_first_and_sees_what_the_others_made_of_it(tmp_path: Path) -> None:
    told: list[str] = []

    def one(call: Call, do: Callable[[], Any]) -> Any:
        told.append(f"one {call.verb}")
        return do()

    def other(call: Call, do: Callable[[], Any]) -> Any:
        told.append(f"other {call.verb}")
        try:
            return do()
        finally:
            told.append("done")

    with disk.hooked(one), disk.hooked(other):
        disk.make_folder(tmp_path / "a")
    disk.make_folder(tmp_path / "b")
    assert told == ["other make folder", "one make folder", "done"]


def test_a_hook_may_fail_a_call_or_do_another(tmp_path: Path) -> None:
    path = tmp_path / "f"

    def half(call: Call, do: Callable[[], Any]) -> Any:
        if call.verb == "write":
            return os.pwrite(call.fd, call.data[: max(len(call.data) // 2, 1)], call.offset)
        if call.verb == "sync":
            raise OSError(errno.EIO, "Input/output error")
        return do()

    fd = disk.open(path, os.O_RDWR | os.O_CREAT)
    with disk.hooked(half):
        disk.write_all(fd, b"0123456789", 0, path)
        with pytest.raises(OSError, match="Input/output"):
            disk.sync(fd, path)
    os.close(fd)
    assert disk.read_file(path) == b"0123456789"


def test_a_save_and_a_load_as_a_hook_sees_them(tmp_path: Path) -> None:
    seen: list[Call] = []

    def note(call: Call, do: Callable[[], Any]) -> Any:
        seen.append(call)
        return do()

    state = {"model": {"w": torch.arange(1000.0)}}
    with disk.hooked(note):
        holdfast.save(state, tmp_path / "c")
    verbs = Counter(call.verb for call in seen)
    # The data file, and the manifest under the name it has before it is whole.
    assert verbs["create"] == 2 and verbs["sync"] == 2 and verbs["link"] == 1 and verbs["delete"] == 1
    link = next(call for call in seen if call.verb == "link")
    assert link.target == str(tmp_path / "c" / "manifest.json")
    order = [call.verb for call in seen if call.path.endswith(".safetensors")]
    assert order.index("sync") > max(n for n, verb in enumerate(order) if verb == "write")
    seen.clear()
    with disk.hooked(note):
        holdfast.load(tmp_path / "c", state)
    assert {call.verb for call in seen} <= {"open", "read", "stat", "list"}


def test_all_of_a_tree_goes_but_not_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_text("x")
    disk.make_folders(tmp_path / "gone" / "a" / "b")
    (tmp_path / "gone" / "a" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "f").write_text("x")
    disk.delete_all(tmp_path / "gone")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept" / "f").exists()
