"""The earlier saves of a Saver: whose outcome a call waits for, which failure is yet to be raised, and open Savers.

A Saver owns one `EarlierSaves`. Each failure is raised once, and on all ranks at the same call. An interpreter that
ends waits for the saves of open Savers; a forked child leaves them alone.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from holdfast import events
from holdfast.events import log
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.saving.saving import Saving
from holdfast.storage.place import Place


class EarlierSaves:
    """The last save, and those whose outcome somebody may still have to hear of, oldest first."""

    def __init__(self) -> None:
        self.savings: list[Saving] = []
        self._unheard: list[Saving] = []

    @property
    def last(self) -> Saving | None:
        """The last save that was begun."""
        return self.savings[-1] if self.savings else None

    def wait_for_room(self, count: int, folder: Place, rank: int, step: int | None) -> BaseException | None:
        """Wait until fewer than ``count`` saves are under way, and none to ``folder``; the earlier failure to raise.

        The save is then skipped on every rank, also on one whose user has heard of the failure: so ranks stay in step.
        """
        # For the outcome of the save that had the buffer, not just for its memory: then all ranks raise its failure, or
        # go on, at the same call. By then the buffer is free.
        same = [number for number, saving in enumerate(self.savings, 1) if saving.path == folder]
        ended = self.savings[: max(len(self.savings) - count + 1, 0, *same)]
        under_way = [saving for saving in ended if not saving.done]
        waiting = events.begin("slot wait", folder, rank, step=step) if under_way else events.Opened()
        for saving in under_way:
            saving.known()
        waiting.end()
        with interrupts_wait():
            self.savings = self.savings[len(ended) :] or ended[-1:]
            return self._hear(ended)

    def is_under_way(self, folder: Place) -> bool:
        """Whether a save to ``folder`` has no outcome yet: of two, the older one could be the last to commit."""
        return any(saving.path == folder and not saving.done for saving in self.savings)

    def forget_ended(self) -> None:
        """Drop the saves that have an outcome, but keep the first failure that nobody has heard of."""
        with interrupts_wait():
            ended = [saving for saving in self.savings if saving.done]
            self.savings = [saving for saving in self.savings if saving not in ended] or ended[-1:]
            self._unheard = [saving for saving in [*self._unheard, *ended] if _is_unheard(saving)][:1]

    def wait(self) -> None:
        """Wait until every save has an outcome."""
        for saving in list(self.savings):
            saving.known()

    def raise_unheard(self) -> None:
        """Raise the first failure that nobody has heard of."""
        failure = self._hear(self.savings)
        if failure is not None:
            raise failure

    def _hear(self, savings: list[Saving]) -> BaseException | None:
        """The first failure that nobody has heard of; with this all of them are heard of."""
        unheard = [saving for saving in [*self._unheard, *savings] if _is_unheard(saving)]
        self._unheard = []
        for saving in unheard:
            saving.hear()
        return unheard[0].failed if unheard else None

    def stay_behind(self) -> None:
        """In a forked child: the threads of the saves are its parent's alone."""
        for saving in self.savings:
            saving.stay_behind()
        self.savings, self._unheard = [], []


def _is_unheard(saving: Saving) -> bool:
    return saving.failed is not None and not saving.heard and not saving.skipped


class _Saver(Protocol):
    def close(self) -> None: ...

    def _stay_behind(self) -> None: ...


open_savers: weakref.WeakSet[_Saver] = weakref.WeakSet()


@atexit.register
def _finish_last_saves() -> None:
    for saver in list(open_savers):
        try:
            saver.close()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            log.error("the last save failed: %s", error)


def _after_fork() -> None:
    for saver in list(open_savers):
        saver._stay_behind()
    open_savers.clear()


os.register_at_fork(after_in_child=_after_fork)
