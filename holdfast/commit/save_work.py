"""One save under way on one rank: collect, agree, plan, write what this rank owns, settle, commit.

`save` runs it through at once, the Saver in the background. Never leaves a moment without a whole checkpoint, and
never commits half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from holdfast import events
from holdfast.buffers.device import Moments, devices_of
from holdfast.buffers.memory import no_collection
from holdfast.buffers.still import Watched, check_sent, watch_all
from holdfast.commit.agree import Agreement, Bequest, agree, plan_for
from holdfast.commit.citing import Did, joined
from holdfast.commit.commit import (
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
from holdfast.commit.folder import prepare, withdraw
from holdfast.commit.note import Note, did_of, note_of, signed_files
from holdfast.commit.order import Order, Signing
from holdfast.commit.outgoing import Outgoing
from holdfast.commit.parts import take_away
from holdfast.errors import HoldfastError, RankLost
from holdfast.ondisk import blocks, manifest, part, signature
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Cite, Part
from holdfast.plan.layout import Layout, join_owned
from holdfast.plan.plan import Plan
from holdfast.policies.degraded.takeover import Spares, Takeover
from holdfast.policies.incremental.borrow import borrowed_is_there
from holdfast.policies.incremental.fingerprint import fingerprints_of
from holdfast.policies.replicas.divergence import compare
from holdfast.ranks.ranks import Call
from holdfast.state import Collected, collect
from holdfast.state.outline import layout_of, owned_values
from holdfast.write.image import OpenFiles


@dataclass(frozen=True)
class _Keeping:
    """What fails in the block is stored, told to every rank and raised there."""

    work: SaveWork

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.work.fail(error)
        return True


@dataclass
class SaveWork:
    """One save under way on one rank: `gather`, `plan`, perhaps `stage`, then `settle`, each once and in this order.

    `plan` and `settle` may be rounds of one call of the ranks, or of two. ``after`` and ``staged`` as of `Outgoing`:
    `gather` sets the first, and both may be replaced until `plan`. ``landed`` is called when all copies have arrived,
    with the chance to fail the save.
    """

    order: Order
    after: Moments = field(default_factory=Moments)
    staged: Callable[[Moments], None] = lambda moments: None
    landed: Callable[[], None] = lambda: None
    collected: Collected = field(default_factory=Collected)
    save_id: str = ""
    staged_at: float = 0.0
    written_at: float = 0.0
    _failed: BaseException | None = None
    _sent: Watched = field(default_factory=list)
    _attached: dict[str, bytes] = field(default_factory=dict)
    _records: list[tuple[str, int, str]] = field(default_factory=list)
    _layout: Layout | None = None
    _agreement: Agreement | None = None
    _plan: Plan | None = None
    _outgoing: Outgoing | None = None
    _drafted: Manifest | None = None
    _signing: Signing | None = None
    _opened: OpenFiles = field(default_factory=OpenFiles)
    _replaces: bool = False
    _reported: bool = False
    _stays: bool = False  # what this rank wrote
    _did: Did | None = None
    _watched: Watched = field(default_factory=list)
    _laying: events.Opened = field(default_factory=events.Opened)
    _settling: events.Opened = field(default_factory=events.Opened)

    # What a rank does by itself, before it meets the others. What fails here is told to all of them.

    def gather(self, state: Mapping[str, Any], attachments: Attached, then: Callable[[], None] | None = None) -> None:
        """Collect the state and the attached files; ``then`` may look at ``collected``, and fail as well."""
        order = self.order
        with self._keeping_failure(), order.span("gather"):
            order.reached("gather")
            order.check()
            self.collected = collect(state, order.ranks, recall=order.recall)
            # What is copied is what the streams that train will have computed when they come to this moment.
            self.after = Moments.now(devices_of(self.collected.tensors()))
            self._layout = layout_of(self.collected)
            if order.sign is not None and order.ranks.first:
                self._signing = order.sign()
            for name in attachments:
                check_attachment(name)
            if order.ranks.first:
                self._attached = read_attachments(attachments)
            elif order.degraded:
                self._attached = readable_attachments(attachments)
            if order.still and order.degraded:
                self._watched = watch_all(self.collected)
            if order.still and not order.place.has_descriptors:  # summed, and sent later from where it lies
                self._sent = watch_all(self.collected)
            if then is not None:
                then()

    def _keeping_failure(self) -> _Keeping:
        return _Keeping(self)

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    @property
    def interrupted(self) -> BaseException | None:
        """What must not wait for the other ranks: the user's interrupt."""
        return None if isinstance(self._failed, Exception) else self._failed

    def fail(self, error: BaseException) -> None:
        """The other ranks are to hear of this when they meet next; its caller raises it here."""
        self._failed = self._failed or error

    @property
    def is_planned(self) -> bool:
        """Whether the ranks have agreed on what there is: then they meet again to settle."""
        return self._agreement is not None

    # Planning

    def plan(self, call: Call) -> bool:
        """Agree with the other ranks on what there is and who writes it; False if the save is skipped.

        Raises what every rank raises: SaveFailed.
        """
        self.order.reached("plan")
        with self.order.span("plan"):
            self._agreement = agreement = self._agree(call)
            if agreement is None:
                return False
            with no_collection(), self._keeping_failure():  # not while waiting for others: training makes garbage
                self._plan = plan_for(self.order.ranks, agreement)
                self._warn_of_per_rank(self._plan)
                self._outgoing = Outgoing(
                    self.order, agreement, self._plan, self.collected, self.after, self.staged, self._opened
                )
        return True

    def _agree(self, call: Call) -> Agreement | None:
        busy = self.order.busy
        try:
            return agree(
                call, self._bring, busy=busy, allow=self._allow, begun=self._begin, after=self.after,
                leave=self._bequeath,
            )  # fmt: skip
        except BaseException:
            self._withdraw()
            raise
        finally:
            self._laying.end()

    def _bring(self) -> tuple[Collected, Layout]:
        self._raise_failure()
        return self.collected, self._layout or layout_of(self.collected)

    def _allow(self) -> None:
        if self.order.folder is not None:
            prepare(self.order.folder, overwrite=self.order.overwrite)

    def _begin(self, save: str) -> None:
        self.save_id = save
        self.order.reached("layout")
        self._laying = self.order.begin_span("layout")

    def _bequeath(self) -> Bequest | None:
        if not self.order.degraded or self.order.folder is None:
            return None
        attached = [(name, len(data), blocks.digest(data)) for name, data in self._attached.items()]
        return Bequest(self.order.run_id, attached)

    @property
    def _bequest(self) -> Bequest | None:
        return self._agreement.bequest if self._agreement is not None else None

    def _warn_of_per_rank(self, plan: Plan) -> None:
        ranks = self.order.ranks
        alone = ranks.size == 1 or not ranks.first or self._bequest is None
        if plan.per_rank and not alone and not ranks.remembered.setdefault("told of per rank", False):
            ranks.remembered["told of per rank"] = True
            events.log.warning(
                "degraded=True cannot help this state: each rank has values of its own in it (%s), so that no rank can "
                "be done without", ", ".join(plan.per_rank[:3]),
            )  # fmt: skip

    # What this rank writes

    @property
    def outgoing(self) -> Outgoing:
        """What this rank writes. Raises what kept it from planning."""
        self._raise_failure()
        if self._outgoing is None:
            raise HoldfastError("a save without a plan was to write; this is a fault of holdfast")
        return self._outgoing

    @property
    def nbytes(self) -> int:
        """Tensor bytes that this rank writes; 0 before that is known."""
        return self._outgoing.nbytes if self._outgoing is not None else 0

    def stage(self, sections: set[str]) -> None:
        """Copy these sections now, in the calling thread; `settle` copies what is left."""
        with self.order.span("stage"), self._keeping_failure():
            self.outgoing.copy_now(sections)

    def _write(self, task: events.Task) -> Note:
        order = self.order
        with order.span("stage") as staging:
            outgoing = self.outgoing
            writing = outgoing.copy(task)
            writing.land()
            self.landed()
            staging.nbytes = outgoing.nbytes
        self.staged_at = monotonic()
        written = writing.parts()
        files = [(w.path, w.bytes, w.header_bytes, w.header_digest) for w in written]
        order.reached("write")
        with order.span("write") as sending:
            writing.leave([(order.place / path, data) for path, data in self._small_files(files, outgoing.cites)])
            writing.wait_written()
            order.slots.give()
            sending.nbytes = outgoing.nbytes
        with order.span("durable"):
            writing.finish()
            check_sent(self._sent)
            borrowed_is_there(order.place, outgoing.cites)
        self.written_at = monotonic()
        self._did = Did([FileRecord(*file) for file in files], outgoing.cites)
        self._reported = True
        order.reached("durable")
        self._settling = order.begin_span("settle")
        return note_of(outgoing.images, written, outgoing.agreement.plan, outgoing.cites)

    def _small_files(self, files: list[tuple[str, int, int, str]], cites: list[Cite]) -> list[tuple[str, bytes]]:
        """What follows the data: attachments of the first rank, then the part, which says that all is there."""
        order, ranks = self.order, self.order.ranks
        small: list[tuple[str, bytes]] = []
        if ranks.first:
            self._replaces = order.overwrite and (order.place / manifest.FILE_NAME).is_file()
            # In a store another save to this path may be under way: then nothing of theirs may have the same name.
            fresh = not self._replaces and order.place.has_locks
            self._records, small = place_attachments(self._attached, self.save_id, fresh=fresh)
        if order.leaves_part:
            drafted = self._draft() if ranks.first else None
            left = Part(
                version=part.version_for(cites, drafted), save=self.save_id, rank=ranks.rank, world_size=ranks.size,
                files=files, cites=cites, manifest=drafted,
            )  # fmt: skip
            small = [*small, (part.file_name(ranks.rank, self.save_id), part.encode(left))]
        self._opened.paths += [order.place / path for path, _ in small]
        return small

    # The end: report, commit, clean up.

    def settle(self, call: Call) -> None:
        """Write, report, commit. Raises what every rank raises: SaveFailed."""
        order = self.order
        with ExitStack() as ending:  # what is to be done at the end is done, also if a part of it is interrupted
            ending.callback(self._opened.close)
            ending.callback(self._take_back)
            ending.callback(order.slots.give)
            ending.callback(self._let_go)
            with events.task(order.name, str(order.folder), order.ranks.rank, part=True) as task:
                self._stays = self._settle(call, task)
        order.reached("saved")
        if self._outgoing is not None:
            fingerprints_of(order.ranks).remember(self.save_id, self._outgoing.prints)
        if order.leaves_part:
            take_away(order.place, self.save_id, order.ranks.rank)

    def _let_go(self) -> None:
        self._settling.end()
        if self._outgoing is not None:
            self._outgoing.close()

    def _take_back(self) -> None:
        if not self._stays and not self._is_committed():
            self._withdraw()

    def _settle(self, call: Call, task: events.Task) -> bool:
        """True if this rank's files are to stay where they are."""
        order = self.order
        try:
            if order.compares:
                with order.span("stage"), self._keeping_failure():
                    self.outgoing.copy(task)
                with order.span("compare"):
                    compare(call, lambda: self.outgoing.sums)
            self._write_and_commit(call, task)
        except HoldfastError as lost:
            # A rank that died may have a writer that lives on: with its part the save can still be committed late.
            if lost.settled and not (isinstance(lost, RankLost) and order.leaves_part and self._reported):
                raise
            # The first rank may have died after the commit and before it could tell, or may still be at it, or a store
            # may have taken the manifest and not answered: the manifest is the truth, and files that it may name are
            # left to a later sweep.
            self._opened.paths.clear()
            if not self._is_committed():
                if order.leaves_part and isinstance(lost, RankLost):
                    events.log.warning(
                        "%s: what was written stays, in case the lost rank's writer finishes", order.folder
                    )
                raise
            if order.place.has_folders and not isinstance(lost, RankLost):
                raise  # the disk failed under a manifest that stands: its name may be gone after a power cut
            events.log.warning("%s is committed, although the ranks could not settle it: %s", order.folder, lost.cause)
        except BaseException:
            # Interrupted while it waited for the verdict: what it has reported may be committed any moment.
            if self._reported or self._bequest is not None:
                self._opened.paths.clear()
            raise
        return True

    def _write_and_commit(self, call: Call, task: events.Task) -> None:
        failed: list[BaseException] = []

        def write() -> Note:
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
            with self.order.span("take over"):
                self._takeover(call, failed, task).run(lost)
                self._drop_unnamed()

    def _takeover(self, call: Call, failed: list[BaseException], task: events.Task) -> Takeover:
        if self._plan is None or self._agreement is None or self._bequest is None:
            raise self._failed or HoldfastError("ranks were lost of a save without a plan; this is a fault of holdfast")
        order, spares = self.order, self._outgoing.spares if self._outgoing is not None else Spares()
        return Takeover(
            call, order.place, self.save_id, order.step, order.overwrite, self._plan, self._agreement,
            self._bequest, self.collected, self._attached, self._records, self._did, failed[0] if failed else None,
            None if order.still else spares, self._watched, task,
        )  # fmt: skip

    def _drop_unnamed(self) -> None:
        """Delete what this rank wrote and others have written in its place, as they took it for lost."""
        record = standing(self.order.place, self.save_id)
        if record is not None:
            named = {f.path for f in record.data_files} | {path for path, _, _ in record.attachments}
            kept = {self.order.place / path for path in named}
            self._opened.paths = [path for path in self._opened.paths if path not in kept]
            self._withdraw()

    def _withdraw(self) -> None:
        folder = self.order.folder
        # Only after the decision: before it the folder may be somebody else's, and nothing in it ours to take away.
        if folder is not None and self.save_id:
            withdraw(self._opened.paths, folder)

    def _is_committed(self) -> bool:
        """Whether the manifest that stands in the folder is this save's."""
        return standing(self.order.place, self.save_id) is not None

    def _commit(self, call: Call, notes: list[Note]) -> str:
        order = self.order
        if len({note.plan for note in notes}) > 1:
            raise HoldfastError("the ranks followed different plans; this is a fault of holdfast, please report it")
        record = joined(self._draft(), did_of(notes, self.save_id))
        order.reached("commit")
        with order.span("commit"):
            signed = self._signed(record, notes)
            call.confirm()
            commit(order.place, record, replaces=self._replaces, signed=signed)
            if order.committed is not None:
                order.committed(order.place, record)
        order.reached("committed")
        return self.save_id

    def _signed(self, record: Manifest, notes: list[Note]) -> bytes | None:
        """The signature of what is to be committed, if there is to be one. Its sums came from memory, not from disk."""
        if self._signing is None:
            return None
        files = signed_files(record, notes, self.save_id)
        self._opened.paths.append(self.order.place / signature.file_name(record))
        return self._signing(record, files, {n: blocks.strong_sum(data) for n, data in self._attached.items()})

    def _draft(self) -> Manifest:
        """The manifest but for what only the writers of the files know."""
        if self._plan is None or self._layout is None:
            raise HoldfastError("a save was to be committed that has no plan; this is a fault of holdfast")
        if self._drafted is None:
            told = self._agreement.joined if self._agreement is not None else None
            joined = told or join_owned([self._layout], [(0, 0, owned_values(self.collected))])
            order = self.order
            identity = Identity(self.save_id, order.run_id, order.step, order.ranks.size)
            self._drafted = draft(identity, self._plan, self.collected, joined, self._records)
        return self._drafted
