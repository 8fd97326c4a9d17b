"""Steps that were committed and have lost their manifest: how they are told from saves that were killed.

`KeptSteps` asks before it sweeps a folder without a manifest. Never deletes anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.commit.folder import DELETED
from holdfast.errors import Damaged, Mismatch, NotACheckpoint, Unsupported
from holdfast.ondisk import datafile, part
from holdfast.repair.rescue import rescuable
from holdfast.run import journal
from holdfast.storage.place import Place


@dataclass(frozen=True)
class Lost:
    """A step that has lost its manifest, and the metric that it had.

    ``recorded``: the journal says that it was committed. Else its files alone make a whole checkpoint, and no more is
    known.
    """

    step: int
    metric: float | None
    recorded: bool


def data_files_in(going: Collection[str]) -> list[str]:
    """The data files among what would go of a folder that may have lost its manifest.

    None if a save was under way there, as its parts tell, or if the checkpoint was being deleted.
    """
    if DELETED in going or any(part.save_of(file) for file in going):
        return []
    return [file for file in going if datafile.save_of(file) is not None]


def lost_step(root: Place, path: Place, step: int) -> Lost | None:
    """What a folder without a manifest was, by the journal of its run; None for a save that was killed."""
    entries = journal.read(root)
    saved = [entry for entry in entries if entry.step == step and entry.outcome == "saved"]
    if saved:
        return Lost(step, saved[-1].metric, recorded=True)
    if entries or not _is_whole(path):
        return None
    return Lost(step, None, recorded=False)


def _is_whole(path: Place) -> bool:
    """Whether the data files alone make a checkpoint: those of a save that was killed hardly ever do."""
    try:
        rescuable(path)
        return True
    except (Damaged, Mismatch, NotACheckpoint, Unsupported):
        return False
