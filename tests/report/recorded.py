"""What ranks do in tests of timelines: save beside training, and write it down. Called on every rank of a pool."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast.report import clocks

SKEWED = 2
"""The rank whose clock is another."""

PATIENCE = 60.0


def save_beside_training(folder: str, worker: str, skew: float) -> float:
    """Two background saves and a load, in a timeline; a step of the optimizer waits for the first. Its stall."""
    rank, real, wall, kind = dist.get_rank(), time.monotonic, time.time, clocks.clock_kind
    if skew:
        clocks.clock_kind = lambda: f"{kind()}/{rank == SKEWED}"
    if skew and rank == SKEWED:
        time.monotonic = lambda: real() + skew
        time.time = lambda: wall() - 77.0  # so that it is of no help
    try:
        return _save_beside_training(Path(folder), worker)
    finally:
        time.monotonic, time.time, clocks.clock_kind = real, wall, kind


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
        with holdfast.timeline(folder / "timeline"), holdfast.Saver(worker=worker) as saver:
            saving = saver.save(state, folder / "a")
            train()
            saving.wait()
            saver.save(state, folder / "b").wait()
            holdfast.load(folder / "b", state)
    finally:
        events.ignore(hold_back)
    return saving.timing.stall
