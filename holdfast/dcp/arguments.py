"""What torch's arguments mean here, and which of them cannot be honoured.

Called first by `save`, `async_save` and `load`. Refuses before anything is done; never ignores what changes a result.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from holdfast.dcp.reader import Reader
from holdfast.dcp.writer import Writer
from holdfast.engine.ranges import Verify
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.stores.urls import location
from holdfast.errors import Unsupported

PathLike = str | os.PathLike[str] | Place


class Destination(NamedTuple):
    """Where a save goes, and whether it may replace what is there."""

    folder: Location
    overwrite: bool


class Origin(NamedTuple):
    """Where a load comes from, and how it is checked."""

    path: Location
    verify: Verify


def destination(checkpoint_id: PathLike | None, storage_writer: Any, planner: Any) -> Destination:
    """Raises Unsupported for a planner or storage writer of the caller's own."""
    if planner is not None and type(planner) is not DefaultSavePlanner:
        raise _refused("planner", planner, "save", "storage_writer=holdfast.dcp.Writer(path)")
    if storage_writer is not None and type(storage_writer) is not Writer:
        raise _refused("storage_writer", storage_writer, "save", "storage_writer=holdfast.dcp.Writer(path)")
    overwrite = storage_writer is None or storage_writer.overwrite
    return Destination(_given(checkpoint_id, storage_writer, "storage_writer"), overwrite)


def origin(checkpoint_id: PathLike | None, storage_reader: Any, planner: Any) -> Origin:
    """Raises Unsupported for a planner or storage reader of the caller's own."""
    if planner is not None and type(planner) is not DefaultLoadPlanner:
        raise _refused("planner", planner, "load", "storage_reader=holdfast.dcp.Reader(path)")
    # torch's own reader says no more than a path, and what lies there is read as any other checkpoint.
    if storage_reader is not None and type(storage_reader) not in (Reader, FileSystemReader):
        raise _refused("storage_reader", storage_reader, "load", "storage_reader=holdfast.dcp.Reader(path)")
    verify = storage_reader.verify if isinstance(storage_reader, Reader) else True
    return Origin(_given(checkpoint_id, storage_reader, "storage_reader"), verify)


def keeps_missing(planner: Any) -> bool:
    """Whether what the checkpoint lacks stays as it is."""
    return isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load


def staging_of(stager: Any) -> Literal["at once", "later", "by itself"]:
    """What a stager asks for: to return when all is staged, or before that with a future of it, or neither.

    holdfast stages by itself; of torch's stagers only this answer is taken. Raises Unsupported for one of the caller's
    own.
    """
    if stager is None:
        return "by itself"
    if type(stager) is BlockingAsyncStager:
        return "at once"
    if type(stager) is not DefaultStager:
        raise _refused("async_stager", stager, "async_save", "storage_writer=holdfast.dcp.Writer(path)")
    return "later" if stager._config.use_async_staging else "at once"


def _given(checkpoint_id: PathLike | None, storage: Any, name: str) -> Location:
    if checkpoint_id is None and storage is None:
        raise Unsupported(f"`checkpoint_id` must be specified if {name} is None: the path of the checkpoint")
    return location(storage.path if checkpoint_id is None else checkpoint_id)


def _refused(argument: str, value: object, call: str, instead: str) -> Unsupported:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    refused = f"{argument}={kind} cannot be honoured by holdfast.dcp.{call}"
    if argument.startswith("storage"):
        return Unsupported(
            f"{refused}, which knows one format: give checkpoint_id=path instead; or give torch's engine that format, "
            f"as torch.distributed.checkpoint.{call}(…, {instead})"
        )
    return Unsupported(
        f"{refused}, which plans and stages by itself: leave it out; or keep it with torch's engine over holdfast's "
        f"format, as torch.distributed.checkpoint.{call}(…, {argument}=…, {instead})"
    )
