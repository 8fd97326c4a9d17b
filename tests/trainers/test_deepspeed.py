"""Real DeepSpeed engines that were killed go on with the same bits, on other ranks, and by other stages of ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.deepspeed_runs import train
from tests.trainers.lives import KILLED, differences, live

KINDS = [
    (0, "fp32"),
    (1, "fp32"),
    (1, "bf16"),
    (2, "fp32"),
    (2, "bf16"),
    (3, "fp32"),
    (3, "bf16"),
    (2, "fp16"),
    (3, "fp16"),
]
FAST = [(2, "bf16"), (3, "fp32")]


@pytest.mark.parametrize(
    ("stage", "dtype"), [kind if kind in FAST else pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_killed_engine_goes_on_bit_for_bit(tmp_path: Path, stage: int, dtype: str) -> None:
    whole = live(2, train, tmp_path / "whole", stage, dtype, 6)
    assert live(2, train, tmp_path / "killed", stage, dtype, 6, 3) == KILLED
    again = live(2, train, tmp_path / "killed", stage, dtype, 6)
    assert again == [losses[2:] for losses in whole]
    assert differences(tmp_path / "whole" / "step-000000006", tmp_path / "killed" / "step-000000006") == []
