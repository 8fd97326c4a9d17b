"""A save under way as torchtitan's two futures: one for the copying, one for the save.

`titan` makes both for each save beside training, as trainers look at `staging_future` and `save_future`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from holdfast.saving import Saving


@dataclass(frozen=True)
class Staging:
    """The copying of one save, with the calls of a future."""

    saving: Saving

    def done(self) -> bool:
        """Whether everything is copied."""
        try:
            self.saving.wait_staged(0)
        except TimeoutError:
            return False
        return True

    def result(self) -> None:
        """Wait until everything is copied. A failure of the save is raised by the save's own future, not by this."""
        self.saving.wait_staged()


def upload_of(saving: Saving) -> Future[Any]:
    """Done once ``saving`` is committed. From now on this future is what raises its failure."""
    saving.hear()
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def settle(done: Saving) -> None:
        if done.failed is not None:
            future.set_exception(done.failed)
        else:
            future.set_result(None)

    saving.add_done_callback(settle)
    return future
