"""Saves write the very bytes that they wrote when the record was made."""

from __future__ import annotations

import json

import pytest
import torch

from tests.oracle import saves

RECORD = json.loads(saves.RECORD.read_text())


@pytest.mark.skipif(
    str(torch.__version__).partition("+")[0] != RECORD["torch"], reason="other versions have other optimizer settings"
)
@pytest.mark.parametrize("case", saves.CASES)
def test_saves_write_what_they_always_wrote(case: str) -> None:
    assert saves.written(case) == RECORD["saves"][case]


def test_every_way_of_saving_writes_the_same_tensors() -> None:
    """The blocking save of a case and those in the background are told once: their files are equal."""
    for case, found in RECORD["saves"].items():
        assert any({"save", "thread", "process"} <= set(names.split(", ")) for names in found), case
