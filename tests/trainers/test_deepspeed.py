"""Real DeepSpeed engines that were killed go on with the same bits, on other ranks, and by other stages of ZeRO."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainers.lives import KILLED, differences, live

RUNS = "tests.trainers.deepspeed_runs"  # imported by the ranks alone: DeepSpeed takes seconds

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


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_a_killed_engine_goes_on_bit_for_bit(tmp_path: Path, stage: int, dtype: str) -> None:
    whole = live(2, f"{RUNS}:train", tmp_path / "whole", stage, dtype, 6)
    assert live(2, f"{RUNS}:train", tmp_path / "killed", stage, dtype, 6, 3) == KILLED
    again = live(2, f"{RUNS}:train", tmp_path / "killed", stage, dtype, 6)
    assert again == [losses[2:] for losses in whole]
    assert differences(tmp_path / "whole" / "step-000000006", tmp_path / "killed" / "step-000000006") == []


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_so_does_one_that_offloads_to_the_cpu(tmp_path: Path, stage: int, dtype: str) -> None:
    whole = live(2, f"{RUNS}:train", tmp_path / "whole", stage, dtype, 4, 0, True)
    live(2, f"{RUNS}:train", tmp_path / "parts", stage, dtype, 2, 0, True)
    again = live(2, f"{RUNS}:train", tmp_path / "parts", stage, dtype, 4, 0, True)
    assert again == [losses[2:] for losses in whole]
    assert differences(tmp_path / "whole" / "step-000000004", tmp_path / "parts" / "step-000000004") == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((2, 3), (1, 3)), ((1, 1), (2, 3))])
def test_on_other_ranks_and_by_another_stage(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    """(ranks, stage of ZeRO) each: the same weights, moments and masters are there."""
    live(before[0], f"{RUNS}:train", tmp_path / "first", before[1], "bf16", 4)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    live(after[0], f"{RUNS}:resave", tmp_path / "second", after[1], "bf16")
    unlike = differences(tmp_path / "first" / "step-000000004", tmp_path / "second" / "again")
    assert [name for name in unlike if name.startswith(("model/", "optimizer/", "scheduler/"))] == []


@pytest.mark.slow
def test_what_keeps_its_state_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    settings = [
        ("zero", "offload_optimizer", tmp_path),
        ("zero", "offload_param", tmp_path),
        ("zero", "zero_hpz_partition_size", 2),
        ("zero", "zero_quantized_weights", True),
        ("zero", "zero_quantized_gradients", True),
        ("parallel", "autotp_size", 2),
        ("engine", "has_moe_layers", True),
        ("zero", "zero_hpz_partition_size", 1),
    ]
    (said,) = live(1, f"{RUNS}:refusals", 3, settings)
    named = ["offload_optimizer to nvme", "offload_param to nvme", "zero_hpz_partition_size", "zero_quantized_weights"]
    named += ["zero_quantized_gradients", "tensor_parallel", "experts"]
    for name, text in zip(named, said, strict=False):
        assert name in text and "save_checkpoint" in text
    assert said[-1] == ""
    assert "OnebitAdam" in live(1, f"{RUNS}:one_bit")[0]


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    whole, _ = live(2, f"{RUNS}:play_deepspeed", tmp_path / "whole", "")
    assert live(2, f"{RUNS}:play_deepspeed", tmp_path / "killed", "step 14:") == KILLED
    again, _ = live(2, f"{RUNS}:play_deepspeed", tmp_path / "killed", "")
    assert len(whole) == 20 and again == whole[-len(again) :]
