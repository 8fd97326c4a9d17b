"""The steps of a torchtitan run: which one is loaded, and a save under way as torchtitan's two futures."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from holdfast.dcp.opening import is_of_torch
from holdfast.errors import NotACheckpoint
from holdfast.manager import SURVIVORS
from holdfast.ranks.ranks import ranks_of
from holdfast.run.steps import Steps
from holdfast.saving import Saving
from holdfast.storage.place import Place

NAME = "step-{step}"


def find_step(root: Place, step: int) -> int:
    """The step to load, the same on all ranks: ``step``, or the newest one if it is -1; -1 if there is none.

    Raises NotACheckpoint, a FileNotFoundError, if ``step`` is named and not there.
    """

    def choose() -> int:
        steps = Steps(root, NAME)
        steps.commit_late(SURVIVORS)
        theirs = {steps.step_of(path.name) for path in steps.folders() if is_of_torch(path)}
        known = theirs | (steps.current() if step == -1 else steps.committed()).keys()
        if step == -1:
            return max(known, default=-1)
        if step not in known:
            raise NotACheckpoint(f"--checkpoint.load_step={step} not found at {root / NAME.format(step=step)}")
        return step

    with ranks_of(None).call(f"find a step of {root}") as call:
        return call.exchange("find", lambda: True, lambda notes: choose(), int)


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
