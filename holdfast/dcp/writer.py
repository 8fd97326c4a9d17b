"""A StorageWriter: holdfast's format under torch's own save, for its engine, planners, stagers and cached plans."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Any
from uuid import uuid4

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.commit import folder
from holdfast.commit.commit import commit
from holdfast.commit.draft import Identity, complete, draft
from holdfast.dcp.failures import in_torchs_words
from holdfast.dcp.flattened import VERSION, leave_hint, torch_id
from holdfast.dcp.items import RankItems, containers, gather, joined
from holdfast.dcp.opening import as_torch_has_it, may_be_a_path
from holdfast.errors import Damaged, HoldfastError, Mismatch, StorageError, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk import manifest
from holdfast.ondisk.manifest import FileRecord
from holdfast.plan.layout import OwnedJoin
from holdfast.plan.plan import plan_of
from holdfast.ranks.ranks import Ranks
from holdfast.save import RUN
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.write.datafiles import DataFile, OpenFiles, datafiles_of
from holdfast.write.pool import write_at_once

BEGUN = ".manifest.begun.tmp"
"""The first rank's word to the others, beside the data until the commit; what a dead save leaves of it is swept."""


class _Begun(msgspec.Struct):
    """What the writers of one save must agree on. torch's plans cannot carry it: a cached plan is an old one."""

    save: str
    world_size: int


class Writer(StorageWriter):
    """A folder that becomes a holdfast checkpoint: ``dcp.save(state, storage_writer=Writer(path))``, and `async_save`.

    Each rank writes its items to its own data files, durably; the first rank proves that the pieces tile every tensor
    and creates the manifest, last and whole. ``overwrite``: a checkpoint that is there is replaced in one step, else
    refused. Values are kept as values: one that holdfast does not keep is refused by its path. ``path`` must be the
    same folder on every rank. Errors arrive as torch's CheckpointException, with holdfast's text inside.
    """

    def __init__(self, path: str | os.PathLike[str] | Place, *, overwrite: bool = True) -> None:
        super().__init__()
        self.path = location(path)
        self.overwrite = overwrite
        self.save_id = str(uuid4())
        self._rank: int | None = None
        self._begun: _Begun | None = None
        self._replaces = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process of torch's that saves: a local path is pickled as pathlib's."""
        vars(self).update(state, path=location(state["path"]))

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, as torch calls it."""
        return as_torch_has_it(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be a path: all that `holdfast.save` takes."""
        return may_be_a_path(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """The path, and an id: the save's once its data is written, before that one that changes with `reset`."""
        return StorageMeta(checkpoint_id=as_torch_has_it(self.path), save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go to another path if one is given."""
        self._begun, self.save_id = None, str(uuid4())
        if checkpoint_id is not None:
            self.path = location(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's number. Raises Unsupported for ``use_collectives=False``: then nobody could commit."""
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "use_collectives=False leaves no rank that hears of all others and could commit: let torch use them, "
                "or save with holdfast.dcp.save, which needs none"
            )
        self._rank, self._begun = kwargs.get("rank"), None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: begin a save in the folder. Raises StorageError if it may not take one."""
        try:
            folder.prepare(self.path, overwrite=self.overwrite)
        except StorageError as error:
            raise StorageError(in_torchs_words(str(error))) from error
        self._replaces = (self.path / manifest.FILE_NAME).is_file()
        if self._replaces:
            self._sweep()
        self._begun = _Begun(secrets.token_hex(8), len(plans))
        # For the moment before it has a name that a sweeper knows too.
        temporary = f".manifest.begun.{self._begun.save}.tmp"
        (self.path / BEGUN).replace_small(msgspec.json.encode(self._begun), temporary)
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def _sweep(self) -> None:
        try:
            folder.sweep_beside(self.path, read_manifest(self.path))
        except (Damaged, Unsupported) as error:
            events.log.warning("overwriting a checkpoint that cannot be read: %s", error)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and wait until they are durable."""
        begun = self._read_begun()
        self.save_id = torch_id(begun.save)
        rank = plan.storage_data if self._rank is None else self._rank
        with no_collection():
            collected, written = gather(plan, planner, rank)
            own = plan_of(written.tensors, {})
            own_files = datafiles_of(collected, own, Ranks(rank, begun.world_size), begun.save)
            written.files = _write(own_files, self.path, begun.save, rank)
        results = [
            WriteResult(item.index, _size_of(item), written if number == 0 else None)
            for number, item in enumerate(plan.items)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _read_begun(self) -> _Begun:
        try:
            return msgspec.json.decode((self.path / BEGUN).read_small(), type=_Begun)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise StorageError(
                f"the first rank's word is not in {self.path} ({error}): is it one shared folder on all ranks, and "
                "saves nobody else there?"
            ) from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: prove that everything is there and whole, and commit. Raises Mismatch, or what failed."""
        begun = self._begun
        if begun is None:
            raise HoldfastError("finish was called before prepare_global_plan")
        written = [r.storage_data for rank in results for r in rank if isinstance(r.storage_data, RankItems)]
        files = [file for one in written for file in one.files]
        try:
            _check_keys(metadata, results)
            _check_files(self.path, files)
            plan = plan_of(joined(written), containers(metadata, written))
            values = {path: value for one in written for path, value in one.values.items()}
            step = values["step"] if type(values.get("step")) is int else None
            identity = Identity(begun.save, RUN, step, begun.world_size)
            record = complete(draft(identity, plan, values, {}, OwnedJoin({}, {}), []), files)
        except BaseException:
            folder.withdraw([self.path / BEGUN, *(self.path / file.path for file in files)], self.path)
            raise
        commit(self.path, record, replaces=self._replaces)
        leave_hint(self.path, record)
        try:
            (self.path / BEGUN).delete()
        except StorageError as error:
            events.log.warning("the checkpoint is committed, but a small file stays: %s", error)
        metadata.storage_meta = self.storage_meta()
        metadata.version = VERSION


def _write(files: list[DataFile], target: Place, save: str, rank: int) -> list[FileRecord]:
    """The data files, durable. What could not be written whole is taken away."""
    if not files:
        return []
    opened = OpenFiles()
    try:
        with events.task("save", str(target), rank, sum(file.nbytes for file in files)) as task:
            return write_at_once(files, target, save=save, rank=rank, opened=opened, progress=task.advance)
    except BaseException:
        folder.withdraw(opened.paths, target)
        raise
    finally:
        # And so unlocked before the commit: torch does not tell this rank of the outcome.
        opened.close()


def _size_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _check_keys(metadata: Metadata, results: list[list[WriteResult]]) -> None:
    wrote = {result.index.fqn for rank in results for result in rank}
    lost = [key for key in metadata.state_dict_metadata if key not in wrote]
    if lost:
        raise Mismatch(f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} was planned and not written")


def _check_files(target: Place, files: list[FileRecord]) -> None:
    for file in files:
        try:
            size = (target / file.path).stat().st_size
        except OSError as error:
            raise StorageError(
                f"{target / file.path} is not there ({error}), although its rank has written it: is {target} one "
                "shared folder on all ranks?"
            ) from None
        if size != file.bytes:
            raise StorageError(f"{target / file.path} has {size} bytes, its rank wrote {file.bytes}")
