"""Whether a committed checkpoint is whole, by its manifest and the sizes of its files; and its metric.

Asked before a step is restored, uploaded or kept. Never reads a tensor.
"""

from __future__ import annotations

import msgspec

from holdfast.checkpoint import Checkpoint
from holdfast.commit.reused import root_of
from holdfast.commit.sections import dropped_of
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk.manifest import NOTES, Manifest, is_reused, origin_of, sibling_of
from holdfast.run.keep import Mode
from holdfast.storage.place import Place


def fault_of(path: Place, lost: list[str] | None = None) -> str | None:
    """Why a committed checkpoint is not whole, by its manifest and its files' sizes; None if it is.

    ``lost`` takes the sections that it has lost since it was saved, which is no fault. Raises StorageError if a store
    does not tell: that says nothing of the checkpoint, and a run must not go on from an older one for it.
    """
    try:
        record = read_manifest(path)
        if lost is not None:
            lost[:] = dropped_of(record)
        return next(iter(lacking_files(path, record).values()), None)
    except (Damaged, NotACheckpoint, Unsupported) as error:
        return str(error)
    except (HoldfastError, OSError) as error:
        if path.is_remote:
            raise
        return str(error)


def lacking_files(folder: Place, record: Manifest) -> dict[int, str]:
    """Numbers of the data files that a checkpoint does not have as its manifest says, each with what is wrong.

    In a store that is one listing, and one more for each folder that it cites. Raises StorageError.
    """
    files = record.data_files
    places = {sibling_of(file.path)[0] if is_reused(file.path) else "" for file in files}
    folders = {name: root_of(folder)[0] / name if name else folder for name in places}
    sizes = {name: faults.sizes_below() for name, faults in folders.items()}
    faults: dict[int, str] = {}
    for index, file in enumerate(files):
        name, path = sibling_of(file.path) if is_reused(file.path) else ("", file.path)
        size, own = sizes[name].get(path), folders[name] / path
        if size is None:
            faults[index] = f"{own} is missing{origin_of(file, folder.name)}"
        elif size != file.bytes:
            faults[index] = f"{own} has {size} bytes instead of {file.bytes}{origin_of(file, folder.name)}"
    return faults


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a manager notes with a step: its metric, and which of two metrics its run calls the better one."""

    metric: float | None = None
    mode: Mode | None = None


def note_of(metric: float | None, mode: Mode | None = None) -> bytes:
    """What is attached to a step, so that its metric can be found."""
    return msgspec.json.encode(Notes(None if metric is None else float(metric), mode))


def metric_of(path: Place) -> float | None:
    """The metric that a manager noted with a step; None if it noted none. As `notes_of`."""
    return notes_of(path).metric


def notes_of(path: Place) -> Notes:
    """What a manager noted with a step; nothing if it noted nothing, or what it noted is damaged.

    Raises StorageError if the disk or store does not tell: to take the step for one without a metric would delete the
    best one.
    """
    try:
        return msgspec.json.decode(Checkpoint(path).attachment(NOTES), type=Notes)
    except StorageError:
        raise
    except (HoldfastError, KeyError, msgspec.MsgspecError):
        return Notes()
