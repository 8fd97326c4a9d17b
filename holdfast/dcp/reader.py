"""A StorageReader: holdfast's format, and whatever else holdfast reads, under torch's own load."""

from __future__ import annotations

import io
import os
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast import events
from holdfast.buffers.stable import wait_for_copies
from holdfast.checkpoint import Checkpoint
from holdfast.dcp.flattened import Described, Tensor, describe, storage_meta, value_at
from holdfast.dcp.opening import as_torch_has_it, may_be_a_path, open_by_key
from holdfast.dcp.states import like
from holdfast.errors import HoldfastError
from holdfast.ondisk.arguments import VERIFY
from holdfast.ondisk.box import Box
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.wanted import Wanted
from holdfast.storage.place import Place
from holdfast.storage.urls import location


class Reader(StorageReader):
    """A checkpoint that holdfast can open, for torch's planners: ``dcp.load(state, storage_reader=Reader(path))``.

    Each rank reads only the bytes of its own boxes. ``verify`` as in `holdfast.load`. Values that differ by rank
    (`holdfast.PerRank`) are not offered. Errors arrive as torch's CheckpointException, with holdfast's text inside.
    """

    def __init__(self, path: str | os.PathLike[str] | Place, *, verify: Verify = True) -> None:
        super().__init__()
        self.path = location(path)
        self.verify: Verify = VERIFY.checked("verify", verify)
        self.load_id = str(uuid4())
        self._opened: tuple[Checkpoint, Described] | None = None
        self._rank = 0

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path, as torch calls it."""
        return as_torch_has_it(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be a path: all that `holdfast.open` takes."""
        return may_be_a_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was opened, and go to another path if one is given."""
        self._opened, self.load_id = None, str(uuid4())
        if checkpoint_id is not None:
            self.path = location(checkpoint_id)

    # torch calls a reader a second time, for metadata of one rank, if it takes keywords under the name `kwargs`; a
    # rank that then had luck would go on alone.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """The checkpoint in torch's words; nothing but the manifest is read."""
        self._opened = None
        checkpoint, described = self._open()
        described.metadata.storage_meta = storage_meta(checkpoint)
        described.metadata.storage_meta.load_id = self.load_id
        return described.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do; torch tells the rank here."""
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: every rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that the plan asks for into the planner's tensors, and hand it the values."""
        checkpoint, described = self._open()
        wanted: list[Wanted] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                present = getattr(planner, "state_dict", {}).get(key)
                planner.load_bytes(item, _packed(like(present, value_at(checkpoint, described.leaves[key]))))
                continue
            tensor = planner.resolve_tensor(item).detach()
            wanted.append(_wanted(checkpoint, described, item, tensor))
            filled.append((item, tensor))
        wait_for_copies()  # a save in the background still reads what would change here
        with events.task("load", str(checkpoint.path), self._rank) as task:
            task.total = sum(want.view.nbytes for want in wanted)
            read_boxes(checkpoint.files, wanted, verify=self.verify, progress=task.advance)
        for item, tensor in filled:
            planner.commit_tensor(item, tensor)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> tuple[Checkpoint, Described]:
        if self._opened is None:
            checkpoint = open_by_key(self.path)
            self._opened = checkpoint, describe(checkpoint)
        return self._opened


def _wanted(checkpoint: Checkpoint, described: Described, item: ReadItem, tensor: torch.Tensor) -> Wanted:
    """The stretch of a saved chunk that an item asks for, by its place in the whole tensor."""
    leaf = described.leaves[item.storage_index.fqn]
    if not isinstance(leaf, Tensor) or item.storage_index.offset is None:
        raise HoldfastError(f"the plan asks for {item.storage_index.fqn} as a tensor chunk, which it is not")
    start = tuple(a + b for a, b in zip(item.storage_index.offset, item.storage_offsets, strict=True))
    box = Box(start, tuple(item.lengths))
    if tuple(tensor.shape) != box.lengths:
        raise HoldfastError(f"{leaf.name}{box} is to go into a tensor of shape {list(tensor.shape)}")
    return Wanted(checkpoint.saved_name(leaf.name), checkpoint.records[leaf.name], box, tensor)


def _packed(value: Any) -> io.BytesIO:
    """A plain value in the packing that torch's planners undo; it is made here, in memory, for this one call."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
