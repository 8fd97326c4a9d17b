"""Refuses a run that is to start from scratch in a folder that holds steps already."""

from __future__ import annotations

from holdfast.manager import CheckpointManager


def refuse_old_steps(manager: CheckpointManager, argument: str) -> None:
    """Raise ValueError if there are steps below the manager's root, although ``argument`` says not to go on from them.

    Else training would begin, its steps would be older than those by their numbers, so be deleted first, and the save
    that comes to the number of one of them would fail.
    """
    steps = manager.steps()
    if steps:
        raise ValueError(
            f"{argument} starts from scratch, and {manager.root} holds steps of an earlier run, up to {steps[-1]}: "
            "give it a root of its own, or delete those steps first"
        )
