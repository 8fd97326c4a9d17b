"""In the place of a `Saver`, for a manager without a worker: training waits for each save.

Never raises the failure of a save itself: the `Saving` does, as for a save in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.commit.job import Base
from holdfast.run.options import ManagerOptions
from holdfast.save import save
from holdfast.saving import Saving
from holdfast.storage.place import Place


class Foreground:
    """Saves in the calling thread, with the calls of a `Saver`, as far as the manager makes them."""

    def __init__(self, options: ManagerOptions) -> None:
        self._options = options

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Nothing can be done before the first save."""

    def save(
        self, state: Mapping[str, Any], path: Place, *, step: int | None, base: Saving | Base | None, **how: Any
    ) -> Saving:
        """Save ``state`` to ``path``; the outcome is known when this returns."""
        options, saving = self._options, Saving(path, step, base if isinstance(base, Saving) else None)
        previous = Base(base.to_reuse) if isinstance(base, Saving) else base
        saving.follow(
            lambda: save(
                state, path, step=step, base=previous, group=options.group, deadline=options.deadline,
                degraded=options.degraded, check_replicas=options.check_replicas, sign=options.sign, **how,
            )
        )  # fmt: skip
        return saving

    def under_way(self, path: Place) -> Saving | None:
        """None: an interrupted `save` is over."""
        return None

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self, *, timeout: float | None = None) -> None:
        """Nothing is under way."""
