"""Ranks that die or freeze at a phase of a save or a load."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast import events
from holdfast.events import LOADING, SAVING, Event

PHASES = (*SAVING, *LOADING)


def kill_at(
    phase: str, *, rank: int | None = None, nth: int = 1, under: str | os.PathLike[str] | None = None
) -> AbstractContextManager[None]:
    """Inside the block this process is killed (SIGKILL) when it comes to ``phase`` for the ``nth`` time.

    ``phase`` is one of `SAVING` or `LOADING`, as docs/testing.md describes them. ``rank``: only if it is that rank's,
    counted in the group that saves or loads. ``under``: only of what is saved to or loaded from that path, or below
    it; so ``nth`` counts the saves of a run, and ``under="run/step-000000100"`` names one. Raises ValueError.
    """
    return at_phase(phase, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=rank, nth=nth, under=under)


def freeze_at(
    phase: str, *, rank: int | None = None, nth: int = 1, under: str | os.PathLike[str] | None = None
) -> AbstractContextManager[None]:
    """Inside the block this process is stopped (SIGSTOP) when it comes to ``phase``, as `kill_at` counts.

    All its threads stand still until somebody sends it SIGCONT; its writer process goes on.
    """

    # Told to this thread, so that it is the first to stop: one that the process is sent may reach another thread, and
    # this one goes on for a moment.
    def stop() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    return at_phase(phase, stop, rank=rank, nth=nth, under=under)


@contextmanager
def at_phase(
    phase: str, act: Callable[[], object], *, rank: int | None = None, nth: int = 1,
    under: str | os.PathLike[str] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside the block ``act()`` is called when this process comes to ``phase``, as `kill_at` counts.

    In the thread that reached the phase, which goes on when it returns; what it raises is logged, and changes nothing.
    """
    if phase not in PHASES:
        raise ValueError(
            f"{phase!r} is no phase: of a save there are {', '.join(SAVING)}, of a load {', '.join(LOADING)}"
        )
    if nth < 1:
        raise ValueError(f"nth={nth} counts from 1")
    root, lock, left = None if under is None else os.path.abspath(under), threading.Lock(), nth

    def listener(event: Event) -> None:
        nonlocal left
        if event.kind != "phase" or event.task != phase or rank not in (None, event.rank):
            return
        if root is not None and os.path.commonpath([root, os.path.abspath(event.path)]) != root:
            return
        with lock:
            left -= 1
            comes = left == 0
        if comes:
            act()

    with events.listen(listener):
        yield
