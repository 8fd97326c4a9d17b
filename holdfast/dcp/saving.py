"""`dcp.save` and `dcp.async_save`: torch's signatures over holdfast's saves."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from holdfast.buffers.memory import no_collection
from holdfast.buffers.stage import as_integers
from holdfast.checkpoint import Checkpoint
from holdfast.commit.gather import Gathered, gather
from holdfast.commit.job import Job, attempt
from holdfast.dcp.arguments import (
    Destination,
    PathLike,
    by_position,
    destination,
    id_for_torch,
    plans_itself,
    staging_of,
    stores_itself,
)
from holdfast.dcp.failures import as_torch_has_it, as_torch_raises
from holdfast.dcp.flattened import Description, leave_hint, torch_id
from holdfast.dcp.states import state_to_save
from holdfast.dcp.writer import Writer
from holdfast.ranks.ranks import DEADLINE, Ranks, ranks_of
from holdfast.save import RUN, commit_gathered, label_of, save_in, step_of
from holdfast.saver import Saver
from holdfast.saving import Saving
from holdfast.state import Collected


@by_position("storage_writer")
def save(
    state_dict: dict[str, Any], *, checkpoint_id: PathLike | None = None, storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None, process_group: dist.ProcessGroup | None = None, no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:  # fmt: skip
    """Save ``state_dict`` to the folder ``checkpoint_id``, as `torch.distributed.checkpoint.save`.

    Called by all ranks of ``process_group``. A checkpoint that is there already is replaced, in one step. Returns once
    it is committed and durable, with torch's description of it. ``no_dist=True`` saves what this process has, alone.
    ``use_collectives`` changes nothing: holdfast's ranks meet over the store in any case. Of torch's own storage
    writers the path is taken, and they get the save's id. A planner of one's own goes with torch's engine, over a
    `Writer`; a storage writer of one's own goes with torch's engine as it is.

    Raises SaveFailed, the same on every rank (see `holdfast.save`), which is also torch's CheckpointException. A value
    that differs by rank is refused, where torch keeps one of them: wrap it as `holdfast.PerRank`.
    """
    if stores_itself(storage_writer):
        theirs: Metadata = state_dict_saver.save(
            state_dict, checkpoint_id=id_for_torch(checkpoint_id), storage_writer=storage_writer, planner=planner,
            process_group=process_group, no_dist=no_dist, use_collectives=use_collectives,
        )  # fmt: skip
        return theirs
    folder, overwrite = destination(checkpoint_id, storage_writer)
    if plans_itself(planner):
        writer = Writer(folder, overwrite=overwrite)
        metadata: Metadata = state_dict_saver.save(
            state_dict, storage_writer=writer, planner=planner, process_group=process_group, no_dist=no_dist,
            use_collectives=use_collectives,
        )  # fmt: skip
        _tell_id(storage_writer, writer.save_id)
        return metadata
    state = state_to_save(state_dict)
    step = step_of(state, None)
    ranks = Ranks(0, 1) if no_dist else ranks_of(process_group)
    with as_torch_raises(), no_collection(), ranks.call(label_of(folder, None), saving=True) as call:
        save = save_in(call, Job(ranks, folder, step, RUN, overwrite, on_commit=leave_hint), state, {})
    _tell_id(storage_writer, torch_id(save))
    return Description(Checkpoint(folder))


def _tell_id(storage_writer: StorageWriter | None, save_id: str) -> None:
    """torch's own writer has the id of what it saved; so has one whose path was taken."""
    if isinstance(storage_writer, FileSystemWriter):
        storage_writer.save_id = save_id


@by_position("storage_writer")
def async_save(
    state_dict: dict[str, Any], *, checkpoint_id: PathLike | None = None, storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None, process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None, no_dist: bool = False, use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:  # fmt: skip
    """Begin to save ``state_dict``, as `torch.distributed.checkpoint.async_save`: what is saved is the state now.

    Returns a future of `save`'s result, and training may go on. Parameters and state of live optimizers are copied
    beside it: a step of theirs waits until they are. Everything else is copied before the call returns.

    Whatever else changes a parameter or optimizer state, by hand for example, must wait, or the save fails by name.
    With an ``async_stager`` that stages at once (``BlockingAsyncStager``) everything is copied when the call returns.
    With one that stages beside training (``DefaultStager`` with ``use_async_staging``) the call returns both futures:
    after ``staging_completion`` everything may change. ``PROCESS`` writes from a process of its own, which finishes
    what is staged even if this one dies.

    One save at a time: a second one waits for the first. Failures are those of `save`, raised by the future.
    """
    if stores_itself(storage_writer):
        return state_dict_saver.async_save(
            state_dict, checkpoint_id=id_for_torch(checkpoint_id), storage_writer=storage_writer, planner=planner,
            process_group=process_group, async_checkpointer_type=async_checkpointer_type, async_stager=async_stager,
            no_dist=no_dist, use_collectives=use_collectives,
        )  # fmt: skip
    to = destination(checkpoint_id, storage_writer)
    if plans_itself(planner):
        return state_dict_saver.async_save(
            state_dict, storage_writer=Writer(to.folder, overwrite=to.overwrite), planner=planner,
            process_group=process_group, async_checkpointer_type=async_checkpointer_type, async_stager=async_stager,
            no_dist=no_dist, use_collectives=use_collectives,
        )  # fmt: skip
    staging = staging_of(async_stager)
    state = state_to_save(state_dict)
    if no_dist and dist.is_available() and dist.is_initialized():
        upload = _save_alone(state, to)
        return AsyncSaveResponse(_done(), upload) if staging == "later" else upload
    kind: Literal["process", "thread"] = (
        "process" if async_checkpointer_type is AsyncCheckpointerType.PROCESS else "thread"
    )
    with as_torch_raises():
        saving = _saver(process_group, kind).save(state, to.folder, overwrite=to.overwrite)
    saving.hear()  # the future is the one that tells
    upload = _upload(saving)
    if staging == "later":
        return AsyncSaveResponse(_staging(saving), upload)
    if staging == "at once":
        saving.wait_staged()
    return upload


def _saver(group: dist.ProcessGroup | None, kind: Literal["process", "thread"]) -> Saver:
    """The Saver of a group and kind, made by all ranks at their first save; an ending interpreter closes it."""
    savers: dict[str, Saver] = ranks_of(group).remembered.setdefault("dcp", {})
    if kind not in savers:
        savers[kind] = Saver(worker=kind, group=group)
        savers[kind].on_commit = leave_hint
    return savers[kind]


def _upload(saving: Saving) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def tell(done: Saving) -> None:
        if done.failed is not None:
            future.set_exception(as_torch_has_it(done.failed))
        else:
            future.set_result(Description(Checkpoint(done.path)))

    saving.add_done_callback(tell)
    return future


def _staging(saving: Saving) -> Future[None]:
    """Done once all is copied; also if the save failed, which the other future tells."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def wait() -> None:
        try:
            saving.wait_staged()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - kept, and raised by the future
            future.set_exception(error)

    threading.Thread(target=wait, name="holdfast-staging", daemon=True).start()
    return future


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _save_alone(state: Any, to: Destination) -> Future[Any]:
    """A save of this process among others, in a thread, from a copy of all its tensors.

    A Saver would need all ranks to make it, and here only some may save.
    """
    ranks = Ranks(0, 1)
    job = Job(ranks, to.folder, step_of(state, None), RUN, to.overwrite, on_commit=leave_hint)
    gathered = attempt(_gather_copies, job, state)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with ranks.call(label_of(to.folder, None), deadline=DEADLINE, saving=True) as call:
                commit_gathered(call, job, gathered)
            future.set_result(Description(Checkpoint(to.folder)))
        except BaseException as error:  # noqa: BLE001 - kept, and raised by the future
            future.set_exception(as_torch_has_it(error))

    threading.Thread(target=run, name="holdfast-save").start()
    return future


def _gather_copies(job: Job, state: Any) -> Gathered:
    gathered = gather(job, state, {})
    _copy_aside(gathered.state)
    return gathered


def _copy_aside(state: Collected) -> None:
    """Copy every tensor to host memory, in place of the views in ``state``."""
    for name, entry in state.entries.items():
        views = [
            view._replace(tensor=as_integers(view.tensor).to("cpu", copy=True).contiguous().view(view.tensor.dtype))
            for view in entry.views
        ]
        state.entries[name] = entry._replace(views=views)
    for leaf in state.per_rank.values():
        leaf.tensors.update((key, tensor.to("cpu", copy=True)) for key, tensor in list(leaf.tensors.items()))
