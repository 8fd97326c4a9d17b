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
@pytest.mark.slow_cases(
    "FSDP2 2", "FSDP2 4", "FSDP2 x TP 2x2", "TP 2", "HSDP x TP 2x2x2", "compiled DDP 3", "FSDP1 2", "FSDP1 flat 4",
    "FSDP1 hybrid 2x2", "values and shards", "large", "large, replicated",
)  # fmt: skip
def test_saves_write_what_they_always_wrote(case: str) -> None:
    written = saves.written(case)
    assert written == RECORD["saves"][case]
    # Saves whose files are equal stand under one key: it does not matter whether training waits for a save.
    assert any({"save", "thread", "process"} <= set(names.split(", ")) for names in written)
