"""The saves of a manager that still count: under way, failed and not heard of, and the last one that took place.

The manager owns one. Never starts a save; waits for those that it knows only when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.saving import Saving


class Recent:
    """Saves by number, from 1 on: all ranks begin the same ones. ``raises``: failures are kept until they are raised.

    One thread adds, any may look.
    """

    def __init__(self, *, raises: bool) -> None:
        self.begun = 0
        self._raises = raises
        self._savings: dict[int, Saving] = {}  # never changed, only replaced

    def __iter__(self) -> Iterator[Saving]:
        return iter(self._savings.values())

    def __reversed__(self) -> Iterator[Saving]:
        return reversed(self._savings.values())

    def add(self, saving: Saving) -> int:
        """A save has begun; returns its number. Those that count no more are forgotten."""
        done = {number for number, s in self._savings.items() if s.done}  # asked once: any may end meanwhile
        last = max((number for number in done if not self._savings[number].skipped), default=None)
        unheard = self.unheard
        counting = {n: s for n, s in self._savings.items() if n == last or n not in done or n in unheard}
        self.begun += 1
        self._savings = {**counting, self.begun: saving}
        return self.begun

    @property
    def under_way(self) -> list[Saving]:
        """Those under way, oldest first."""
        return [saving for saving in self if not saving.done]

    @property
    def unheard(self) -> list[int]:
        """Numbers of those whose failure is still to be raised."""
        failed = {n: s for n, s in self._savings.items() if s.failed is not None and not s.skipped}
        return [number for number, saving in failed.items() if self._raises and not saving.heard]

    def raise_failure(self, number: int) -> None:
        """Raise the failure of a save, unless that was done. Waits for its outcome."""
        saving = self._savings.get(number)
        if saving is not None and not saving.settled() and not saving.heard:
            saving.wait()

    def settle(self) -> None:
        """Wait for all outcomes; raises none."""
        for saving in self:
            saving.settled()

    def hear(self) -> None:
        """What has failed, or will, is not raised any more."""
        for saving in self:
            saving.hear()
