"""What one rank writes of a save, on its way: cited if a base has it, summed, copied, handed to the worker.

`SaveWork` makes an `Outgoing` once the ranks follow a plan. Knows no other rank; its caller tells them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast import events
from holdfast.buffers.device import Copier, Moments
from holdfast.commit.agree import Agreement
from holdfast.commit.order import Order
from holdfast.ondisk.datafile import base_of
from holdfast.ondisk.part import Cite
from holdfast.plan.plan import Plan
from holdfast.policies.degraded.takeover import Spares
from holdfast.policies.incremental.borrow import cite, open_base
from holdfast.policies.incremental.fingerprint import Prints, fingerprints_of
from holdfast.policies.replicas.divergence import Summed
from holdfast.state import Collected
from holdfast.write.image import Image, OpenFiles
from holdfast.write.images import images_of
from holdfast.write.write import Writing

SCALAR = 64
"""Bytes that small state of an optimizer takes for a parameter: more than it is."""


def _silent(count: int) -> None:
    """Progress that nobody is shown yet."""


@dataclass
class _Progress:
    """Whom what is written from now on is told. No method of the save: the writer would keep it, and so the state."""

    tell: Callable[[int], None] = _silent

    def __call__(self, count: int) -> None:
        self.tell(count)


@dataclass
class Outgoing:
    """This rank's data files of one save: perhaps `copy_now` some sections, then `copy` the rest, then `close`.

    What is copied is as of the moments ``after``; ``staged`` is called when every tensor is copied, or queued to be
    copied until the moments it gets, with the chance to fail the save. What is opened is added to ``opened``, for the
    caller to close or delete.
    """

    order: Order
    agreement: Agreement
    plan: Plan
    collected: Collected
    after: Moments
    staged: Callable[[Moments], None]
    opened: OpenFiles
    images: list[Image] = field(init=False)
    cites: list[Cite] = field(default_factory=list)
    prints: Prints = field(default_factory=dict)
    spares: Spares = field(default_factory=Spares)
    sums: Summed = field(init=False)
    """What this rank has summed, for the others to compare."""
    _writing: Writing | None = None
    _is_staged: set[str] = field(default_factory=set)
    _progress: _Progress = field(default_factory=_Progress)
    _looked: bool = False  # into a base
    _copied: bool = False

    def __post_init__(self) -> None:
        self.images = images_of(self.collected, self.plan, self.order.ranks, self.agreement.save)
        self.sums = Summed(self.order.compared or (lambda name: False))

    @property
    def nbytes(self) -> int:
        """Tensor bytes of all data files."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Tensor bytes of each data file."""
        return [image.nbytes for image in self.images]

    @property
    def sizes_to_come(self) -> list[int]:
        """Of the files of optimizers that have not stepped, as they will be by what their parameters take."""
        to_come = self.collected.changes.to_come
        return [
            sum(
                int(to_come.get(f"{image.section}/{base_of(piece.key)}", 0) * piece.nbytes) + SCALAR
                for piece in image.pieces
            )
            for image in self.images
            if to_come
        ]

    @property
    def on_device(self) -> bool:
        """Whether a device has to copy."""
        return any(source.device.type != "cpu" for image in self.images for source in image.sources)

    def copy_now(self, sections: set[str]) -> None:
        """Copy these sections; what the calling thread does next on a device comes after copies only queued there."""
        self._cite()
        self._keep_spares(sections)
        self._sum_replicas(sections)
        writing = self._stage([image for image in self.images if image.section in sections], _silent)
        writing.copier.moment().hold_streams()

    def copy(self, task: events.Task) -> Writing:
        """All that is not copied yet; once, then training may change what it likes."""
        if not self._copied:
            self._cite()
            task.total = self.nbytes
            self._keep_spares()
            self._sum_replicas()
        writing = self._stage([image for image in self.images if image.path not in self._is_staged], task.advance)
        if not self._copied:
            self._copied = True
            self.staged(writing.copier.moment())
        return writing

    def _cite(self) -> None:
        """Leave out what a checkpoint before this one has; once, and before anything is staged."""
        if self._looked or self.order.previous is None:
            return
        place, ranks = self.order.place, self.order.ranks
        found = cite(
            open_base(self.order.previous, place), self.images, self.plan, ranks.rank, place, opened=self.opened,
            fingerprints=fingerprints_of(ranks), copier=Copier(self.after),
        )  # fmt: skip
        self.images, self.cites, self.prints = found.images, found.cites, found.prints
        self._looked = True

    def _keep_spares(self, sections: set[str] | None = None) -> None:
        """Copy what this rank is to write if others are lost, where the tensors will have changed by then."""
        if self.agreement.bequest is not None and not self.order.still:
            self.spares.keep(self.plan, self.collected, self.order.ranks, sections, self.after)

    def _sum_replicas(self, sections: set[str] | None = None) -> None:
        """Sum what other ranks hold too, of these sections or of those left, while it holds still."""
        if self.order.compares:
            rank, copier = self.order.ranks.rank, Copier(self.after)
            self.sums.take(self.collected, self.plan, rank, self.agreement.save, copier, only=sections)

    def _stage(self, images: list[Image], progress: Callable[[int], None]) -> Writing:
        self._progress.tell = progress
        if self._writing is None:
            self._writing = self._open()
        for image in images:
            self._writing.stage(image)
            self._is_staged.add(image.path)
        return self._writing

    def _open(self) -> Writing:
        order, folder = self.order, self.order.place
        order.reached("stage")
        folder.make_folders(image.section for image in self.images)
        return Writing(
            self.images, folder, save=self.agreement.save, rank=order.ranks.rank, files=self.opened,
            slot=order.slots.take(self.sizes, pinned=self.on_device), progress=self._progress, after=self.after,
            still=order.still, strong=order.sign is not None,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for what is under way, and let memory go; never raises."""
        if self._writing is not None:
            self._writing.close()
        self.spares.clear()
