"""Warm pools of real gloo ranks, one for each world size, shared by the whole test session.

Tests call `run(world, function, …)`: it runs on every rank at once and returns each rank's result.
Never reused after a rank was killed or hung: `close` it then, the next call starts a fresh one.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 240.0

CROWDED = 40
"""Process groups of one rank."""

LATE = (
    "torch._dynamo",  # otherwise by the first step of an optimizer
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "holdfast.manager",
    "holdfast.load",
    "holdfast.tools",
    "holdfast.convert",
    "holdfast.dcp",
    "holdfast.report.installed",
)
"""What is imported when it is first used, which takes seconds. None of it starts a thread."""

# A process that has imported what ranks need, and is forked for each of them: importing it costs each some 6 s.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["tests.one_mesh", "tests.meshes", "pytest", "hypothesis.strategies", *LATE, "tests.frozen"]
)


@dataclass
class RemoteError:
    """An exception of a rank, as plain data."""

    rank: int
    kinds: list[str]
    text: str
    trace: str
    fields: dict[str, Any] = field(default_factory=dict)


class RankFailed(AssertionError):
    """Raised by `run` if a rank raised."""


def _serve(rank: int, world: int, port: int, pipe: Connection, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR2, stacks.open("w"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(importlib.import_module(module), name)(*args)
            pipe.send((len(dist.distributed_c10d._world.pg_map), result))
        except BaseException as error:
            kinds = [k.__name__ for k in type(error).__mro__]
            fields = {k: getattr(error, k, None) for k in ("rank", "host", "phase", "file", "cause", "errno")}
            pipe.send((0, RemoteError(rank, kinds, str(error), traceback.format_exc(), fields)))


class Pool:
    """``world`` processes of one gloo group."""

    def __init__(self, world: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        self.stacks = Path(tempfile.mkdtemp(prefix="stacks-"))
        self.groups = 1
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, port, theirs, self.stacks / str(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's result, or its `RemoteError`."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))
        results: dict[int, Any] = {}
        while missing := [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]:
            answered = wait(missing, LIMIT)
            results.update((rank, self._result(rank, pipe)) for rank, pipe in enumerate(self.pipes) if pipe in answered)
            if not answered:
                silent = sorted(set(range(len(self.pipes))) - set(results))
                raised = [f"rank {r.rank}: {r.trace}" for r in results.values() if isinstance(r, RemoteError)]
                raised += [f"rank {rank} is at\n{self._stack(rank)}" for rank in silent]
                raise RankFailed("\n".join([f"ranks {silent} gave no answer within {LIMIT:g} s", *raised]))
        return [results[rank] for rank in range(len(self.pipes))]

    def _result(self, rank: int, pipe: Connection) -> Any:
        try:
            groups, result = pipe.recv()
            self.groups = max(self.groups, groups)
            return result
        except EOFError:
            return RemoteError(rank, ["Killed"], "the process is gone", "")

    def _stack(self, rank: int) -> str:
        """What all threads of a rank are doing."""
        os.kill(self.processes[rank].pid, signal.SIGUSR2)
        time.sleep(1)  # it writes within milliseconds
        return (self.stacks / str(rank)).read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pools: dict[int, Pool] = {}


def attempt(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` on every rank; a rank that raises gives a `RemoteError`."""
    if world not in _pools:
        _pools[world] = Pool(world)
    try:
        return _pools[world].call(function, *args)
    except RankFailed:
        close(world)
        raise


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` on every rank and return the results; raises if any rank does."""
    results = attempt(world, function, *args)
    for result in results:
        if isinstance(result, RemoteError):
            close(world)
            raise RankFailed(f"rank {result.rank}: {result.trace}")
    return results


def close(world: int) -> None:
    """End the pool of that size; the next call starts another."""
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.close()


def close_crowded() -> None:
    """End the pools whose ranks have many process groups; for between tests.

    Every mesh that a test makes leaves some behind, and gloo a thread for each pair of ranks in each: after hundreds of
    them a rank has two thousand threads, and the machine time for little else.
    """
    for world, pool in list(_pools.items()):
        if pool.groups > CROWDED:
            close(world)


@atexit.register
def _close_all() -> None:
    for world in list(_pools):
        close(world)
