"""Ranks that die or freeze while they write: the others commit, bit for bit, or say what nobody else has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.programs import run_module

FREEZE = 19
FSDP = "Nobody else has model/0.weight["
UNSURE = "began to decide but gave no outcome"


def run(folder: Path, trials: list[dict[str, Any]]) -> None:
    ended = run_module("tests.policies.degraded.degraded_trials", folder, json.dumps(trials), seconds=280)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert json.loads(ended.stdout.splitlines()[-1])["trials"] == len(trials)


@pytest.mark.slow
def test_a_rank_is_lost(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"kind": "hsdp", "at": {"3": "durable"}, "lost": [3], "worker": "process"},
            {"kind": "fsdp", "at": {"2": "write"}, "refused": FSDP},
        ],
    )


@pytest.mark.slow
def test_the_first_rank_is_lost(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"at": {"0": "write"}, "lost": [0], "base": True},
            {"at": {"0": "durable"}, "lost": [0], "signal": FREEZE, "worker": "thread"},
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["none", "thread", "process"])
@pytest.mark.parametrize("kind", ["ddp", "hsdp", "stages"])
def test_each_rank_dies(kind: str, worker: str, tmp_path: Path) -> None:
    trials = [
        {"kind": kind, "worker": worker, "at": {str(rank): stage}, "lost": [rank]}
        for rank in range(4)
        for stage in ("write", "durable")
    ]
    run(tmp_path, trials)


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["none", "process"])
def test_each_rank_freezes_and_wakes(worker: str, tmp_path: Path) -> None:
    trials = [
        {"worker": worker, "at": {str(rank): stage}, "lost": [rank], "signal": FREEZE}
        for rank in range(4)
        for stage in ("write", "durable")
    ]
    run(tmp_path, trials)


@pytest.mark.slow
def test_a_rank_wakes_after_others_have_written_what_it_took_over(tmp_path: Path) -> None:
    run(tmp_path, [{"at": {"0": "write", "1": "taken over"}, "lost": [0, 1], "signal": FREEZE}])


@pytest.mark.slow
def test_folders_of_the_next_attempt_stay(tmp_path: Path) -> None:
    run(tmp_path, [{"at": {"0": "write", "1": "take over"}, "lost": [0, 1], "crossing": True}])


@pytest.mark.slow
def test_several_are_lost(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"at": {"0": "write", "1": "write", "2": "durable"}, "lost": [0, 1, 2]},
            {"at": {"1": "write", "2": "take over"}, "lost": [1, 2]},
            {"at": {"0": "write", "1": "take over"}, "lost": [0, 1]},
            {"kind": "hsdp", "at": {"0": "write", "1": "write"}, "lost": [0, 1]},
            {"kind": "hsdp", "at": {"0": "write", "2": "write"}, "refused": "Nobody else has model/0.weight["},
            {"worker": "thread", "at": {"0": "write", "1": "durable"}, "lost": [0, 1]},
            {"worker": "thread", "at": {"0": "write", "2": "durable"}, "refused": "Nobody else has "},
            {"at": {"1": "write", "0": "commit"}, "refused": UNSURE},
        ],
    )


@pytest.mark.slow
def test_what_nobody_else_has(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"kind": "per rank", "at": {"1": "write"}, "refused": "Nobody else has mine of rank 1"},
            {"kind": "fsdp", "at": {"0": "durable"}, "refused": FSDP, "worker": "process"},
            {"kind": "fsdp", "at": {"1": "write"}, "refused": FSDP, "overwrite": True},
            {"files": "first", "at": {"0": "write"}, "refused": "rank 1 does not have 'config.json'"},
            {"files": "first", "at": {"3": "write"}, "lost": [3]},
            {"at": {"0": "write"}, "refused": "never came to phase 'write'", "degraded": False},
        ],
    )


@pytest.mark.slow
def test_over_an_older_checkpoint_and_beside_a_base(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"at": {str(rank): stage}, "lost": [rank], **what}
            for rank, stage in ((0, "durable"), (2, "write"))
            for what in ({"overwrite": True}, {"base": True}, {"base": True, "worker": "process"})
        ],
    )


def test_not_with_tiers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out fast="):
        holdfast.CheckpointManager(tmp_path / "slow", every=1, fast=tmp_path / "fast", degraded=True)


def test_one_process_needs_nobody(tmp_path: Path) -> None:
    saved = holdfast.save({"a": {"x": 1}}, tmp_path / "1", degraded=True)
    assert "lost" not in saved.manifest.producer
    with holdfast.CheckpointManager(tmp_path / "run", every=1, degraded=True, signals=()) as manager:
        manager.step(1, {"a": {"x": 1}})
