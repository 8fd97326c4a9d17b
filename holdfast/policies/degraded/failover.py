"""A degraded commit: what lost ranks were to write, written and committed by the ranks that are left and hold it.

The policies call `fail_over` once a save has lost ranks. Never commits without every byte, never writes bytes newer
than the save (`Spares` holds copies of what may change), and never begins while another rank may still commit.
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
from holdfast.buffers.stable import check_sent
from holdfast.buffers.stage import as_integers
from holdfast.commit.commit import commit
from holdfast.commit.draft import Identity, Share, draft, joined
from holdfast.commit.folder import withdraw
from holdfast.commit.gather import place_attachments
from holdfast.commit.job import Job, value_of
from holdfast.commit.outgoing import Durable, Outgoing
from holdfast.errors import Failure, HoldfastError, RankLost, error_from
from holdfast.events import log
from holdfast.ondisk import blocks, manifest, names
from holdfast.ondisk.box import Box
from holdfast.ondisk.manifest import FileRecord
from holdfast.ondisk.part import ReusedFile
from holdfast.plan.degraded import Key, TakenOver, kept_by, listed, taken_over, writer_of
from holdfast.plan.layout import OwnedJoin, OwnedValues, join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state import Collected
from holdfast.state.leaves import owned_values
from holdfast.storage.place import Place
from holdfast.write.datafiles import OpenFiles, datafiles_of, memory_of
from holdfast.write.pool import write_at_once


class _OwnShare(msgspec.Struct, array_like=True):
    """What one rank that is left has done: the files of its own share, what it reuses, the files that it has taken
    over, and its values if it is asked for them."""

    files: list[FileRecord]
    reused: list[ReusedFile]
    more: list[FileRecord]
    owned: OwnedValues | None = None


class _Outcome(msgspec.Struct, array_like=True):
    """What became of an attempt, for ranks that were taken for lost. ``cause`` is None if the save is committed."""

    cause: str | None = None
    settled: bool = True
    absent: tuple[int, ...] = ()


def fail_over(lost: RankLost, call: Call, outgoing: Outgoing, spares: Spares | None, task: events.Task) -> None:
    """Return once the save is committed without the ranks that are ``absent`` in ``lost``.

    A rank that is one of them, and has only been slow, hears what the others did. ``spares`` is None if the state is
    as it was at the save. Raises a RankLost, equal on every rank that is left, that says why the save failed all the
    same.
    """
    _Failover(call, outgoing, spares, task).run(lost)


@dataclass
class _Failover:
    call: Call
    outgoing: Outgoing
    spares: Spares | None
    task: events.Task
    attachments: list[tuple[str, int, str]] = field(default_factory=list)
    opened: OpenFiles = field(default_factory=OpenFiles)

    @property
    def job(self) -> Job:
        return self.outgoing.job

    @property
    def owned_by(self) -> Sequence[int]:
        """Which distinct values of modules and optimizers each rank has; empty if all have the same."""
        note = self.outgoing.agreed.failover
        return note.owned_by if note is not None else ()

    def run(self, lost: HoldfastError) -> None:
        ranks, plan = self.call.ranks, self.outgoing.plan
        gone: set[int] = set()
        latest = lost
        for attempt in count(1):
            gone |= set(latest.absent)
            taken = taken_over(plan, gone, ranks.size, attempt=attempt, spares=self.spares is not None)
            missing = [*taken.missing, *self._values_missing(gone)]
            if missing:
                raise _refused(lost, f"Nobody else has {listed(missing)}, so that its share cannot be taken over")
            if time.monotonic() > ranks.limit:
                raise _refused(lost, "No time is left to take its share over")
            left = [rank for rank in range(ranks.size) if rank not in gone]
            try:
                if ranks.rank in gone:
                    self._hear(attempt)
                else:
                    self._meet(left, tuple(sorted(gone)), taken, attempt)
                log.warning("%s is committed without rank %s", self.job.place, manifest.ranges(sorted(gone)))
                return
            except HoldfastError as error:
                if not (error.absent and error.settled):
                    why = f"The others did not get its share written: {error.cause}"
                    raise _refused(lost, why, settled=error.settled) from error
                latest = error

    def _values_missing(self, gone: set[int]) -> list[str]:
        """Values that only lost ranks can tell; the first rank has those of all."""
        by = self.owned_by
        if 0 not in gone or not by:
            return []
        held = {digest for rank, digest in enumerate(by) if rank not in gone}
        return [f"the modules' and optimizers' values of rank {rank}" for rank in sorted(gone) if by[rank] not in held]

    # A rank that was taken for lost

    def _hear(self, attempt: int) -> None:
        unknown = HoldfastError("this rank came too late, and has not heard what they made of it")
        unknown.cause, unknown.settled = str(unknown), False
        try:
            word = self.call.ranks.find(f"{self._lane(attempt)}/outcome", 2 * self.call.deadline)
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
            self.call.ranks.post(f"{self._lane(attempt)}/outcome", msgspec.msgpack.encode(outcome))
        except RuntimeError as error:  # a rank that comes late will look at the manifest
            log.debug("the store is gone (%s): no rank that comes late hears of %s", error, self.job.place)

    # Those that are left

    def _lane(self, attempt: int) -> str:
        return f"{self.outgoing.agreed.save}/without/{attempt}"

    def _meet(self, left: list[int], gone: tuple[int, ...], taken: TakenOver, attempt: int) -> None:
        call = Call(self.call.ranks.among(left, self._lane(attempt)), self.call.label, self.call.deadline, True)
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
                withdraw(self._withdrawn(error.absent), None)
            raise
        else:
            self._tell(attempt, _Outcome())
        finally:
            self.opened.close()
            self.opened = OpenFiles()

    def _withdrawn(self, lost: Collection[int]) -> list[Place]:
        """What this rank wrote for an attempt that has failed, and nobody writes again."""
        if self.call.ranks.rank not in lost:
            return self.opened.paths
        # The next attempt, of which a lost rank knows nothing, has its attachments in the same place.
        attached = {self.job.place / path for path, *_ in self.attachments}
        return [path for path in self.opened.paths if path not in attached]

    def _share(self, left: list[int], plan: Plan, attempt: int) -> _OwnShare:
        durable = self.outgoing.durable
        if durable is None:
            raise HoldfastError("this rank has not written its share; this is a fault of holdfast")
        own: Durable = value_of(durable)
        rank = self.call.ranks.rank
        self.attachments = own.attachments
        small = self._attachments() if rank == left[0] and rank else []
        more = self._write(plan, attempt, small)
        owned = owned_values(self.outgoing.gathered.state) if self._tells(left) else None
        return _OwnShare(own.files, own.reused, more, owned)

    def _attachments(self) -> list[tuple[str, bytes]]:
        """Files that the first rank has attached, as this rank has read them, to be written by it in its place."""
        note, read = self.outgoing.agreed.failover, self.outgoing.gathered.attachments
        attached = note.attached if note is not None else []
        for name, nbytes, digest in attached:
            own = read.get(name)
            if own is None or (len(own), blocks.digest(own)) != (nbytes, digest):
                has = "does not have" if own is None else "has another version of"
                raise HoldfastError(f"rank {self.call.ranks.rank} {has} {name!r}, which the first rank attached")
        # Not where the first rank puts them in a fresh folder: it may come back, and take them away.
        self.attachments, small = place_attachments(
            {name: read[name] for name, *_ in attached}, self.outgoing.agreed.save, fresh=False
        )
        return small

    def _write(self, plan: Plan, attempt: int, small: Sequence[tuple[str, bytes]]) -> list[FileRecord]:
        """Write what this rank takes over, and wait until it is durable."""
        save, ranks, gathered = self.outgoing.agreed.save, self.call.ranks, self.outgoing.gathered
        source = memory_of if self.spares is None else self.spares.source
        writer = writer_of(ranks.rank, ranks.size, attempt)
        files = datafiles_of(gathered.state, plan, ranks, save, writer=writer, source=source)
        self.task.total += sum(file.nbytes for file in files)
        written = write_at_once(
            files, self.job.place, save=save, rank=ranks.rank, opened=self.opened, progress=self.task.advance,
            small=small,
        )  # fmt: skip
        check_sent(gathered.watched)
        return written

    def _tells(self, left: list[int]) -> bool:
        """Whether this rank is the first one left that has its values of modules and optimizers."""
        by, rank = self.owned_by, self.call.ranks.rank
        return bool(by) and left[0] != 0 and next(r for r in left if by[r] == by[rank]) == rank

    def _commit(self, call: Call, gone: tuple[int, ...], plan: Plan, own_shares: dict[int, _OwnShare]) -> str:
        job, agreed = self.job, self.outgoing.agreed
        run = agreed.failover.run if agreed.failover is not None else job.run
        identity = Identity(agreed.save, run, job.step, self.call.ranks.size, gone)
        kinds = self.outgoing.gathered.state.kinds
        drafted = draft(identity, plan, agreed.values, kinds, self._owned(own_shares), self.attachments)
        shares = [own_shares.get(rank, _OwnShare([], [], [])) for rank in range(identity.world_size)]
        record = joined(drafted, [Share([*share.files, *share.more], share.reused) for share in shares])
        replaces = job.overwrite and (job.place / manifest.FILE_NAME).is_file()
        call.confirm()
        commit(job.place, record, replaces=replaces)
        return agreed.save

    def _owned(self, shares: Mapping[int, _OwnShare]) -> OwnedJoin:
        """The values of modules and optimizers of all ranks."""
        agreed, own = self.outgoing.agreed, self.call.ranks.rank
        if agreed.owned is not None:  # this is the first rank
            return agreed.owned
        rank_of = {self.owned_by[rank]: rank for rank, share in shares.items() if share.owned is not None}
        if not rank_of:
            values = owned_values(self.outgoing.gathered.state)
            return join_owned(agreed.layouts, [(own, agreed.layout_of[own], values)])
        values_of = []
        for digest in sorted(rank_of):  # in the order of the ranks that had them first
            rank, owned = rank_of[digest], shares[rank_of[digest]].owned
            if owned is not None:
                values_of.append((rank, agreed.layout_of[rank], owned))
        return join_owned(agreed.layouts, values_of)


def _refused(lost: HoldfastError, why: str, *, settled: bool = True) -> HoldfastError:
    """The failure of a save that lost ranks, with what kept the others from committing it."""
    failure = Failure(
        lost.rank or 0, lost.host or "", lost.phase or "", RankLost.__name__, f"{lost.cause}. {why}", None, None
    )
    return error_from(failure, saving=True, settled=settled, absent=lost.absent)


class Spares:
    """Copies in host memory of what this rank keeps for other ranks, for a save during which its tensors change."""

    def __init__(self) -> None:
        self._copies: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def keep(
        self, plan: Plan, state: Collected, ranks: Ranks, sections: Collection[str] | None, after: Moments
    ) -> None:
        """Copy what this rank keeps for others, of these ``sections`` (None: of all), unless that is done; waits."""
        copier = Copier(after)
        for name, box in _kept(plan, ranks):
            if (name, box) not in self._copies and (sections is None or names.section_of(name) in sections):
                tensor = memory_of(state, name, box)
                with copier.on(tensor.device):
                    same = as_integers(tensor.resolve_conj().resolve_neg())
                    copy = same.to("cpu", copy=True, memory_format=torch.contiguous_format)
                self._copies[name, box] = copy.view(tensor.dtype)

    def source(self, state: Collected, name: str, box: Box) -> torch.Tensor:
        """The copy of a piece. Raises HoldfastError if there is none."""
        copy = self._copies.get((name, box))
        if copy is None:
            raise HoldfastError(
                f"this rank was to keep a copy of {name}{box} and has none; this is a fault of holdfast"
            )
        return copy

    def clear(self) -> None:
        """Let the memory go."""
        self._copies.clear()


def _kept(plan: Plan, ranks: Ranks) -> list[Key]:
    """`kept_by`, remembered while saves follow one plan: of a million tensors it takes seconds."""
    known: tuple[Plan, list[Key]] | None = ranks.remembered.get("spares")
    if known is None or known[0] is not plan:
        known = ranks.remembered["spares"] = plan, [(name, box) for name, _, box in kept_by(plan, ranks.rank)]
    return known[1]
