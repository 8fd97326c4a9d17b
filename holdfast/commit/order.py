"""What is asked of one save on one rank, and what it is given for that.

Made by `save` and the Saver, read by `SaveWork` and by what it is made of. Never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from holdfast import events
from holdfast.errors import HoldfastError, Unsupported
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.signature import SignedFile
from holdfast.policies.incremental.borrow import Previous
from holdfast.ranks.ranks import Ranks
from holdfast.state import Recall
from holdfast.storage.place import Place
from holdfast.write.arena import Slot

REHEARSAL = "prepare"
"""What spans call a save that only plans."""


class Signing(Protocol):
    """Signs a checkpoint: its manifest, the SHA-256 of its headers, and of its attachments by name."""

    def __call__(self, record: Manifest, files: Sequence[SignedFile], attachments: Mapping[str, str], /) -> bytes: ...


class SlotSource(Protocol):
    """Where a save gets its staging memory from, and where it brings it back."""

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """A slot for files with so many tensor bytes each; ``pinned`` if a device copies into it."""

    def give(self) -> None:
        """All is written: the slot may serve another save. Idempotent."""


@dataclass(frozen=True)
class Order:
    """What one save is to do.

    ``folder`` is None for a rehearsal that only plans. ``busy`` says that this rank cannot save now, and wants all to
    skip it. ``leaves_part``: the files are to outlive this process. ``still``: nothing of the state changes before the
    save has ended. ``recall`` spares a walk. What is as it was in ``previous`` is cited. With ``degraded`` (the first
    rank's counts) others write the share of ranks that are lost while they write. ``compared``: names whose replicas
    are compared first. ``sign`` gives the first rank what signs; the others sum for it. ``committed`` is called by the
    rank that has committed, before the others hear of it.
    """

    ranks: Ranks
    folder: Place | None
    step: int | None
    overwrite: bool
    run_id: str
    slots: SlotSource
    name: str = "save"
    leaves_part: bool = False
    still: bool = False
    busy: bool = False
    recall: Recall | None = None
    previous: Previous | None = None
    degraded: bool = False
    compared: Callable[[str], bool] | None = None
    sign: Callable[[], Signing] | None = None
    committed: Callable[[Place, Manifest], None] | None = None

    def check(self) -> None:
        """Raise Unsupported for what cannot be had together."""
        if self.degraded and self.sign is not None:
            raise Unsupported(
                "what others write for lost ranks cannot be signed while they save: leave out degraded=True, or "
                "sign= and sign the checkpoint afterwards (holdfast.sign)"
            )
        if self.sign is not None and self.previous is not None:
            raise Unsupported(
                "an incremental save cannot be signed: a signature vouches for bytes of this run, and what would "
                "be borrowed is only as good as the storage that it lay on. Leave out base=, incremental= or sign="
            )

    @property
    def place(self) -> Place:
        """Where the save goes. Raises HoldfastError for a rehearsal."""
        if self.folder is None:
            raise HoldfastError("a rehearsal was to write; this is a fault of holdfast")
        return self.folder

    @property
    def compares(self) -> bool:
        """Whether replicas are compared before the commit."""
        return self.compared is not None and self.ranks.size > 1

    def reached(self, phase: str) -> None:
        """Tell whoever observes that the save is there."""
        if self.folder is not None:
            events.reached(phase, self.folder, self.ranks.rank)

    def span(self, name: str) -> AbstractContextManager[events.Opened]:
        """A part of the save, for whoever observes."""
        return events.span(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)

    def begin_span(self, name: str) -> events.Opened:
        """`span`, for one that ends elsewhere."""
        return events.begin(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)
