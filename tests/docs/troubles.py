"""Each error that docs/troubleshooting.md explains, raised for real.

`test_troubleshooting` calls one after the other; `python -m tests.docs.troubles NAME FOLDER` is one rank of those that
take several. A function is called in an empty folder of its own, and has to raise or log what the page quotes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.testing import at_phase, corrupt_block, drop_file, faults


class OfTheirs:
    """A class that no reader of pickles knows."""


def small() -> dict[str, Any]:
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 1}


def nothing_there() -> None:
    holdfast.save(small(), "run/step-1")
    holdfast.open("run/step-2")


def nothing_saved_yet() -> None:
    Path("run").mkdir()
    holdfast.open("run")


def a_step_for_a_root() -> None:
    holdfast.save(small(), "step-1")
    holdfast.CheckpointManager("step-1", every=1, worker="none", signals=()).restore(small())


def the_root_of_a_run() -> None:
    holdfast.save(small(), "run/step-1")
    holdfast.open("run")


def no_manifest() -> None:
    holdfast.save(small(), "run/step-1")
    Path("run/step-1/manifest.json").unlink()
    holdfast.open("run/step-1")


def no_such_format() -> None:
    Path("notes.txt").write_text("loss was fine\n")
    holdfast.open("notes.txt")


def a_class_in_a_pickle() -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict(), "config": OfTheirs()}, "state.pt")
    holdfast.open("state.pt")


def taken() -> None:
    holdfast.save(small(), "run/step-1")
    holdfast.save(small(), "run/step-1")


def other_files() -> None:
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("\\documentclass{article}\n")
    holdfast.save(small(), "run")


def a_function_in_the_state() -> None:
    holdfast.save({"schedule": lambda step: step}, "run/step-1")


def a_full_disk() -> None:
    with faults("reserve", error="ENOSPC"):
        holdfast.save(small(), "run/step-1")


def changed_while_copied() -> None:
    state = small()

    def change() -> None:
        with torch.no_grad():
            state["model"].weight.add_(1.0)

    with holdfast.Saver(worker="thread") as saver, at_phase("stage", change):
        saver.save(state, "run/step-1").wait()


def left_over() -> None:
    state = small()
    holdfast.save(state, "run/step-1")
    holdfast.load("run/step-1", {"model": state["model"]})


def a_pattern_of_nothing() -> None:
    holdfast.save(small(), "run/step-1")
    holdfast.load("run/step-1", small(), only=["model", "optimiser"])


def a_rename_of_nothing() -> None:
    holdfast.save(small(), "run/step-1")
    holdfast.load("run/step-1", {"net": nn.Linear(4, 4)}, only="model", rename={"modle": "net"})


def another_shape() -> None:
    holdfast.save({"model": nn.Linear(4, 4)}, "run/step-1")
    holdfast.load("run/step-1", {"model": nn.Linear(4, 5)})


def another_kind_of_layer() -> None:
    holdfast.save({"model": nn.Sequential(nn.LayerNorm(4))}, "run/step-1")
    holdfast.load("run/step-1", {"model": nn.Sequential(nn.GroupNorm(2, 4))})


def a_bad_block() -> None:
    holdfast.save(small(), "run/step-1")
    corrupt_block("run/step-1", tensor="model/*", seed=1)
    holdfast.load("run/step-1", small())


def another_manifest() -> None:
    holdfast.save(small(), "run/step-1")
    path = Path("run/step-1/manifest.json")
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64", 1))
    holdfast.open("run/step-1")


def a_file_gone() -> None:
    holdfast.save(small(), "run/step-1")
    drop_file("run/step-1", file="model/*", seed=1)
    holdfast.open("run/step-1").verify()


def two_runs() -> None:
    for run in "0123456789abcdef", "fedcba9876543210":
        for step in (1, 2) if run.startswith("0") else (1,):
            holdfast.save(small(), f"run/step-{step:09d}", run=run, step=step, overwrite=True)
    with holdfast.CheckpointManager("run", every=1) as manager:
        manager.restore(small())


def not_signed() -> None:
    holdfast.tools.signing.generate("maker.pem")
    holdfast.save(small(), "run/step-1")
    holdfast.load("run/step-1", small(), require="maker.pem.pub")


def no_client() -> None:
    sys.modules["obstore"] = None  # type: ignore[assignment]
    try:
        holdfast.open("s3://bucket/run/step-1")
    finally:
        del sys.modules["obstore"]


def no_bucket() -> None:
    holdfast.save(small(), "s3://no-such-bucket/run/step-1")


# On two ranks


def differs_between_ranks() -> None:
    holdfast.save({"seen": 100 + dist.get_rank()}, "run/step-1")


def a_rank_does_not_come() -> None:
    if dist.get_rank() == 0:
        holdfast.save(small(), "run/step-1", deadline=1)


def ranks_that_do_other_things() -> None:
    holdfast.save(small(), f"run/step-{dist.get_rank()}")


def another_number_of_ranks() -> None:
    holdfast.save({"seen": holdfast.PerRank(dist.get_rank())}, "run/step-1")
    if dist.get_rank() == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        holdfast.load("run/step-1", {"seen": holdfast.PerRank(0)}, group=group)


def main(name: str) -> None:
    """One rank; the first prints the error."""
    logging.disable()
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    _meet(store, "begun")  # a rank that ends while another is still connecting fails that one
    try:
        globals()[name]()
    except Exception as error:
        if os.environ["RANK"] == "0":
            print(error, flush=True)
    if os.environ["RANK"] == "0":
        _meet(store, "ended")  # the first rank holds the store
    else:
        store.add("ended", 1)
    os._exit(0)


def _meet(store: dist.Store, what: str) -> None:
    """Wait until every rank is here."""
    store.add(what, 1)
    while store.add(what, 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1])
