"""Ranks that stay: processes joined in a gloo group, given one job after another.

Called by the bench, one pool for each world size. A job that fails or hangs is an error of that job alone: the pool
starts afresh for the next. Never runs two jobs at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 300.0
"""Seconds that a job may take."""


class JobFailed(Exception):
    """A job that raised on a rank, or did not come back."""


@dataclass(frozen=True)
class _Failure:
    text: str


class Pool:
    """``size`` ranks, started when first needed. ``daemon``: they can have no processes of their own."""

    def __init__(self, size: int, *, daemon: bool = True) -> None:
        self.size, self.daemon = size, daemon
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., T], *args: object) -> list[T]:
        """``job(*args)`` on every rank at once, in rank order. Raises JobFailed."""
        if not self._ranks:
            self._start()
        try:
            for _, pipe in self._ranks:
                pipe.send((job, args))
            return self._collect(getattr(job, "__name__", str(job)))
        except (JobFailed, OSError):
            self.close()
            raise

    def _collect(self, name: str) -> list[Any]:
        until = monotonic() + PATIENCE
        results: dict[int, Any] = {}
        while len(results) < self.size:
            for rank, (process, pipe) in enumerate(self._ranks):
                if rank in results or not pipe.poll(0.02):
                    if rank not in results and (not process.is_alive() or monotonic() > until):
                        state = "hangs" if process.is_alive() else f"died with exit code {process.exitcode}"
                        raise JobFailed(f"rank {rank} {state} in {name}")
                    continue
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    raise JobFailed(f"rank {rank} died in {name}") from None
                if isinstance(results[rank], _Failure):
                    raise JobFailed(f"rank {rank}: {results[rank].text}")
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.jobs"])  # torch is imported once for all ranks
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, self.size, port), daemon=self.daemon)
            self._ranks.append((process, ours))  # before it starts, so that `close` ends it whenever this is stopped
            process.start()
            theirs.close()

    def close(self) -> None:
        """End the ranks, also those that hang, and the processes that they started."""
        ranks, self._ranks = [one for one in self._ranks if one[0].pid], []
        started = [one for process, _ in ranks for one in _started_by(process.pid)]
        for _, pipe in ranks:
            pipe.close()
        until = monotonic() + 2
        for process, _ in ranks:
            process.join(timeout=max(until - monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        for pid, began in started:
            if _began(pid) == began:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _started_by(pid: int) -> list[tuple[int, str]]:
    """The processes below this one, each with the time at which it began, as pids are given again."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [(child, _began(child)) for child in children] + [one for child in children for one in _started_by(child)]


def _began(pid: int) -> str:
    """In ticks since the machine began; nothing if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _rank(pipe: Connection, rank: int, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the bench let go; a barrier at the end could only hang
        try:
            answer = job(*args)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            answer = _Failure(f"{type(error).__name__}: {str(error)[:400]} ({place})")
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)  # another rank failed first, and the bench has let go
