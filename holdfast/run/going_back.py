"""Going back to an earlier step: which later steps of a run no longer count, as training has gone on without them.

A manager writes the mark ``.went-back`` beside the steps with the first save after it has gone back; `Steps` reads it.
Never deletes a step.
"""

from __future__ import annotations

import secrets

import msgspec

from holdfast.errors import Damaged, StorageError
from holdfast.events import log
from holdfast.storage.place import Place

FILE = ".went-back"
"""The name of the mark, below the root of a run."""


class WentBack(msgspec.Struct, frozen=True):
    """Training went on from the step ``to``: the later ones that are of these ``saves`` do not count.

    They are named by their save ids, so a step counts again once it has been made again.
    """

    to: int
    saves: frozenset[str]

    def leaves(self, step: int | None, save: str) -> bool:
        """Whether this save of a step no longer counts."""
        return step is not None and step > self.to and save in self.saves


def read(root: Place) -> WentBack | None:
    """The mark of a run; None if it never went back. Raises Damaged, StorageError."""
    path = root / FILE
    try:
        return msgspec.json.decode(path.read_small(), type=WentBack)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Damaged(
            f"{path} cannot be read ({error}): it says which steps do not count since training went back. Delete it, "
            "and the steps that training left behind"
        ) from error


def write(root: Place, mark: WentBack) -> None:
    """Put the mark of a run in the place of an older one. Raises StorageError."""
    try:
        root.make_folder()
        (root / FILE).replace_small(msgspec.json.encode(mark), f"{FILE}.{secrets.token_hex(4)}.tmp")
    except OSError as error:
        raise StorageError(f"cannot note in {root} that training went back to step {mark.to}: {error}") from error
    log.info("%s goes on from step %d: %d later steps no longer count", root, mark.to, len(mark.saves))
