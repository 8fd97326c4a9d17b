"""The steps of a torchtitan run: what they are called, and which one is loaded.

`titan` asks it. Finds the steps that holdfast has saved and those of torchtitan's own manager.
"""

from __future__ import annotations

from holdfast.dcp.opening import is_of_torch
from holdfast.errors import NotACheckpoint
from holdfast.manager import SURVIVORS
from holdfast.ranks.ranks import ranks_of
from holdfast.run.steps import Steps
from holdfast.storage.place import Place

NAME = "step-{step}"


def find_step(root: Place, step: int) -> int:
    """The step to load, the same on all ranks: ``step``, or the newest one if it is -1; -1 if there is none.

    Raises NotACheckpoint, a FileNotFoundError, if ``step`` is named and not there.
    """

    def choose() -> int:
        steps = Steps(root, NAME)
        steps.commit_late(SURVIVORS)
        known = {steps.step_of(path.name) for path in steps.folders() if is_of_torch(path)} | steps.committed().keys()
        if step == -1:
            return max(known, default=-1)
        if step not in known:
            raise NotACheckpoint(f"--checkpoint.load_step={step} not found at {root / NAME.format(step=step)}")
        return step

    with ranks_of(None).call(f"find a step of {root}") as call:
        return call.exchange("find", lambda: True, lambda notes: choose(), int)
