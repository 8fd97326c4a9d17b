"""The metrics that the steps of a run were saved with, and which of two metrics the run calls the better one.

`Steps` owns one `Metrics`. Never reads a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.events import log
from holdfast.run.keep import Mode
from holdfast.run.whole import Notes, notes_of
from holdfast.storage.place import Place


class Metrics:
    """What managers noted with the steps of ``root``. In a store each look costs a request: it is remembered."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._notes: dict[str, Notes] = {}
        self._recorded: Mode | None = None
        self._warned = False

    def of(self, path: Place) -> float | None:
        """The metric that a step was saved with; None if it was saved without. Raises StorageError."""
        return self._noted(path).metric

    def mode(self, said: Mode | None, among: Mapping[int, Place]) -> Mode:
        """Which metric is the better one: as ``said``, else as the newest of these steps recorded it, else "min".

        A contradiction is logged once. Raises StorageError.
        """
        if self._recorded is None:
            modes = (self._noted(among[step]).mode for step in sorted(among, reverse=True))
            self._recorded = next((mode for mode in modes if mode is not None), None)
        if said is not None and self._recorded not in (None, said) and not self._warned:
            self._warned = True
            log.warning(
                "mode=%r counts, but the steps of %s were saved with mode=%r: check which metric is the better one",
                said, self._root, self._recorded,
            )  # fmt: skip
        return said or self._recorded or "min"

    def _noted(self, path: Place) -> Notes:
        if path.name not in self._notes or not path.is_remote:
            self._notes[path.name] = notes_of(path)
        return self._notes[path.name]
