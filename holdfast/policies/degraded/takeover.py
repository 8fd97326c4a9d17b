"""A degraded commit: what lost ranks were to write, written and committed by those that are left and hold it.

`SaveWork.settle` calls `take_over` once its round has lost ranks. Never commits without every byte, never writes bytes
that are newer than the save, and never begins unless nobody else can commit any more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import torch

from holdfast import events
from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.stage import as_integers
from holdfast.buffers.still import Watched, check_sent
from holdfast.commit.agree import Agreement, Bequest
from holdfast.commit.citing import Did, joined
from holdfast.commit.commit import Identity, commit, draft, place_attachments
from holdfast.commit.folder import withdraw
from holdfast.errors import Failure, HoldfastError, RankLost, error_from
from holdfast.ondisk import blocks, manifest, names
from holdfast.ondisk.box import Box
from holdfast.ondisk.manifest import FileRecord
from holdfast.ondisk.part import Cite
from holdfast.plan.degraded import Key, TakenOver, kept_by, listed, taken_over, writer_of
from holdfast.plan.layout import OwnedJoin, OwnedValues, join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state import Collected
from holdfast.state.outline import owned_values
from holdfast.storage.place import Place
from holdfast.write.image import OpenFiles
from holdfast.write.images import images_of, memory_of
from holdfast.write.ring import write_at_once


class Spares:
    """Copies in host memory of what this rank keeps for others, of a save during which its tensors change."""

    def __init__(self) -> None:
        self._found: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self._found.values())

    def keep(
        self, plan: Plan, state: Collected, ranks: Ranks, sections: Collection[str] | None, after: Moments
    ) -> None:
        """Copy what this rank keeps for others, of these ``sections`` (None: of all), unless that is done; waits."""
        copier = Copier(after)
        for name, box in _kept(plan, ranks):
            if (name, box) not in self._found and (sections is None or names.section_of(name) in sections):
                tensor = memory_of(state, name, box)
                with copier.on(tensor.device):
                    same = as_integers(tensor.resolve_conj().resolve_neg())
                    copy = same.to("cpu", copy=True, memory_format=torch.contiguous_format)
                self._found[name, box] = copy.view(tensor.dtype)

    def source(self, state: Collected, name: str, box: Box) -> torch.Tensor:
        """The copy of a piece. Raises HoldfastError if there is none."""
        found = self._found.get((name, box))
        if found is None:
            raise HoldfastError(
                f"this rank was to keep a copy of {name}{box} and has none; this is a fault of holdfast"
            )
        return found

    def clear(self) -> None:
        """Let the memory go."""
        self._found.clear()


def _kept(plan: Plan, ranks: Ranks) -> list[Key]:
    """`kept_by`, remembered while saves follow one plan: of a million tensors it takes seconds."""
    known: tuple[Plan, list[Key]] | None = ranks.remembered.get("spares")
    if known is None or known[0] is not plan:
        known = ranks.remembered["spares"] = plan, [(name, box) for name, _, box in kept_by(plan, ranks.rank)]
    return known[1]


class _Share(msgspec.Struct, array_like=True):
    """What one rank that is left did: the files of its own share, citations, what it took over, its values if asked."""

    files: list[FileRecord]
    cites: list[Cite]
    more: list[FileRecord]
    owned: OwnedValues | None = None


class _Outcome(msgspec.Struct, array_like=True):
    """What became of an attempt, for ranks that were taken for lost. ``cause`` is None if the save is committed."""

    cause: str | None = None
    settled: bool = True
    absent: tuple[int, ...] = ()


@dataclass
class Takeover:
    """What a rank brings to take over from lost ones.

    ``records`` are those of files that the first rank has attached, known there alone; ``attached`` what this rank has
    read of them. ``did`` is None if this rank has ``failed`` itself. ``spares`` is None if the state is as it was at
    the save, which ``watched`` tells.
    """

    call: Call
    folder: Place
    save: str
    step: int | None
    overwrite: bool
    plan: Plan
    agreement: Agreement
    bequest: Bequest
    state: Collected
    attached: Mapping[str, bytes]
    records: list[tuple[str, int, str]]
    did: Did | None
    failed: BaseException | None
    spares: Spares | None
    watched: Watched
    task: events.Task
    _opened: OpenFiles = field(default_factory=OpenFiles)

    @property
    def ranks(self) -> Ranks:
        return self.call.ranks

    def run(self, lost: HoldfastError) -> None:
        """Return once the save is committed without the ranks that are ``absent`` in ``lost``.

        A rank that is one of them, and has only been slow, hears what the others did. Raises a RankLost, equal on
        every rank that is left, that says why the save failed all the same.
        """
        gone: set[int] = set()
        now = lost
        for attempt in count(1):
            gone |= set(now.absent)
            taken = taken_over(self.plan, gone, self.ranks.size, attempt=attempt, spares=self.spares is not None)
            missing = [*taken.missing, *self._values_missing(gone)]
            if missing:
                raise _refused(lost, f"Nobody else has {listed(missing)}, so that its share cannot be taken over")
            if time.monotonic() > self.ranks.limit:
                raise _refused(lost, "No time is left to take its share over")
            left = [rank for rank in range(self.ranks.size) if rank not in gone]
            try:
                if self.ranks.rank in gone:
                    self._hear(attempt)
                else:
                    self._meet(left, tuple(sorted(gone)), taken, attempt)
                events.log.warning("%s is committed without rank %s", self.folder, manifest.ranges(sorted(gone)))
                return
            except HoldfastError as error:
                if not (error.absent and error.settled):
                    why = f"The others did not get its share written: {error.cause}"
                    raise _refused(lost, why, settled=error.settled) from error
                now = error

    def _values_missing(self, gone: set[int]) -> list[str]:
        """Values that only lost ranks can tell; the first rank has those of all."""
        by = self.bequest.owned_by
        if 0 not in gone or not by:
            return []
        held = {digest for rank, digest in enumerate(by) if rank not in gone}
        return [f"the modules' and optimizers' values of rank {rank}" for rank in sorted(gone) if by[rank] not in held]

    # A rank that was taken for lost

    def _hear(self, attempt: int) -> None:
        unknown = HoldfastError("this rank came too late, and has not heard what they made of it")
        unknown.cause, unknown.settled = str(unknown), False
        try:
            word = self.ranks.find(f"{self._lane(attempt)}/outcome", 2 * self.call.deadline)
        except RuntimeError as error:  # the store is gone
            raise unknown from error
        if word is None:
            raise unknown
        outcome = msgspec.msgpack.decode(word, type=_Outcome)
        if outcome.cause is not None:
            failed = HoldfastError(outcome.cause)
            failed.cause, failed.settled, failed.absent = outcome.cause, outcome.settled, outcome.absent
            raise failed

    def _tell(self, attempt: int, outcome: _Outcome) -> None:
        try:
            self.ranks.post(f"{self._lane(attempt)}/outcome", msgspec.msgpack.encode(outcome))
        except RuntimeError as error:  # whoever comes late will look at the manifest
            events.log.debug("the store is gone (%s), and nobody who comes late hears of %s", error, self.folder)

    # Those that are left

    def _lane(self, attempt: int) -> str:
        return f"{self.save}/without/{attempt}"

    def _meet(self, left: list[int], gone: tuple[int, ...], taken: TakenOver, attempt: int) -> None:
        call = Call(self.ranks.among(left, self._lane(attempt)), self.call.label, self.call.deadline, True)
        try:
            call.settle(
                "take over",
                lambda: self._share(left, taken.plan, attempt),
                lambda shares: self._commit(call, gone, taken.plan, dict(zip(left, shares, strict=True))),
                str,
            )
        except HoldfastError as error:
            self._tell(attempt, _Outcome(error.cause, error.settled, error.absent))
            if error.settled:
                withdraw(self._opened.paths, self.folder)
            raise
        else:
            self._tell(attempt, _Outcome())
        finally:
            self._opened.close()
            self._opened = OpenFiles()

    def _share(self, left: list[int], plan: Plan, attempt: int) -> _Share:
        if self.did is None:
            raise self.failed or HoldfastError("this rank has not written its share; this is a fault of holdfast")
        small = self._attachments() if self.ranks.rank == left[0] and self.ranks.rank else []
        more = self._write(plan, attempt, small)
        owned = owned_values(self.state) if self._tells(left) else None
        return _Share(list(self.did.files), list(self.did.cites), more, owned)

    def _attachments(self) -> list[tuple[str, bytes]]:
        """Files that the first rank has attached, as this rank has read them, to be written by it in its place."""
        for name, nbytes, digest in self.bequest.attached:
            own = self.attached.get(name)
            if own is None or (len(own), blocks.digest(own)) != (nbytes, digest):
                has = "does not have" if own is None else "has another version of"
                raise HoldfastError(f"rank {self.ranks.rank} {has} {name!r}, which the first rank attached")
        attached = {name: self.attached[name] for name, *_ in self.bequest.attached}
        # Not where the first rank puts them in a fresh folder: it may come back, and take them away.
        self.records, small = place_attachments(attached, self.save, fresh=False)
        return small

    def _write(self, plan: Plan, attempt: int, small: Sequence[tuple[str, bytes]]) -> list[FileRecord]:
        """Write what this rank takes over, and wait until it is durable."""
        save, ranks = self.save, self.ranks
        source = memory_of if self.spares is None else self.spares.source
        writer = writer_of(ranks.rank, ranks.size, attempt)
        images = images_of(self.state, plan, ranks, save, writer=writer, source=source)
        self.task.total += sum(image.nbytes for image in images)
        written = write_at_once(
            images, self.folder, save=save, rank=ranks.rank, files=self._opened, progress=self.task.advance, small=small
        )
        check_sent(self.watched)
        return written

    def _tells(self, left: list[int]) -> bool:
        """Whether this rank is the first one left that has its values of modules and optimizers."""
        by, rank = self.bequest.owned_by, self.ranks.rank
        return bool(by) and left[0] != 0 and next(r for r in left if by[r] == by[rank]) == rank

    def _commit(self, call: Call, gone: tuple[int, ...], plan: Plan, did: dict[int, _Share]) -> str:
        identity = Identity(self.save, self.bequest.run, self.step, self.ranks.size, gone)
        drafted = draft(identity, plan, self.state, self._values(did), self.records)
        ranks = [did.get(rank, _Share([], [], [])) for rank in range(self.ranks.size)]
        record = joined(drafted, [Did([*one.files, *one.more], one.cites) for one in ranks])
        replaces = self.overwrite and (self.folder / manifest.FILE_NAME).is_file()
        call.confirm()
        commit(self.folder, record, replaces=replaces)
        return self.save

    def _values(self, shares: Mapping[int, _Share]) -> OwnedJoin:
        agreement = self.agreement
        if agreement.joined is not None:  # this is the first rank
            return agreement.joined
        told_by = {self.bequest.owned_by[rank]: rank for rank, share in shares.items() if share.owned is not None}
        if not told_by:
            own = self.ranks.rank
            return join_owned(agreement.layouts, [(own, agreement.layout_of[own], owned_values(self.state))])
        found = []
        for digest in sorted(told_by):  # in the order of the ranks that had them first
            rank, owned = told_by[digest], shares[told_by[digest]].owned
            if owned is not None:
                found.append((rank, agreement.layout_of[rank], owned))
        return join_owned(agreement.layouts, found)


def _refused(lost: HoldfastError, why: str, *, settled: bool = True) -> HoldfastError:
    """The failure of a save that lost ranks, with what kept the others from committing it."""
    failure = Failure(
        lost.rank or 0, lost.host or "", lost.phase or "", RankLost.__name__, f"{lost.cause}. {why}", None, None
    )
    return error_from(failure, saving=True, settled=settled, absent=lost.absent)
