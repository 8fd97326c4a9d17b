"""One save under way, as its ranks settle it: who was given up commits nothing any more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.commit.job import Job
from holdfast.ranks.ranks import Ranks
from holdfast.save import save_in
from holdfast.storage.urls import location

LONG = 240.0


def test_a_first_rank_that_was_given_up_commits_nothing(tmp_path: Path) -> None:
    """It is held right before the commit until the other rank has had its verdict, then it may go on."""
    store, given_up = dist.HashStore(), threading.Event()

    def hold(event: holdfast.events.Event) -> None:
        if (event.kind, event.task, event.path) == ("phase", "commit", str(tmp_path / "c")):
            assert given_up.wait(LONG)

    def save(rank: int) -> holdfast.SaveFailed:
        ranks = Ranks(rank, 2, store)
        try:
            with ranks.call("save", deadline=1.0, saving=True) as call:
                state = {"model": {"w": torch.ones(10)}}
                save_in(call, Job(call.ranks, location(tmp_path / "c"), 0, "0" * 16), state, {})
        except holdfast.SaveFailed as error:
            return error
        finally:
            given_up.set()
        raise AssertionError("it was committed, although nobody waits for it")

    with holdfast.events.listen(hold), ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(save, range(2)))
    assert all(isinstance(error, holdfast.errors.RankLost) and error.rank == 0 for error in errors), errors
    assert "began to decide but gave no outcome" in str(errors[1]) and not errors[1].settled
    assert not (tmp_path / "c" / "manifest.json").exists()
