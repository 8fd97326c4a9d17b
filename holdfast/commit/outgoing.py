"""What one rank writes of one save: laid out as data files, staged, handed to the writer, and made durable.

`lay_out` makes an `Outgoing` once the ranks agree; the Saver may stage some sections early; `settle` does the rest.
Knows no other rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.stable import check_sent
from holdfast.commit.agree import Agreed, plan_for
from holdfast.commit.draft import Identity, RankNote, draft, note_of
from holdfast.commit.gather import Gathered, place_attachments, sends_from_memory
from holdfast.commit.job import Failed, Job, Memory
from holdfast.errors import Damaged, RankLost
from holdfast.ondisk import manifest, part
from holdfast.ondisk.datafile import base_of
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Part, ReusedFile
from holdfast.ondisk.signature import SignedFile
from holdfast.plan.layout import join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call
from holdfast.state.leaves import owned_values
from holdfast.write.datafiles import DataFile, OpenFiles, datafiles_of
from holdfast.write.write import Writing

SCALAR = 64
"""Bytes that small state of an optimizer takes for a parameter: more than it is."""


class Points(Protocol):
    """The points where policies enter a save, and nowhere else; `holdfast.policies.points` has them."""

    def before_staging(self, outgoing: Outgoing, sections: Collection[str] | None) -> None:
        """Before these sections (None: all that are left) are staged; may take out files that need not be written."""

    def before_commit(self, call: Call, staged: Failed | None) -> None:
        """Once everything is staged, or has failed to be. May meet the other ranks, and fail the save."""

    def sign(self, gathered: Gathered, record: Manifest, files: Sequence[SignedFile]) -> bytes | None:
        """On the rank that commits: the signature of the manifest."""

    def ranks_lost(self, lost: RankLost, call: Call, outgoing: Outgoing, task: events.Task) -> None:
        """Commit the save without ranks that were lost while they wrote. Raises RankLost if that cannot be done."""

    def committed(self, save: str) -> None:
        """The save is committed: remember what the next one needs."""

    def close(self) -> None:
        """Let memory go, whatever became of the save. Never raises."""


@dataclass(frozen=True)
class Durable:
    """What one rank has on disk of a save, before its outcome is known.

    It was durable ``at`` this moment, by `time.monotonic`. The first rank alone has the records of ``attachments``,
    knows whether it ``replaces`` an older manifest, and has a ``draft`` of the new one, if its part file holds it.
    """

    files: list[FileRecord]
    reused: list[ReusedFile]
    note: RankNote
    attachments: list[tuple[str, int, str]]
    replaces: bool
    draft: Manifest | None
    at: float


@dataclass
class Outgoing:
    """One rank's part of a save between its plan and its outcome.

    ``files`` are those that this rank writes, ``reused`` those that it need not. ``opened`` collects what was opened,
    for `settle` to close or delete. ``durable`` is what has become of it all: None until that is known,
    and Failed also if a part of it has failed before.
    """

    job: Job
    agreed: Agreed
    gathered: Gathered
    plan: Plan
    memory: Memory
    points: Points
    files: list[DataFile]
    reused: list[ReusedFile] = field(default_factory=list)
    opened: OpenFiles = field(default_factory=OpenFiles)
    writing: Writing | None = None
    staged_at: float = 0.0
    durable: Durable | Failed | None = None

    @property
    def nbytes(self) -> int:
        """Tensor bytes of all data files."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Tensor bytes of each data file."""
        return [file.nbytes for file in self.files]

    @property
    def sizes_to_come(self) -> list[int]:
        """Of the files of optimizers that have not stepped, as they will be by what their parameters take."""
        to_come = self.gathered.state.changes.to_come
        return [
            sum(
                int(to_come.get(f"{file.section}/{base_of(piece.key)}", 0) * piece.nbytes) + SCALAR
                for piece in file.pieces
            )
            for file in self.files
            if to_come
        ]

    @property
    def on_device(self) -> bool:
        return any(file.is_on_device for file in self.files)

    def stage(self, task: events.Task) -> None:
        """Copy everything that is not copied yet; after that, training may change any tensor. Does its work once."""
        if isinstance(self.durable, Failed):
            raise self.durable.error
        if self.staged_at:
            return
        self.points.before_staging(self, None)
        task.total = self.nbytes
        writing = self._open()
        writing.progress.report = task.advance
        writing.stage()
        if self.gathered.guard is not None:
            self.gathered.guard.copied(writing.copier.moment())
        self.staged_at = monotonic()

    def stage_now(self, sections: Collection[str]) -> None:
        """Copy these sections; what the calling thread does next on a device comes after copies only queued there."""
        with self.job.span("stage"):
            self.points.before_staging(self, sections)
            writing = self._open()
            writing.stage(sections)
            writing.copier.moment().hold_streams()

    def _open(self) -> Writing:
        if self.writing is None:
            job = self.job
            job.reached("stage")
            job.place.make_folders(file.section for file in self.files)
            self.writing = Writing(
                self.files, job.place, save=self.agreed.save, rank=job.ranks.rank, opened=self.opened,
                buffer=self.memory.take(self.sizes, pinned=self.on_device), after=self.gathered.moments,
                still=not job.background, strong=job.sign is not None,
            )  # fmt: skip
        return self.writing

    def finish(self, task: events.Task) -> Durable:
        """Stage what is left, and wait until everything is durable."""
        job = self.job
        with job.span("stage") as staging:
            self.stage(task)
            writing = self._open()
            writing.land()
            if self.gathered.guard is not None:
                self.gathered.guard.landed()
            staging.nbytes = self.nbytes
        self.staged_at = monotonic()
        written = writing.written()
        job.reached("write")
        with job.span("write") as sending:
            attachments, replaces, drafted = self._leave_small_files(writing)
            writing.wait_written()
            self.memory.give()
            sending.nbytes = self.nbytes
        with job.span("durable"):
            writing.finish()
            if sends_from_memory(job):
                check_sent(self.gathered.watched)
            self._check_reused()
        note = note_of(self.files, written, self.agreed.plan, self.reused)
        files = [FileRecord(*file.record) for file in written]
        durable = Durable(files, self.reused, note, attachments, replaces, drafted, monotonic())
        job.reached("durable")
        return durable

    def _leave_small_files(self, writing: Writing) -> tuple[list[tuple[str, int, str]], bool, Manifest | None]:
        """What follows the data: attachments of the first rank, then the part, which says that all is there."""
        job, save = self.job, self.agreed.save
        attachments: list[tuple[str, int, str]] = []
        small: list[tuple[str, bytes]] = []
        replaces, drafted = False, None
        if job.ranks.first:
            replaces = job.overwrite and (job.place / manifest.FILE_NAME).is_file()
            # In a store another save to this path may be under way: then nothing of theirs may have the same name.
            fresh = not replaces and not job.place.is_remote
            attachments, small = place_attachments(self.gathered.attachments, save, fresh=fresh)
        if job.background:
            drafted = self.draft(attachments) if job.ranks.first else None
            own = Part(
                version=part.version_for(self.reused, drafted), save=save, rank=job.ranks.rank,
                world_size=job.ranks.size, files=[file.record for file in writing.written()], reused=self.reused,
                manifest=drafted,
            )  # fmt: skip
            small = [*small, (part.file_name(job.ranks.rank, save), part.encode(own))]
        self.opened.paths += [job.place / path for path, _ in small]
        writing.leave([(job.place / path, data) for path, data in small])
        return attachments, replaces, drafted

    def draft(self, attachments: list[tuple[str, int, str]]) -> Manifest:
        """The manifest but for what only the writers of the files know."""
        job, agreed = self.job, self.agreed
        owned = agreed.owned or join_owned([self.gathered.layout], [(0, 0, owned_values(self.gathered.state))])
        identity = Identity(agreed.save, job.run, job.step, job.ranks.size)
        return draft(identity, self.plan, agreed.values, self.gathered.state.kinds, owned, attachments)

    def _check_reused(self) -> None:
        """Raise Damaged if a reused file is not, or no longer, in its place: what is committed must be whole."""
        for record in (reused.record for reused in self.reused):
            path = self.job.place / record.path
            size = path.size()
            if size != record.bytes:
                state = "is gone" if size is None else f"has {size} bytes instead of {record.bytes}"
                raise Damaged(f"{path}, which this save was to reuse, {state}: save again, without base=")

    def close(self) -> None:
        """Wait for what is under way, and let memory go; never raises."""
        if self.writing is not None:
            self.writing.close()
        self.points.close()
        self.memory.give()


def lay_out(job: Job, agreed: Agreed, gathered: Gathered, memory: Memory, points: Points) -> Outgoing:
    """This rank's data files as they will stand, by the plan that the ranks agreed on. Raises Mismatch, Unsupported."""
    with no_collection():  # not while waiting for other ranks: training makes garbage
        plan = plan_for(job.ranks, agreed)
        files = datafiles_of(gathered.state, plan, job.ranks, agreed.save)
        return Outgoing(job, agreed, gathered, plan, memory, points, files)
