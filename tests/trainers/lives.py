"""Ranks that live, are killed and live again: each life is a set of new processes, forked from one warm one.

Tests call `live(world, function, …)`: it runs on every rank at once and returns what each returned, or KILLED for all
once one has killed itself. `differences` tells how two checkpoints differ, to the bit.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import holdfast
from tests.pool import context as warm

LIMIT, GRACE = 240.0, 30.0
"""Seconds for ranks to answer, and for the others once one has raised."""

KILLED = "killed"


def die() -> None:
    """End this rank as a power cut would; the others of its life are then killed, as a launcher does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(
    rank: int, world: int, port: int, pipe: Connection, mothers: list[Connection], module: str, name: str,
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    """``mothers`` are ends of pipes that came with the fork: as long as a rank has them open too, none reads an end."""
    for end in mothers:
        end.close()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        told: tuple[bool, Any] = True, getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        told = False, traceback.format_exc()
    pipe.send(told)
    if told[0]:  # the others may still need its sockets, and the first rank's store: the mother kills all at once
        pipe.poll(None)
    os._exit(0)  # no clean-up: whatever had to be clean was


def _mother(pipe: Connection, modules: tuple[str, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            world, module, name, args = pipe.recv()
        except EOFError:
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ours: list[Connection] = []
        processes = []
        for rank in range(world):
            here, there = fork.Pipe()
            ours.append(here)
            process = fork.Process(target=_rank, args=(rank, world, port, there, [pipe, *ours], module, name, args))
            process.start()
            there.close()
            processes.append(process)
        outcome = _outcome(ours)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for here in ours:
            here.close()
        pipe.send(outcome)


def _outcome(pipes: list[Connection]) -> list[Any] | str:
    """What all ranks returned; KILLED if one was killed, else the trace of one that raised."""
    found: dict[int, Any] = {}
    trace = None
    while len(found) < len(pipes):
        # Waited for after a trace too: a rank raises when another one dies, and that may be seen a little later.
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], LIMIT if trace is None else GRACE)
        if not ready:
            silent = sorted(set(range(len(pipes))) - set(found))
            return trace or f"ranks {silent} gave no answer within {LIMIT:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                well, told = pipe.recv()
            except (EOFError, ConnectionResetError):
                return KILLED
            if not well and trace is None:
                trace = str(told)
            found[pipes.index(pipe)] = told
    return trace or [found[rank] for rank in range(len(pipes))]


_mothers: dict[tuple[str, ...], tuple[Any, Connection]] = {}


def live(world: int, function: Callable[..., Any] | str, *args: Any) -> list[Any] | str:
    """Run ``function(*args)`` on ``world`` new ranks; raises if one does. KILLED if one was killed.

    The function's module, and with it what it imports, is loaded once for all lives; here not at all, if the function
    is given as ``"module:name"``.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
    else:
        module, name = function.__module__, function.__name__
    key = (module,)
    if key not in _mothers:
        ours, theirs = warm.Pipe()  # torch is imported there already
        process = warm.Process(target=_mother, args=(theirs, key))
        process.start()
        theirs.close()
        _mothers[key] = process, ours
    pipe = _mothers[key][1]
    pipe.send((world, module, name, args))
    if not pipe.poll(LIMIT + 60):
        raise AssertionError(f"no answer within {LIMIT + 60:g} s")
    outcome = pipe.recv()
    if isinstance(outcome, str) and outcome != KILLED:
        raise AssertionError(outcome)
    return outcome


@atexit.register
def _end() -> None:
    for process, pipe in _mothers.values():
        pipe.close()
        process.join(5)
        process.kill()


def content(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by name: tensors, values, and the values of each rank."""
    checkpoint = holdfast.open(path)
    found: dict[str, Any] = {name: checkpoint.read(name) for name in checkpoint.tensors}
    found.update((name, checkpoint.value(name)) for name in checkpoint.manifest.values)
    for name in checkpoint.differing:
        for rank in range(checkpoint.world_size):
            found[f"{name}@{rank}"] = checkpoint.per_rank(name, rank)
    return found


def differences(a: Path, b: Path) -> list[str]:
    """Names of what two checkpoints do not hold alike, to the bit."""
    here, there = content(a), content(b)
    return sorted(name for name in here.keys() | there.keys() if not _equal(here.get(name), there.get(name)))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        alike = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)] if alike else []
        return alike and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (a == b or a != a and b != b)
