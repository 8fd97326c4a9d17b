"""The last stages of a save: write, report, commit; one verdict on every rank, and nothing left of a save that failed.

`save` and the Saver call `settle` once the ranks have agreed. Never deletes what the first rank may still commit.
"""

from __future__ import annotations

from contextlib import ExitStack

from holdfast import events
from holdfast.commit.agree import Agreed
from holdfast.commit.commit import commit, standing, take_away
from holdfast.commit.draft import RankNote, joined, shares_of, signed_files
from holdfast.commit.folder import withdraw
from holdfast.commit.job import Failed, Job, attempt, value_of
from holdfast.commit.outgoing import Durable, Outgoing, Points
from holdfast.errors import HoldfastError, RankLost
from holdfast.events import log
from holdfast.ondisk import signature
from holdfast.ranks.ranks import Call
from holdfast.write.datafiles import OpenFiles


def settle(call: Call, job: Job, agreed: Agreed, outgoing: Outgoing | Failed, points: Points) -> None:
    """Write this rank's files, report them, and commit the save. Raises what every rank raises: SaveFailed."""
    opened = OpenFiles() if isinstance(outgoing, Failed) else outgoing.opened
    stays = False

    def take_back() -> None:
        if not stays and not _is_committed(job, agreed):
            withdraw(opened.paths, job.place)

    with ExitStack() as ending:  # what is to be done at the end is done, even if a part of it is interrupted
        ending.callback(opened.close)
        ending.callback(take_back)
        if not isinstance(outgoing, Failed):
            ending.callback(outgoing.close)
        with events.task(job.name, str(job.folder), job.ranks.rank, part=True) as task:
            try:
                _compare(call, job, outgoing, points, task)
                _write_and_commit(call, job, agreed, outgoing, points, task, ending)
            except HoldfastError as error:
                _check_committed(error, job, agreed, outgoing, opened)
            except BaseException:
                # Interrupted while it waited for the verdict: what it has reported may be committed any moment.
                if _has_reported(outgoing) or agreed.failover is not None:
                    opened.paths.clear()
                raise
        stays = True
    job.reached("saved")
    points.committed(agreed.save)
    if job.background:
        take_away(job.place, agreed.save, job.ranks.rank)


def _compare(call: Call, job: Job, outgoing: Outgoing | Failed, points: Points, task: events.Task) -> None:
    """What a policy compares between the ranks before the commit; everything is copied first, while it holds still."""
    if job.compares:
        with job.span("stage"):
            staged = attempt(lambda: value_of(outgoing).stage(task))
        with job.span("compare"):
            points.before_commit(call, staged)


def _write_and_commit(
    call: Call, job: Job, agreed: Agreed, outgoing: Outgoing | Failed, points: Points, task: events.Task,
    ending: ExitStack,
) -> None:  # fmt: skip
    def write() -> RankNote:
        own = value_of(outgoing)
        own.durable = attempt(own.finish, task)
        note = value_of(own.durable).note
        ending.callback(job.begin_span("settle").end)
        return note

    try:
        call.settle("write", write, lambda notes: _commit(call, value_of(outgoing), points, notes), str)
    except RankLost as lost:
        # If the outcome is not known, the first rank may commit any moment, and nobody else may then.
        if not (lost.absent and lost.settled) or agreed.failover is None:
            raise
        with job.span("take over"):
            own = value_of(outgoing)
            points.ranks_lost(lost, call, own, task)
            _delete_unnamed(job, agreed, own.opened)


def _commit(call: Call, outgoing: Outgoing, points: Points, notes: list[RankNote]) -> str:
    """On the first rank, with the notes of all: the commit itself. Returns the save's id."""
    job, save = outgoing.job, outgoing.agreed.save
    if len({note.plan for note in notes}) > 1:
        raise HoldfastError("the ranks followed different plans; this is a fault of holdfast, please report it")
    durable = outgoing.durable
    if not isinstance(durable, Durable):
        raise HoldfastError("a save was to be committed that is not durable; this is a fault of holdfast")
    drafted = durable.draft or outgoing.draft(durable.attachments)
    record = joined(drafted, shares_of(notes, save))
    job.reached("commit")
    with job.span("commit"):
        signed = None
        if outgoing.gathered.signer is not None:
            outgoing.opened.paths.append(job.place / signature.file_name(record))
            signed = points.sign(outgoing.gathered, record, signed_files(record, notes, save))
        call.confirm()
        commit(job.place, record, replaces=durable.replaces, signed=signed)
        if job.on_commit is not None:
            job.on_commit(job.place, record)
    job.reached("committed")
    return save


def _check_committed(
    error: HoldfastError, job: Job, agreed: Agreed, outgoing: Outgoing | Failed, opened: OpenFiles
) -> None:
    """Raise ``error`` again unless the save is committed all the same; what may still be committed stays on disk."""
    # A rank that died may have a writer that lives on: with its part the save can still be committed late.
    may_come_late = isinstance(error, RankLost) and job.background and _has_reported(outgoing)
    if error.settled and not may_come_late:
        raise error
    # The first rank may have died after the commit and before it could tell, or may still be at it, or a store may
    # have taken the manifest and not answered: the manifest is the truth, and files that it may name are left to a
    # later sweep.
    opened.paths.clear()
    if not _is_committed(job, agreed):
        if job.background and isinstance(error, RankLost):
            log.warning("%s: what was written stays, in case the lost rank's writer finishes", job.folder)
        raise error
    if not job.place.is_remote and not isinstance(error, RankLost):
        raise error  # the disk failed under a manifest that stands: its name may be gone after a power cut
    log.warning("%s is committed, although the ranks could not settle it: %s", job.folder, error.cause)


def _has_reported(outgoing: Outgoing | Failed) -> bool:
    return isinstance(outgoing, Outgoing) and isinstance(outgoing.durable, Durable)


def _is_committed(job: Job, agreed: Agreed) -> bool:
    """Whether the manifest that stands in the folder is this save's."""
    return standing(job.place, agreed.save) is not None


def _delete_unnamed(job: Job, agreed: Agreed, opened: OpenFiles) -> None:
    """Delete what this rank wrote and others have written in its place, as they took it for lost."""
    record = standing(job.place, agreed.save)
    if record is not None:
        named = {f.path for f in record.data_files} | {path for path, _, _ in record.attachments}
        kept = {job.place / path for path in named}
        opened.paths = [path for path in opened.paths if path not in kept]
        withdraw(opened.paths, job.place)
