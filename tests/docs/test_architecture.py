"""The files that a tensor passes in a save and a load are those that the page lists; no stage calls an earlier one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from tests.docs.pages import ROOT
from tests.walk import Walk, walk

MOST = 12


def listed(which: str) -> list[str]:
    """The files that the page lists for a save or a load, in order."""
    page = (ROOT / "docs/architecture.md").read_text()
    return re.findall(r"^\d+\. `([\w/.]+)`", page.partition(f"<!-- {which} -->")[2].partition("\n\n")[0], re.MULTILINE)


def a_save(folder: Path) -> Walk:
    tensor = torch.randn(1000)
    return walk(lambda: holdfast.save({"model": {"w": tensor}}, folder), tensor)


def a_load(folder: Path) -> Walk:
    tensor = torch.randn(1000)
    holdfast.save({"model": {"w": tensor}}, folder)
    target = tensor.clone()
    return walk(lambda: holdfast.load(folder, {"model": {"w": target}}), target)


@pytest.mark.parametrize(("which", "follow"), [("save", a_save), ("load", a_load)], ids=["save", "load"])
def test_a_tensor_passes_the_listed_files_in_this_order(
    which: str, follow: Callable[[Path], Walk], tmp_path: Path
) -> None:
    stages, followed = listed(which), follow(tmp_path / "c")
    assert 0 < len(stages) <= MOST
    assert [file for file in followed.files if file in stages] == stages
    position = {file: number for number, file in enumerate(stages)}
    # A generator of one stage goes on when a later one asks for the next item: that is no call of a stage.
    calls = [call for call in followed.calls if not call.function.endswith(("<genexpr>", "<listcomp>"))]
    calls = [call for call in calls if {call.file, call.caller} <= set(stages)]
    assert not [call for call in calls if position[call.file] < position[call.caller]]
