"""What a save in the background costs a training run on the device: how long it stands still, how fast it is copied.

A GPT trains; between two marks it makes the same steps, with a save at the first of them or without. Beside holdfast: a
copy alone, torch DCP by thread and process, with overlapped staging and without, and torch.save. Each save is deleted
once it is durable. Run by `benchmarks.gpu`, alone.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import holdfast
from benchmarks.bar import Bar
from benchmarks.gpu.part import Part, a_part, synchronize
from benchmarks.stall_systems import DCP, HOLDFAST, NOTHING, Holdfast, Started, System, make
from benchmarks.stall_train import Size, Training
from holdfast.buffers import device as staging
from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.memory import buffer

COPY, PICKLE = "a copy alone", "torch.save"
GIGABYTES = 20.0
STALL, RATE, ADDED = 10.0, 0.85, 1.02
STEPS = 4
"""From one mark to the next."""

SAVES = {COPY: 2, "holdfast process": 3, "holdfast thread": 2}
"""Timed ones; others one, after a first one that only makes their memory."""

ORDER = [COPY, *HOLDFAST, *(name for name in reversed(DCP) if name != "DCP process"), PICKLE]
"""The later ones are left out if there is no time. DCP's process is slow to stage, so it is measured overlapped."""


def size_of(gigabytes: float, small: bool) -> Size:
    """A GPT whose parameters and moments take so much; on a GPU a step takes about as long as the copy of them."""
    size = Size(width=2048, depth=0, vocabulary=32000, context=1024, batch=4, parts=4)
    if small:
        size = Size(width=128, depth=0, vocabulary=8000, context=16)
    block = Size(**{**vars(size), "depth": 1}).nbytes - size.nbytes
    return Size(**{**vars(size), "depth": max(1, -(-round(gigabytes * 1e9 - size.nbytes) // block))})


class Copy(System):
    """The least that there is: the tensors copied into pinned memory by a stream of its own, and nothing written."""

    def __init__(self, training: Training, part: Part) -> None:
        super().__init__(training)
        self.part = part

    def prepare(self, folder: Path, saves: int) -> None:
        self.memory = buffer(self.training.local_bytes)
        self.memory.view[:: 4 << 10] = bytes(len(self.memory.view[:: 4 << 10]))
        staging.pin(self.memory.address, self.training.local_bytes)

    def save(self, path: Path, step: int) -> Started:
        began, at = time.monotonic(), 0
        tensors = [self.part.there(tensor) for tensor in self.training.local_tensors()]
        tensors = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copier = Copier(Moments.now(staging.devices_of(tensors)))
        for tensor in tensors:
            copier.copy(tensor, 0, tensor.nbytes, self.memory.address + at)
            at += tensor.nbytes
        moment = copier.moment()
        done = self.when(moment.wait)
        return Started(done, staged=moment.hold_streams, copying=lambda: (done.result() - began, at))

    def close(self) -> None:
        super().close()
        staging.unpin(self.memory.address)


class OnDevice(Holdfast):
    """One Saver, prepared; who waits for its copies learns when they are made."""

    def save(self, path: Path, step: int) -> Started:
        began = time.monotonic()
        started = super().save(path, step)
        copied: Future[float] = Future()
        saving = self.saver._earlier.savings[-1]

        def watch() -> None:
            saving.wait_staged()
            copied.set_result(time.monotonic() - began)

        threading.Thread(target=watch, daemon=True).start()
        started.copying = lambda: (copied.result(), saving.timing.bytes)
        return started


class Pickle(System):
    """torch.save, made durable, while training stands still."""

    def save(self, path: Path, step: int) -> Started:
        path.mkdir()
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        with (path / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return Started(self.when(lambda: None))


def system_of(name: str, training: Training, part: Part) -> System:
    """The system of this name."""
    if name in HOLDFAST:
        return OnDevice(training, HOLDFAST[name])
    if name == COPY:
        return Copy(training, part)
    return Pickle(training) if name == PICKLE else make(name, training)


@dataclass
class Segment:
    """Seconds, each of one stretch of `STEPS` steps or of one save."""

    plain: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    hook: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    prepared: float = 0.0


def segment(system: System, training: Training, folder: Path, saves: int, plain: int) -> Segment:
    """Train on: stretches without a save, then stretches that begin with one. Waits between them are not counted."""
    found, began = Segment(), time.monotonic()
    gc.collect()
    system.prepare(folder, saves)
    found.prepared = time.monotonic() - began
    training.step()
    for number in range(plain + saves):
        training.synchronize()
        began = time.monotonic()
        started = None
        if number >= plain:
            system.gather(training.steps)
            started = system.save(folder / f"save-{number}", training.steps)
            found.call.append(time.monotonic() - began)
        for step in range(STEPS):
            training.learn()
            if started is not None and step == 0:
                training.synchronize()  # what is waited for next is the copy alone
                waiting = time.monotonic()
                started.staged()
                found.hook.append(time.monotonic() - waiting)
            training.update()
        training.synchronize()
        (found.plain if started is None else found.saved).append(time.monotonic() - began)
        if started is not None:
            found.durable.append(started.durable.result() - began)
            found.hook[-1] += started.hooked()
            copying = started.copying()
            if copying is not None:
                found.copied.append(copying[0])
            shutil.rmtree(folder / f"save-{number}", ignore_errors=True)
    return found


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


class Run:
    """All systems on one training."""

    def __init__(self, part: Part, training: Training, folder: Path, rate: float) -> None:
        self.part, self.training, self.folder, self.rate = part, training, folder, rate
        self.plain: list[float] = []
        self.gigabytes = training.local_bytes / 1e9
        self.found: dict[str, Segment] = {}

    def alone(self) -> None:
        """Without saves."""
        found = segment(System(self.training), self.training, self.folder, 0, 4)
        self.plain += found.plain
        self.part.row(system=NOTHING, stretch=middle(self.plain))

    def expected(self, name: str) -> float:
        """Seconds that a system will take: memory is made and pinned, saves are written; others write more slowly."""
        rates, saves = self.part.rates, SAVES.get(name, 1)
        memory = sum(rates.get(f"staging for a process: {what}", 0.5) for what in ("touched", "pinned"))
        written = 0.0 if name == COPY else (saves + (name in DCP)) * self.gigabytes / self.rate
        trained = (saves + 1) * 1.5 * (middle(self.plain) or 0)
        return (0.0 if name == PICKLE else memory * self.gigabytes) + written * (1 if name in HOLDFAST else 2) + trained

    def measure(self, name: str) -> None:
        """One system, if there is time for it; what it met is a row, too."""
        if self.expected(name) > self.part.left - 5:
            self.part.row(system=name, error="left out: no time for it")
            return
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        try:
            with closing(system_of(name, self.training, self.part)) as system:
                found = segment(system, self.training, folder, SAVES.get(name, 1), 1)
                self.found[name] = found
                self.plain += found.plain
                self.part.row(**self.figures(name, found))
        except Exception as error:
            self.part.row(system=name, error=f"{type(error).__name__}: {error}")
        shutil.rmtree(folder, ignore_errors=True)

    def figures(self, name: str, found: Segment) -> dict[str, object]:
        stretch, alone, copied = middle(found.saved), middle(self.plain), middle(found.copied)
        return {
            "system": name, "prepared": found.prepared, "stretch": stretch,
            "added": None if stretch is None or alone is None else stretch - alone,
            "call": middle(found.call), "hook": middle(found.hook),
            "stall": middle([a + b for a, b in zip(found.call, found.hook, strict=True)]),
            "copied": copied, "rate": self.gigabytes / copied if copied else None, "durable": middle(found.durable),
            "each": {key: value for key, value in vars(found).items() if isinstance(value, list)},
        }  # fmt: skip

    def judge(self) -> None:
        """The bars, for both workers."""
        pinned = self.part.rates.get("to the host, pinned")
        for name in HOLDFAST:
            if name not in self.found:
                continue
            figures = self.figures(name, self.found[name])
            stall, rate, added = (figures[key] for key in ("stall", "rate", "added"))
            self.part.bar(Bar(f"{name}: stall", stall and stall * 1e3, most=STALL, unit=" ms"))
            ratio = rate / pinned if rate and pinned else None
            self.part.bar(Bar(f"{name}: copy, of the raw rate", ratio, least=RATE))
            cost = added / (self.gigabytes / pinned) if added is not None and pinned else None
            self.part.bar(Bar(f"{name}: time added, of the raw copy's", cost, most=ADDED))


def main() -> None:
    """The part."""
    with a_part("training") as part:
        wanted = 0.02 if part.small else GIGABYTES
        folder, rate = part.place(int(2.2 * wanted * 1e9))
        # Nine saves in three quarters of the time: where the disk is too slow for that, the state is smaller.
        gigabytes = wanted if part.small else min(wanted, 0.75 * part.seconds * rate / 9)
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo" if part.small else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        training = Training(size_of(gigabytes, part.small), part.device)
        for _ in range(3):
            training.step()
        synchronize(part.device)
        part.fact("training", f"GPT of {training.size.parameters / 1e6:.0f} million parameters, AdamW, one device")
        part.fact("state", f"{training.local_bytes / 1e9:.2f} GB")
        part.fact("a stretch", f"{STEPS} steps")
        run = Run(part, training, folder, rate)
        run.alone()
        for name in ORDER:
            run.measure(name)
        run.judge()
        dist.destroy_process_group()
        part.fact("holdfast", holdfast.__version__)


if __name__ == "__main__":
    main()
