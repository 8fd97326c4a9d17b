"""What ranks do in tests of timelines: save beside training, and write it down. Called on every rank of a pool."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast.report import clocks
from holdfast.report.timeline import timeline

SKEWED = 2
"""The rank whose clock is another."""

PATIENCE = 60.0


def save_beside_training(folder: str, worker: str, skew: float) -> float:
    """Two background saves and a load, in a timeline; a step of the optimizer waits for the first. Its stall."""
    rank = dist.get_rank()
    with ExitStack() as patches:
        for name in ("GRACE", "ALONE"):  # a busy machine is no reason to measure nothing
            patches.enter_context(patch.object(clocks, name, PATIENCE))
        if skew:
            kind = f"{clocks.clock_kind()}/{rank == SKEWED}"
            patches.enter_context(patch.object(clocks, "clock_kind", lambda: kind))
        if skew and rank == SKEWED:
            real, wall = time.monotonic, time.time
            patches.enter_context(patch.object(time, "monotonic", lambda: real() + skew))
            patches.enter_context(patch.object(time, "time", lambda: wall() - 77.0))  # so that it is of no help
        return _save_beside_training(Path(folder), worker)


def _save_beside_training(folder: Path, worker: str) -> float:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()

    train()
    state = {"model": model, "optimizer": optimizer, "step": 7}
    step_waits = threading.Event()

    def hold_back(span: events.Span) -> None:
        """Nothing of the first save is copied before a step has begun to wait for it."""
        if span.name == "hook wait":
            step_waits.set()
        elif span.name == "stage" and span.path.endswith("a") and not span.ended:
            step_waits.wait(PATIENCE)

    events.observe(hold_back)
    try:
        with timeline(folder / "timeline"), holdfast.Saver(worker=worker) as saver:
            saving = saver.save(state, folder / "a")
            train()
            saving.wait()
            saver.save(state, folder / "b").wait()
            holdfast.load(folder / "b", state)
    finally:
        events.ignore(hold_back)
    return saving.timing.stall
