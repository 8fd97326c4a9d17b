"""What tests of devices do in a process of its own, which may end badly: `python -m tests.gpu.scripts NAME FOLDER`.

Prints one line of JSON. Never leaves a thread that keeps the process from ending.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.write.write import Writing
from tests.gpu import states
from tests.gpu.lab import REAL, Lab, a_lab

MIB = 1 << 20


def said(call: Callable[[], object]) -> str:
    """What became of it, in a word and a line."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "done"


def fails(lab: Lab, folder: Path) -> dict[str, Any]:
    """A kernel of training fails for good, before a save and while its copies are under way."""
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 1)
    training.run(1)
    with holdfast.Saver() as saver:
        saver.save(training.state, folder / "before").wait()
        saving = saver.save(training.state, folder / "first")
        lab.break_down()
        first = said(saving.wait)
        second = said(lambda: saver.save(training.state, folder / "second").wait())
        blocking = said(lambda: holdfast.save(training.state, folder / "third"))
    return {"first": first, "second": second, "blocking": blocking}


def captures(lab: Lab, folder: Path) -> dict[str, Any]:
    """A CUDA graph is captured while a save is being copied, which CUDA may not allow."""
    training = states.Training(states.CAPTURABLE["AdamW capturable"], lab.kind, 1)
    training.model.eval()  # a generator whose capture failed may stay in it
    training.run(3)
    with holdfast.Saver() as saver:
        saver.save(training.state, folder / "before").wait()
        training.optimizer.zero_grad(set_to_none=True)
        lab.late(300)
        saving = saver.save(training.state, folder / "c")

        def capture() -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                training.learn()

        captured = said(capture)
        saved = said(saving.wait)
        training.optimizer.zero_grad(set_to_none=True)
        trained = said(lambda: training.run(2))
        again = said(lambda: saver.save(training.state, folder / "after").wait())
    return {"captured": captured, "saved": saved, "trained": trained, "again": again}


def killed(lab: Lab, folder: Path) -> dict[str, Any]:
    """Killed once everything is with the writer process, which has most of it still to write."""
    state = {"large": states.noise((64 * MIB,), torch.float32, lab.kind, 1)}
    Writing.wait_written = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with holdfast.Saver() as saver:
        saver.save(state, folder / "c").wait()
    return {}


def untouched(lab: Lab, folder: Path) -> dict[str, Any]:
    """A run on the CPU: CUDA is there, and nobody uses it."""
    model = torch.nn.Linear(30, 30)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "rng": holdfast.RNG()}
    with holdfast.Saver() as saver:
        saver.prepare(state)
        saver.save(state, folder / "c").wait()
    holdfast.load(folder / "c", state)
    return {"used": torch.cuda.is_initialized()}


def loads(lab: Lab, folder: Path) -> dict[str, Any]:
    """How much the memory of the host grows for a load into a tensor of a device."""
    count = (256 if REAL else 64) * MIB
    holdfast.save({"t": states.noise((count,), torch.float32, lab.kind, 1)}, folder / "c")
    target = {"t": torch.ones(count, device=lab.kind)}
    small = {"t": torch.ones(1000, device=lab.kind)}
    holdfast.save(small, folder / "small")
    holdfast.load(folder / "small", small)  # what a first load takes, and CUDA for its first copy
    grown = _watched(lambda: holdfast.load(folder / "c", target))
    equal = torch.equal(holdfast.open(folder / "c").read("t").view(torch.int32), target["t"].cpu().view(torch.int32))
    return {"grown": grown, "nbytes": 4 * count, "equal": equal}


def _watched(call: Callable[[], object]) -> int:
    """Bytes by which the memory of this process grew at the most."""
    seen, over = [_resident()], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.append(_resident())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    over.set()
    thread.join()
    return max(seen) - seen[0]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    with a_lab() as made:
        print(json.dumps(globals()[sys.argv[1]](made, Path(sys.argv[2]))), flush=True)
