"""In the place of a `Saver`, for a manager without a worker: training waits for each save.

Never raises a save's failure itself: like one in the background, it is told by the `Saving`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from holdfast.commit.commit import Attached
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.incremental.borrow import Previous
from holdfast.policies.signing.keys import Key
from holdfast.save import save
from holdfast.saving import Saving
from holdfast.storage.place import Place


class Foreground:
    """Saves in the calling thread, with the arguments and calls of a `Saver`, as far as the manager makes them."""

    def __init__(
        self, *, group: dist.ProcessGroup | None, deadline: float, degraded: bool, check_replicas: bool | Patterns,
        sign: Key | Literal[True] | None,
    ) -> None:  # fmt: skip
        self._group, self._deadline, self._degraded = group, deadline, degraded
        self._check_replicas, self._sign = check_replicas, sign

    def prepare(self, state: Mapping[str, Any]) -> None:
        """There is nothing that could be done before."""

    def save(
        self, state: Mapping[str, Any], path: Place, *, step: int | None, base: Saving | Previous | None,
        files: Attached, overwrite: bool, run: str | None, label: str | None,
    ) -> Saving:  # fmt: skip
        """Save ``state`` to ``path``; the outcome is known when this returns."""
        saving = Saving(path, step, base if isinstance(base, Saving) else None)
        previous = Previous(base.to_cite) if isinstance(base, Saving) else base
        saving.follow(
            lambda: save(
                state, path, step=step, base=previous, files=files, overwrite=overwrite, group=self._group,
                deadline=self._deadline, run=run, label=label, degraded=self._degraded,
                check_replicas=self._check_replicas, sign=self._sign,
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
