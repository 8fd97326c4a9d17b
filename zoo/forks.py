"""Runs stages of cases in processes of their own, forked from this one, so that a crash or a hang is a result.

`zoo.__main__` gives the tasks. Never starts a thread: a process that is forked must have one only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.case import Case
from zoo.verdict import Cell, Tell

_context = multiprocessing.get_context("fork")
_RANKED = ("right", "torch", "refused", "wrong")


@dataclass(frozen=True)
class Stage:
    """One function on ``world`` ranks, which has to say how each of ``columns`` ended."""

    run: Callable[[Case, Path, Tell], None]
    world: int
    columns: tuple[str, ...]
    needs: str = ""
    """A file that an earlier stage must have left; without it the stage is not run."""


@dataclass
class Task:
    """The stages of one case, one after the other."""

    case: Case
    stages: list[Stage]
    cells: dict[str, Cell] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    doing: str = ""
    open: bool = True


@dataclass
class _Running:
    task: Task
    stage: Stage
    ranks: list[_Rank]
    folder: Path
    began: float
    rest: deque[Stage]


def run(tasks: list[Task], jobs: int, limit: float) -> Iterator[Task]:
    """Run tasks, ``jobs`` at a time, and give each when it is done; a stage may take ``limit`` seconds."""
    waiting, running = deque(tasks), list[_Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.popleft()
            folder = Path(tempfile.mkdtemp(prefix="zoo-"))
            running.append(_start(task, deque(task.stages), folder))
        pipes = [rank.pipe for one in running for rank in one.ranks if rank.open]
        for pipe in wait(pipes, timeout=1.0):
            _hear(next(r for one in running for r in one.ranks if r.pipe is pipe), pipe, running)
        for one in list(running):
            late = time.monotonic() - one.began > limit
            if late or not any(rank.open for rank in one.ranks):
                running.remove(one)
                _end(one, late=late)
                if following := _following(one):
                    running.append(following)
                else:
                    shutil.rmtree(one.folder, ignore_errors=True)
                    yield one.task


def _start(task: Task, stages: deque[Stage], folder: Path) -> _Running:
    stage = stages.popleft()
    listener = socket.create_server(("127.0.0.1", 0)) if stage.world > 1 else None
    ranks = []
    sys.stdout.flush()
    for rank in range(stage.world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_child, args=(stage, task.case, folder, rank, listener, theirs))
        process.start()
        theirs.close()
        ranks.append(_Rank(process, ours))
    if listener is not None:
        listener.close()
    return _Running(task, stage, ranks, folder, time.monotonic(), stages)


def _child(stage: Stage, case: Case, folder: Path, rank: int, listener: socket.socket | None, pipe: Connection) -> None:
    os.setpgid(0, 0)  # so that writer processes end with it
    log = os.open(os.environ.get("ZOO_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = _join(rank, stage.world, listener) if listener is not None else None
    stage.run(case, folder, lambda column, verdict, text: pipe.send((column, verdict, text)))
    pipe.close()
    if store is not None:
        _leave(store, rank, stage.world)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join(rank: int, world: int, listener: socket.socket) -> dist.TCPStore:

    port = listener.getsockname()[1]
    patience = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", port, world, is_master=True, timeout=patience, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    else:
        listener.close()
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=patience, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    return store


def _leave(store: dist.TCPStore, rank: int, world: int) -> None:
    """End the group, so that no rank waits for this one, and on the first the store, once all others have ended."""
    dist.destroy_process_group()
    store.set(f"zoo/left/{rank}", b"")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"zoo/left/{other}" for other in range(world)], timedelta(seconds=10))


def _hear(rank: _Rank, pipe: Connection, running: list[_Running]) -> None:
    one = next(r for r in running if rank in r.ranks)
    try:
        column, verdict, text = pipe.recv()
    except (EOFError, OSError):
        rank.open = False
        return
    if column:
        _note(one.task, column, Cell(verdict, text))
    else:
        rank.doing = text


def _note(task: Task, column: str, cell: Cell) -> None:
    """A column is what the worst of its ranks says; the loss of another rank tells least."""
    known = task.cells.get(column)
    if known is None or _RANKED.index(cell.verdict) > _RANKED.index(known.verdict) or "/gloo/" in known.text:
        task.cells[column] = cell


def _end(one: _Running, *, late: bool) -> None:
    for rank in one.ranks:
        if rank.process.pid and late:
            for end in (lambda p: os.killpg(p, signal.SIGKILL), lambda p: os.kill(p, signal.SIGKILL)):
                try:
                    end(rank.process.pid)
                except (ProcessLookupError, PermissionError):
                    pass
        rank.process.join()
        rank.pipe.close()
    lost = next((rank for rank in one.ranks if rank.process.exitcode), one.ranks[0])
    how = "takes too long" if late else f"ended with {lost.process.exitcode}"
    for column in one.stage.columns:
        if column not in one.task.cells:
            ours = lost.doing.startswith(("holdfast", "Saver"))
            text = f"{how} at {lost.doing or 'the start'}"
            one.task.cells[column] = Cell("wrong" if ours else "torch", text)
    one.task.seconds += time.monotonic() - one.began


def _following(one: _Running) -> _Running | None:
    while one.rest:
        if not one.rest[0].needs or (one.folder / one.rest[0].needs).exists():
            return _start(one.task, one.rest, one.folder)
        for column in one.rest.popleft().columns:
            one.task.cells.setdefault(column, Cell("torch", "as above"))
    return None
