"""What is asked of one save, the stages' way of handing on a failure, and the points where policies enter.

`save` and the Saver make a `Job`; every stage of a save reads it. Never changes while the save is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from holdfast import events
from holdfast.errors import HoldfastError, Unsupported
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.signature import SignedFile
from holdfast.ranks.ranks import Ranks
from holdfast.storage.place import Place
from holdfast.write.buffer import StagingBuffer

REHEARSAL = "prepare"
"""The path that spans give for a save that only plans."""

P = ParamSpec("P")
T = TypeVar("T")


class Signing(Protocol):
    """Signs a checkpoint: its manifest, the SHA-256 of its headers, and of its attachments by name."""

    def __call__(self, record: Manifest, files: Sequence[SignedFile], attachments: Mapping[str, str], /) -> bytes: ...


class Memory(Protocol):
    """Lends a save its staging memory and takes it back."""

    def take(self, sizes: list[int], *, pinned: bool) -> StagingBuffer:
        """A staging buffer for files with this many tensor bytes each; ``pinned`` if a device copies into it."""

    def give(self) -> None:
        """Everything is written: the buffer may serve another save. Idempotent."""


@dataclass(frozen=True)
class Base:
    """The checkpoint whose files a save may reuse. ``choose`` runs when the save begins to write; None means no base.

    With ``required``, a base that cannot be read fails the save. Without, everything is written, and a warning logged.
    """

    choose: Callable[[], Place | None]
    required: bool = False


@dataclass(frozen=True)
class Job:
    """What one save is to do.

    ``folder`` is None for a rehearsal that only plans. A ``background`` save outlives this process and leaves a part
    file on disk; a save that is not in the background can count on a state that does not change until it ends.
    ``degraded`` lets other ranks write the share of ranks that are lost; the first rank's word counts. ``compared``
    selects names whose replicas are compared before the commit. ``sign`` gives the first rank its signer. ``on_commit``
    runs on the rank that has committed, before the other ranks hear of it.
    """

    ranks: Ranks
    folder: Place | None
    step: int | None
    run: str
    overwrite: bool = False
    background: bool = False
    base: Base | None = None
    degraded: bool = False
    compared: Callable[[str], bool] | None = None
    sign: Callable[[], Signing] | None = None
    on_commit: Callable[[Place, Manifest], None] | None = None

    def check(self) -> None:
        """Raise Unsupported for a place that takes no saves, and for options that exclude each other."""
        if self.folder is not None and self.folder.no_saves:
            raise Unsupported(f"nothing can be saved to {self.folder}: {self.folder.no_saves}")
        if self.degraded and self.sign is not None:
            raise Unsupported(
                "what others write for lost ranks cannot be signed while they save: leave out degraded=True, or "
                "sign= and sign the checkpoint afterwards (holdfast.tools.sign)"
            )
        if self.sign is not None and self.base is not None:
            raise Unsupported(
                "an incremental save cannot be signed: a signature vouches for bytes of this run, and what would "
                "be reused is only as good as the storage that it lay on. Leave out base=, incremental= or sign="
            )

    @property
    def name(self) -> str:
        """What observers call such a save."""
        return events.BACKGROUND if self.background else "save"

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
        """Report the phase to observers."""
        if self.folder is not None:
            events.reached(phase, self.folder, self.ranks.rank)

    def span(self, name: str) -> AbstractContextManager[events.Opened]:
        """A span of the save, reported to observers."""
        return events.span(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)

    def begin_span(self, name: str) -> events.Opened:
        """`span`, for one that ends elsewhere."""
        return events.begin(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)


@dataclass(frozen=True)
class Failed:
    """A stage that failed on this rank. It travels in the place of the stage's value to the next meeting of the ranks,
    which raises it on all of them, so that no rank waits for this one."""

    error: BaseException


def attempt(stage: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | Failed:
    """What a stage returns, or its failure. An interrupt is a failure too: the other ranks have to hear of it."""
    try:
        return stage(*args, **options)
    except BaseException as error:  # noqa: BLE001 - travels as a value, and is raised at the next meeting of the ranks
        return Failed(error)


def value_of(result: T | Failed) -> T:
    """What a stage returned. Raises its failure."""
    if isinstance(result, Failed):
        raise result.error
    return result
