"""One save under way on one rank: collect, agree, plan, write what this rank owns, settle, commit.

`save` runs it through at once, the Saver in the background. Never leaves a moment without a whole checkpoint, and
never commits half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import msgspec

from holdfast import events
from holdfast.engine import storage
from holdfast.engine.agree import Agreement, Bequest, agree, plan_for
from holdfast.engine.arena import Slot
from holdfast.engine.borrow import Previous, borrowed_is_there, cite, open_base
from holdfast.engine.citing import Did, joined
from holdfast.engine.commit import (
    Attached,
    Identity,
    check_attachment,
    commit,
    draft,
    place_attachments,
    read_attachments,
    readable_attachments,
    standing,
)
from holdfast.engine.device import Copier, Moments, devices_of
from holdfast.engine.divergence import Summed, compare
from holdfast.engine.fingerprint import Fingerprints, Prints
from holdfast.engine.folder import prepare, withdraw
from holdfast.engine.images import images_of
from holdfast.engine.layout import Layout, join_owned, layout_of, owned_values
from holdfast.engine.memory import no_collection
from holdfast.engine.parts import take_away
from holdfast.engine.plan import Plan
from holdfast.engine.ranks import Call, Ranks
from holdfast.engine.state import Collected, Recall, collect
from holdfast.engine.still import Watched, check_sent, watch_all
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.takeover import Spares, Takeover
from holdfast.engine.write import Image, OpenFiles, Writing
from holdfast.errors import HoldfastError, RankLost, Unsupported
from holdfast.ondisk import blocks, manifest, part, signature
from holdfast.ondisk.datafile import base_of, file_name
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import CITING, VERSION, Cite, Part
from holdfast.ondisk.signature import SignedFile

_DIGEST = 16  # bytes of an XXH3-128

REHEARSAL = "prepare"
"""What spans call a save that only plans."""

SCALAR = 64
"""Bytes that small state of an optimizer takes for a parameter: more than it is."""


class _Note(msgspec.Struct, array_like=True):
    """What one rank did: its durable files, by section, as no path has to be told; its plan; what it cites.

    A file's last item is the digest of its header, followed by the header's SHA-256 if the save is signed.
    """

    files: list[tuple[str, int, int, int, bytes]]
    plan: str
    cites: list[Cite] = []


class Signing(Protocol):
    """Signs a checkpoint: its manifest, the SHA-256 of its headers, and of its attachments by name."""

    def __call__(self, record: Manifest, files: Sequence[SignedFile], attachments: Mapping[str, str], /) -> bytes: ...


class SlotSource(Protocol):
    """Where a save gets its staging memory from, and where it brings it back."""

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """A slot for files with so many tensor bytes each; ``pinned`` if a device copies into it."""

    def give(self) -> None:
        """All is written: the slot may serve another save. Idempotent."""


def _silent(count: int) -> None:
    """Progress that nobody is shown yet."""


@dataclass
class _Progress:
    """Whom what is written from now on is told. No method of the save: the writer would keep it, and so the state."""

    tell: Callable[[int], None] = _silent

    def __call__(self, count: int) -> None:
        self.tell(count)


@dataclass
class SaveWork:
    """One save under way on one rank: `gather`, `plan`, perhaps `stage`, then `settle`, each once and in this order.

    `plan` and `settle` may be rounds of one call of the ranks, or of two. ``folder`` is None for a rehearsal that only
    plans. ``busy`` says that this rank cannot save now, and wants all to skip it. ``leaves_part``: the files are to
    outlive this process. ``still``: nothing of the state changes before the save has ended. ``staged`` is called when
    every tensor is copied, or queued to be copied until those moments, with the chance to fail the save. ``recall``
    spares a walk. What is as it was in ``previous`` is cited. With ``degraded`` (the first rank's counts) others write
    the share of ranks that are lost while they write. ``compared``: names whose replicas are compared first. ``sign``
    gives the first rank what signs; the others sum for it.
    """

    ranks: Ranks
    folder: Location | None
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
    after: Moments = field(default_factory=Moments)
    staged: Callable[[Moments], None] = lambda moments: None
    collected: Collected = field(default_factory=Collected)
    save_id: str = ""
    staged_at: float = 0.0
    written_at: float = 0.0
    nbytes: int = 0
    _failed: BaseException | None = None
    _sent: Watched = field(default_factory=list)
    _attached: dict[str, bytes] = field(default_factory=dict)
    _records: list[tuple[str, int, str]] = field(default_factory=list)
    _layout: Layout | None = None
    _plan: Plan | None = None
    _agreement: Agreement | None = None
    _drafted: Manifest | None = None
    _images: list[Image] = field(default_factory=list)
    _cites: list[Cite] | None = None  # None until that is known
    _prints: Prints = field(default_factory=dict)
    _writing: Writing | None = None
    _summed: Summed | None = None
    _signing: Signing | None = None
    _is_staged: set[str] = field(default_factory=set)
    _opened: OpenFiles = field(default_factory=OpenFiles)
    _replaces: bool = False
    _reported: bool = False
    _progress: _Progress = field(default_factory=_Progress)
    _did: Did | None = None
    _watched: Watched = field(default_factory=list)
    _spares: Spares = field(default_factory=Spares)
    _copied: bool = False
    _laying: events.Opened = field(default_factory=events.Opened)
    _settling: events.Opened = field(default_factory=events.Opened)

    # What a rank does by itself, before it meets the others. What fails here is told to all of them.

    def gather(self, state: Mapping[str, Any], attachments: Attached, then: Callable[[], None] | None = None) -> None:
        """Collect the state and the attached files; ``then`` may look at ``collected``, and fail as well."""
        self._reached("gather")
        with self._span("gather"), self._keeping_failure():
            if self.degraded and self.sign is not None:
                raise Unsupported(
                    "what others write for lost ranks cannot be signed while they save: leave out degraded=True, or "
                    "sign= and sign the checkpoint afterwards (holdfast.sign)"
                )
            self.collected = collect(state, self.ranks, recall=self.recall)
            # What is copied is what the streams that train will have computed when they come to this moment.
            self.after = Moments.now(devices_of(self.collected.tensors()))
            self._layout = layout_of(self.collected)
            if self.sign is not None and self.previous is not None:
                raise Unsupported(
                    "an incremental save cannot be signed: a signature vouches for bytes of this run, and what would "
                    "be borrowed is only as good as the storage that it lay on. Leave out base=, incremental= or sign="
                )
            if self.sign is not None and self.ranks.first:
                self._signing = self.sign()
            for name in attachments:
                check_attachment(name)
            if self.ranks.first:
                self._attached = read_attachments(attachments)
            elif self.degraded:
                self._attached = readable_attachments(attachments)
            if self.still and self.degraded:
                self._watched = watch_all(self.collected)
            if self.still and isinstance(self.folder, Place):  # summed, and sent later from where it lies
                self._sent = watch_all(self.collected)
            if then is not None:
                then()

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - stored here, told to every rank and raised there
            self._failed = self._failed or error

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    # Planning

    def plan(self, call: Call) -> bool:
        """Agree with the other ranks on what there is and who writes it; False if the save is skipped.

        Raises what every rank raises: SaveFailed.
        """
        self._reached("plan")
        with self._span("plan"):
            self._agreement = agreement = self._agree(call)
            if agreement is None:
                return False
            with no_collection(), self._keeping_failure():  # not while waiting for others: training makes garbage
                self._plan = plan_for(self.ranks, agreement)
                self._warn_of_per_rank(self._plan)
                self._images = images_of(self.collected, self._plan, self.ranks, agreement.save)
                self.nbytes = sum(image.nbytes for image in self._images)
        return True

    def _agree(self, call: Call) -> Agreement | None:
        try:
            return agree(call, self._bring, busy=self.busy, allow=self._allow, begun=self._begin, leave=self._bequeath)
        except BaseException:
            self._withdraw()
            raise
        finally:
            self._laying.end()

    def _warn_of_per_rank(self, plan: Plan) -> None:
        alone = self.ranks.size == 1 or not self.ranks.first or self._bequest is None
        if plan.per_rank and not alone and not self.ranks.remembered.setdefault("told of per rank", False):
            self.ranks.remembered["told of per rank"] = True
            events.log.warning(
                "degraded=True cannot help this state: each rank has values of its own in it (%s), so that no rank can "
                "be done without", ", ".join(plan.per_rank[:3]),
            )  # fmt: skip

    def _bring(self) -> tuple[Collected, Layout]:
        self._raise_failure()
        return self.collected, self._layout or layout_of(self.collected)

    def _allow(self) -> None:
        if self.folder is not None:
            prepare(self.folder, overwrite=self.overwrite)

    def _begin(self, save: str) -> None:
        self.save_id = save
        self._reached("layout")
        self._laying = self._begin_span("layout")

    def _bequeath(self) -> Bequest | None:
        if not self.degraded or self.folder is None:
            return None
        attached = [(name, len(data), blocks.digest(data)) for name, data in self._attached.items()]
        return Bequest(self.run_id, attached)

    @property
    def _bequest(self) -> Bequest | None:
        return self._agreement.bequest if self._agreement is not None else None

    # What every rank writes.

    @property
    def sizes(self) -> list[int]:
        """Tensor bytes of each data file that this rank writes. Raises what kept this rank from planning."""
        self._raise_failure()
        return [image.nbytes for image in self._images]

    @property
    def sizes_to_come(self) -> list[int]:
        """Of the files of optimizers that have not stepped, as they will be by what their parameters take."""
        to_come = self.collected.to_come
        return [
            sum(
                int(to_come.get(f"{image.section}/{base_of(piece.key)}", 0) * piece.nbytes) + SCALAR
                for piece in image.pieces
            )
            for image in self._images
            if to_come
        ]

    @property
    def on_device(self) -> bool:
        """Whether a device has to copy."""
        return any(source.device.type != "cpu" for image in self._images for source in image.sources)

    @property
    def interrupted(self) -> BaseException | None:
        """What must not wait for the other ranks: the user's interrupt."""
        return None if isinstance(self._failed, Exception) else self._failed

    def stage(self, sections: set[str]) -> None:
        """Copy these sections now, in the calling thread; `settle` copies what is left.

        What the calling thread does next on a device comes after copies that are only queued there.
        """
        with self._span("stage"), self._keeping_failure():
            self._raise_failure()
            self._cite()
            self._keep_spares(sections)
            self._sum_replicas(sections)
            writing = self._stage([image for image in self._images if image.section in sections], _silent)
            writing.copier.moment().hold_streams()

    def _sum_replicas(self, sections: set[str] | None = None) -> None:
        """Sum what other ranks hold too, of these sections or of those left, while it holds still."""
        if self.compared is None or self.ranks.size == 1 or self._plan is None:
            return
        self._summed = self._summed or Summed(self.compared)
        self._summed.take(self.collected, self._plan, self.ranks.rank, self.save_id, Copier(self.after), only=sections)

    def _sums(self) -> Summed:
        """What this rank has summed, for the others to compare; by now all is copied, or on its way."""
        self._raise_failure()
        return self._summed or Summed(lambda name: False)

    def _cite(self) -> None:
        """Leave out what a checkpoint before this one has; once, and before anything is staged."""
        if self._cites is not None or self.previous is None or self._plan is None:
            return
        base = open_base(self.previous, self._place())
        found = cite(
            base, self._images, self._plan, self.ranks.rank, self._place(), opened=self._opened,
            fingerprints=self._fingerprints, copier=Copier(self.after),
        )  # fmt: skip
        self._images, self._cites, self._prints = found.images, found.cites, found.prints
        self.nbytes = sum(image.nbytes for image in self._images)

    def _keep_spares(self, sections: set[str] | None = None) -> None:
        """Copy what this rank is to write if others are lost, where the tensors will have changed by then."""
        if self._bequest is not None and self._plan is not None and not self.still:
            self._spares.keep(self._plan, self.collected, self.ranks, sections, self.after)

    @property
    def _fingerprints(self) -> Fingerprints:
        known: Fingerprints = self.ranks.remembered.setdefault("fingerprints", Fingerprints())
        return known

    def _stage(self, images: list[Image], progress: Callable[[int], None]) -> Writing:
        self._progress.tell = progress
        if self._writing is None:
            self._writing = self._open(self._progress)
        for image in images:
            self._writing.stage(image)
            self._is_staged.add(image.path)
        return self._writing

    def _open(self, progress: Callable[[int], None]) -> Writing:
        folder = self._place()
        self._reached("stage")
        for image in self._images:
            storage.make_folder(folder / image.section)
        return Writing(
            self._images, folder, save=self.save_id, rank=self.ranks.rank, files=self._opened,
            slot=self.slots.take(self.sizes, pinned=self.on_device), progress=progress, after=self.after,
            still=self.still, strong=self.sign is not None,
        )  # fmt: skip

    def _copy(self, task: events.Task) -> Writing:
        """All that is not staged yet; once, then training may change what it likes."""
        self._raise_failure()
        if not self._copied:
            self._cite()
            task.total = self.nbytes
            self._keep_spares()
            self._sum_replicas()
        writing = self._stage([image for image in self._images if image.path not in self._is_staged], task.advance)
        if not self._copied:
            self._copied = True
            self.staged(writing.copier.moment())
        return writing

    def _write(self, task: events.Task) -> _Note:
        with self._span("stage") as staging:
            writing = self._copy(task)
            writing.land()
            staging.nbytes = self.nbytes
        self.staged_at = monotonic()
        files = [(w.path, w.bytes, w.header_bytes, w.header_digest) for w in writing.parts()]
        self._reached("write")
        with self._span("write") as written:
            writing.leave([(self._place() / path, data) for path, data in self._small_files(files)])
            writing.wait_written()
            self.slots.give()
            written.nbytes = self.nbytes
        with self._span("durable"):
            writing.finish()
            check_sent(self._sent)
            borrowed_is_there(self._place(), self._cites or [])
        self.written_at = monotonic()
        self._did = Did([FileRecord(*file) for file in files], self._cites or [])
        self._reported = True
        self._reached("durable")
        self._settling = self._begin_span("settle")
        told = [
            (image.section, image.volume, w.bytes, w.header_bytes, bytes.fromhex(w.header_digest + w.header_sha256))
            for image, w in zip(self._images, writing.parts(), strict=True)
        ]
        return _Note(told, self._agreement.plan if self._agreement is not None else "", self._cites or [])

    def _small_files(self, files: list[tuple[str, int, int, str]]) -> list[tuple[str, bytes]]:
        """What follows the data: attachments of the first rank, then the part, which says that all is there."""
        ranks = self.ranks
        small: list[tuple[str, bytes]] = []
        if ranks.first:
            self._replaces = self.overwrite and storage.is_file(self._place() / manifest.FILE_NAME)
            # In a store another save to this path may be under way: then nothing of theirs may have the same name.
            fresh = not self._replaces and not isinstance(self.folder, Place)
            self._records, small = place_attachments(self._attached, self.save_id, fresh=fresh)
        if self.leaves_part:
            drafted = self._draft() if ranks.first else None
            cites = self._cites or []
            left = Part(
                version=CITING if cites else VERSION, save=self.save_id, rank=ranks.rank, world_size=ranks.size,
                files=files, cites=cites, manifest=drafted,
            )  # fmt: skip
            small = [*small, (part.file_name(ranks.rank, self.save_id), part.encode(left))]
        self._opened.paths += [self._place() / path for path, _ in small]
        return small

    def _reached(self, phase: str) -> None:
        if self.folder is not None:
            events.reached(phase, self.folder, self.ranks.rank)

    def _span(self, name: str) -> AbstractContextManager[events.Opened]:
        return events.span(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)

    def _begin_span(self, name: str) -> events.Opened:
        return events.begin(name, self.folder or REHEARSAL, self.ranks.rank, step=self.step)

    def _place(self) -> Location:
        if self.folder is None:
            raise HoldfastError("a rehearsal was to write; this is a fault of holdfast")
        return self.folder

    # The end: report, commit, clean up.

    def settle(self, call: Call) -> None:
        """Write, report, commit. Raises what every rank raises: SaveFailed."""
        leave = False
        try:
            with events.task(self.name, str(self.folder), self.ranks.rank, part=True) as task:
                leave = self._settle(call, task)
        finally:
            self._settling.end()
            if self._writing is not None:
                self._writing.close()
            self.slots.give()
            self._spares.clear()
            if not leave and not self._is_committed():
                self._withdraw()
            self._opened.close()
        self._reached("saved")
        self._fingerprints.remember(self.save_id, self._prints)
        if self.leaves_part:
            take_away(self._place(), self.save_id, self.ranks.rank)

    def _settle(self, call: Call, task: events.Task) -> bool:
        """True if this rank's files are to stay where they are."""
        try:
            if self.compared is not None and self.ranks.size > 1:
                with self._span("stage"), self._keeping_failure():
                    self._copy(task)
                with self._span("compare"):
                    compare(call, self._sums)
            self._write_and_commit(call, task)
        except HoldfastError as lost:
            # A rank that died may have a writer that lives on: with its part the save can still be committed late.
            if lost.settled and not (isinstance(lost, RankLost) and self.leaves_part and self._reported):
                raise
            # The first rank may have died after the commit and before it could tell, or may still be at it, or a store
            # may have taken the manifest and not answered: the manifest is the truth, and files that it may name are
            # left to a later sweep.
            self._opened.paths.clear()
            if not self._is_committed():
                if self.leaves_part and isinstance(lost, RankLost):
                    events.log.warning(
                        "%s: what was written stays, in case the lost rank's writer finishes", self.folder
                    )
                raise
            if not isinstance(self.folder, Place) and not isinstance(lost, RankLost):
                raise  # the disk failed under a manifest that stands: its name may be gone after a power cut
            events.log.warning("%s is committed, although the ranks could not settle it: %s", self.folder, lost.cause)
        except BaseException:
            # Interrupted while it waited for the verdict: what it has reported may be committed any moment.
            if self._reported or self._bequest is not None:
                self._opened.paths.clear()
            raise
        return True

    def _write_and_commit(self, call: Call, task: events.Task) -> None:
        failed: list[BaseException] = []

        def write() -> _Note:
            try:
                return self._write(task)
            except BaseException as error:
                failed.append(error)
                raise

        try:
            call.settle("write", write, lambda notes: self._commit(call, notes), str)
        except RankLost as lost:
            # If the outcome is not known, the first rank may commit any moment, and nobody else may then.
            if not (lost.absent and lost.settled) or self._bequest is None:
                raise
            with self._span("take over"):
                self._takeover(call, failed, task).run(lost)
                self._drop_unnamed()

    def _takeover(self, call: Call, failed: list[BaseException], task: events.Task) -> Takeover:
        if self._plan is None or self._agreement is None or self._bequest is None:
            raise self._failed or HoldfastError("ranks were lost of a save without a plan; this is a fault of holdfast")
        return Takeover(
            call, self._place(), self.save_id, self.step, self.overwrite, self._plan, self._agreement, self._bequest,
            self.collected, self._attached, self._records, self._did, failed[0] if failed else None,
            None if self.still else self._spares, self._watched, task,
        )  # fmt: skip

    def _drop_unnamed(self) -> None:
        """Delete what this rank wrote and others have written in its place, as they took it for lost."""
        record = standing(self._place(), self.save_id)
        if record is not None:
            named = {f.path for f in record.data_files} | {path for path, _, _ in record.attachments}
            kept = {self._place() / path for path in named}
            self._opened.paths = [path for path in self._opened.paths if path not in kept]
            self._withdraw()

    def _withdraw(self) -> None:
        # Only after the decision: before it the folder may be somebody else's, and nothing in it ours to take away.
        if self.folder is not None and self.save_id:
            # A writer that was killed may have left a small file under the name that it has before it is whole.
            local = [path for path in self._opened.paths if not isinstance(path, Place)]
            halves = [half for path in local for half in path.parent.glob(f".{path.name}.*.tmp")]
            withdraw([*self._opened.paths, *halves], self.folder)

    def _is_committed(self) -> bool:
        """Whether the manifest that stands in the folder is this save's."""
        return standing(self._place(), self.save_id) is not None

    def _records_of(self, rank: int, note: _Note) -> list[FileRecord]:
        return [
            FileRecord(file_name(section, rank, self.ranks.size, self.save_id, volume), n, head, sums[:_DIGEST].hex())
            for section, volume, n, head, sums in note.files
        ]

    def _commit(self, call: Call, notes: list[_Note]) -> str:
        if len({note.plan for note in notes}) > 1:
            raise HoldfastError("the ranks followed different plans; this is a fault of holdfast, please report it")
        did = [Did(self._records_of(rank, note), note.cites) for rank, note in enumerate(notes)]
        record = joined(self._draft(), did)
        self._reached("commit")
        with self._span("commit"):
            signed = self._signed(record, notes)
            call.confirm()
            commit(self._place(), record, replaces=self._replaces, signed=signed)
        self._reached("committed")
        return self.save_id

    def _signed(self, record: Manifest, notes: list[_Note]) -> bytes | None:
        """The signature of what is to be committed, if there is to be one. Its sums came from memory, not from disk."""
        if self._signing is None:
            return None
        headers = {
            file.path: told[-1][_DIGEST:].hex()
            for rank, note in enumerate(notes)
            for file, told in zip(self._records_of(rank, note), note.files, strict=True)
        }
        files = [SignedFile(headers[file.path]) for file in record.data_files]
        self._opened.paths.append(self._place() / signature.file_name(record))
        return self._signing(record, files, {n: blocks.strong_sum(data) for n, data in self._attached.items()})

    def _draft(self) -> Manifest:
        """The manifest but for what only the writers of the files know."""
        if self._plan is None or self._layout is None:
            raise HoldfastError("a save was to be committed that has no plan; this is a fault of holdfast")
        if self._drafted is None:
            told = self._agreement.joined if self._agreement is not None else None
            joined = told or join_owned([self._layout], [(0, 0, owned_values(self.collected))])
            identity = Identity(self.save_id, self.run_id, self.step, self.ranks.size)
            self._drafted = draft(identity, self._plan, self.collected, joined, self._records)
        return self._drafted
