"""Several ranks on one device, and groups that know NCCL alone: real processes, over gloo where NCCL refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import ranks
from tests.gpu.lab import REAL

ALONE = "nccl" if REAL else "gloo"
BOTH = "cpu:gloo,cuda:nccl" if REAL else "gloo"
"""NCCL refuses two ranks on one device."""


@pytest.mark.parametrize("worker", [None, "process"], ids=["blocking", "background"])
@pytest.mark.slow
def test_replicas_are_compared_on_the_device(worker: str | None, tmp_path: Path) -> None:
    for said in ranks.run(2, "gloo", "replicas", str(tmp_path), worker):
        assert said[0] == "saved"
        assert "up.weight" in said[1] and "rank 1" in said[1], said[1]
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("big", [False, True], ids=["small windows", "large"])
@pytest.mark.slow
def test_two_ranks_share_one_reading(big: bool, tmp_path: Path) -> None:
    said = ranks.run(2, "gloo", "shares", str(tmp_path), big)
    assert [one["wrong"] for one in said] == [[], []]
    assert sum(one["received"] for one in said) == said[0]["needed"]
    assert sum(one["read"] for one in said) <= 1.05 * said[0]["needed"]


@pytest.mark.slow
def test_plain_tensors_are_compared_as_they_were_at_the_call(tmp_path: Path) -> None:
    assert ranks.run(2, "gloo", "plain", str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_tensors_on_a_mesh_of_two(tmp_path: Path) -> None:
    assert ranks.run(2, "gloo", "on_a_mesh", str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("how", "backend"), [("plain", ALONE), ("mixed", ALONE), ("offloaded", BOTH)])
@pytest.mark.slow
def test_a_sharded_model(how: str, backend: str, tmp_path: Path) -> None:
    world = 1 if REAL else 2
    assert ranks.run(world, backend, "sharded", str(tmp_path), how) == [[]] * world


@pytest.mark.slow
def test_a_group_of_one_that_knows_nccl_alone(tmp_path: Path) -> None:
    assert ranks.run(1, ALONE, "alone", str(tmp_path)) == [[]]
