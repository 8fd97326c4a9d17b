"""What torch's arguments mean here, and which of them are refused: `save`, `async_save` and `load` ask first."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from holdfast import events
from holdfast.dcp.reader import Reader
from holdfast.dcp.writer import Writer
from holdfast.errors import Unsupported
from holdfast.read.ranges import Verify
from holdfast.storage.place import Place
from holdfast.storage.urls import location

_TORCH = "torch.distributed.checkpoint"
_WRITERS = (f"{_TORCH}.filesystem.FileSystemWriter", f"{_TORCH}._fsspec_filesystem.FsspecWriter")
_READERS = (f"{_TORCH}.filesystem.FileSystemReader", f"{_TORCH}._fsspec_filesystem.FsspecReader")
"""By name: torch's fsspec module is imported by programs that have fsspec."""

P = ParamSpec("P")
T = TypeVar("T")
PathLike = str | os.PathLike[str] | Place


class Destination(NamedTuple):
    """Where a save goes, and whether it may replace what is there."""

    folder: Place
    overwrite: bool


class Origin(NamedTuple):
    """Where a load comes from, and how it is checked."""

    path: Place
    verify: Verify


def destination(checkpoint_id: PathLike | None, storage_writer: Any) -> Destination:
    """Of torch's own writers the path and ``overwrite`` are taken; the rest says how torch would write there.

    Raises Unsupported for one that transforms what it writes.
    """
    if getattr(getattr(storage_writer, "transforms", None), "extensions", None):
        raise Unsupported(
            "storage_writer= has extensions that transform what it writes, which holdfast.dcp.save does not: give "
            "checkpoint_id=path instead"
        )
    overwrite = storage_writer is None or bool(storage_writer.overwrite)
    return Destination(_given(checkpoint_id, storage_writer, "storage_writer"), overwrite)


def origin(checkpoint_id: PathLike | None, storage_reader: Any) -> Origin:
    """Of torch's own readers the path is taken, and what lies there is read as any other checkpoint."""
    verify = storage_reader.verify if isinstance(storage_reader, Reader) else True
    return Origin(_given(checkpoint_id, storage_reader, "storage_reader"), verify)


def by_position(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Take the storage writer or reader ``name`` after the state dict too, as torch's older signatures have it."""

    def take(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def called(*args: P.args, **options: P.kwargs) -> T:
            if len(args) == 2:
                if options.get(name) is not None:
                    raise TypeError(f"{name} is given twice, by position and by name")
                options[name] = args[1]
                return call(args[0], **options)  # type: ignore[arg-type]
            return call(*args, **options)

        return called

    return take


def stores_itself(storage: Any) -> bool:
    """Whether a storage writer or reader is of another kind than torch's for files and holdfast's.

    Those go with torch's engine as they are. What they store is no checkpoint of holdfast's, which is said once, unless
    they derive from holdfast's.
    """
    if storage is None or _kind(storage) in (*_WRITERS, *_READERS, _kind_of(Writer), _kind_of(Reader)):
        return False
    if not isinstance(storage, (Writer, Reader)):
        _say_whose(_kind(storage))
    return True


@cache
def _say_whose(kind: str) -> None:
    events.log.warning(
        "%s goes through torch's engine as it is: what it saves and loads is its own format, not holdfast's", kind
    )


def id_for_torch(checkpoint_id: PathLike | None) -> str | os.PathLike[str] | None:
    """A path as torch's engine takes it."""
    return str(checkpoint_id) if getattr(checkpoint_id, "is_remote", False) else checkpoint_id


def plans_itself(planner: Any) -> bool:
    """Whether a planner is the caller's own, or one of torch's that plans otherwise than its default ones.

    Those go with torch's engine. The arguments of the default ones change nothing but the keys of torch's own files.
    """
    return planner is not None and type(planner) not in (DefaultSavePlanner, DefaultLoadPlanner)


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
        raise Unsupported(
            f"async_stager={_kind(stager)} cannot be honoured by holdfast.dcp.async_save, which stages by itself: "
            "leave it out; or keep it with torch's engine over holdfast's format, as "
            "torch.distributed.checkpoint.async_save(…, async_stager=…, storage_writer=holdfast.dcp.Writer(path))"
        )
    return "later" if stager._config.use_async_staging else "at once"


def _given(checkpoint_id: PathLike | None, storage: Any, name: str) -> Place:
    if checkpoint_id is None and storage is None:
        raise Unsupported(f"`checkpoint_id` must be specified if {name} is None: the path of the checkpoint")
    path = storage.path if checkpoint_id is None else checkpoint_id
    try:
        return location(path)
    except ValueError as error:
        raise NoStorage(f"Cannot detect which storage {path} names: {error}") from error


class NoStorage(ValueError, RuntimeError):
    """A path or URL that names nothing: a ValueError as everywhere in holdfast, a RuntimeError as of torch."""


def _kind(value: object) -> str:
    return _kind_of(type(value))


def _kind_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
