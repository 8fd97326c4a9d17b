"""Progress bars, for anything that takes longer than two seconds: at a terminal and in a notebook, else silence.

Installed once by the package as a listener of its events. One bar a node: its first rank shows what all its ranks have
done, as far as they tell (`neighbours`). Never shows a save that nobody waits for, never raises.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from holdfast import events
from holdfast.report import display
from holdfast.report.neighbours import Hearing, Share, Telling

PATIENCE = 2.0
"""Seconds before a bar appears."""

VARIABLE = "HOLDFAST_PROGRESS"
"""The environment variable that says 0: never, or 1: also where there is no terminal, as lines of text."""

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass
class _Bar:
    """A task under way: this rank's own share, and by local rank those of its neighbours."""

    own: Share
    shares: dict[int, Share] = field(default_factory=dict)


class Bars:
    """The bars of this process: one for each task under way, shown from `PATIENCE` seconds on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._display: display.Display | None = None
        self._hearing: Hearing | None = None
        self._telling: Telling | None = None
        self._bars: dict[str, _Bar] = {}

    def __call__(self, event: events.Event) -> None:
        """Show, move or take away the bar of an event's task."""
        if event.kind == "phase" or event.task == events.BACKGROUND:
            return  # training does not wait for the latter, and a bar would disturb its own
        name = f"{event.task} {event.path}"
        with self._lock:
            if event.kind == "end":
                self._end(name, event)
            elif event.kind == "advance" and event.seconds >= PATIENCE and event.total:
                self._move(name, Share(event.done, event.total), local_rank(event.rank))

    def _move(self, name: str, share: Share, rank: int) -> None:
        if os.environ.get(VARIABLE) == "0":
            return
        if rank:
            self._telling = self._telling or Telling(rank)
            self._telling.tell(name, share)
            return
        if name not in self._bars:
            where = self._display or display.found(forced=os.environ.get(VARIABLE) == "1")
            if where is None:
                return
            self._display = where
            self._bars[name] = _Bar(share)
            if self._hearing is None:
                self._hearing = Hearing(self._heard)
        self._bars[name].own = share
        self._show(name)

    def _heard(self, rank: int, name: str, share: Share) -> None:
        """A neighbour tells how far it is; from the thread that listens."""
        with self._lock:
            if name in self._bars:
                self._bars[name].shares[rank] = share
                self._show(name)

    def _show(self, name: str) -> None:
        bar = self._bars[name]
        shares = [bar.own, *bar.shares.values()]
        if self._display is not None:
            self._display.show(
                name, sum(share.done for share in shares), sum(share.total for share in shares), _whose(len(shares))
            )

    def _end(self, name: str, event: events.Event) -> None:
        if self._telling is not None:
            self._telling.tell(name, Share(event.done, event.total), last=True)
        if self._bars.pop(name, None) is None or self._display is None:
            return
        self._display.drop(name)
        if not self._bars:
            self._display = None
            hearing, self._hearing = self._hearing, None
            if hearing is not None:
                hearing.close()


def _whose(heard: int) -> str:
    """What is said of a bar that is not the whole node's, or that is."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not size.isdecimal():  # no launcher that says so: perhaps this process is alone
        return f"{heard} ranks of this node" if heard > 1 else ""
    if heard >= int(size):
        return "node" if heard > 1 else ""
    return f"{heard} of {size} ranks of this node" if heard > 1 else "this rank's share"


def local_rank(rank: int) -> int:
    """Which rank of its node this process is, as its launcher says; without one its ``rank`` among those at work."""
    given = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    return int(given) if given.isdecimal() else rank
