"""What is said of a path that holds no checkpoint: what is there instead, and what to do.

`open` and `read_manifest` raise NotACheckpoint with it. Reads no file, and never walks a large tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.errors import StorageError
from holdfast.ondisk import datafile, manifest
from holdfast.storage import storage
from holdfast.storage.place import Place

LEVELS = 3
"""Levels of a folder that tell what it is: of a root, the files of its steps. Data sets may lie beside a run."""


def what_is_there(folder: Place) -> str:
    """What a place holds that is no checkpoint, and which path might be meant."""
    if folder.is_remote:
        return _what_is_in_store(folder)
    if not folder.exists():
        above = folder.parent
        kin = sorted(p.parent.name for p in above.glob(f"*/{manifest.FILE_NAME}")) if above.is_dir() else []
        return f"there is nothing at {folder}" + (
            f"; beside it are the checkpoints {', '.join(kin[-5:])}" if kin else ""
        )
    if folder.is_file():
        if folder.name == manifest.FILE_NAME:
            return f"{folder} is a file of a checkpoint: give its folder {folder.parent}"
        if not folder.stat().st_size:
            return f"{folder} is empty: whoever wrote it broke off, or the disk was full"
        return f"{folder} is a file of no format that holdfast reads (docs/formats.md lists them)"
    below = sorted(p.parent.name for p in folder.glob(f"*/{manifest.FILE_NAME}"))
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    for above in (folder.parent, folder.parent.parent):
        if (above / manifest.FILE_NAME).is_file():
            return f"{folder} is a part of the checkpoint {above}"
    return _uncommitted(folder, folder.files_near(levels=LEVELS))


def _what_is_in_store(folder: Place) -> str:
    """The same with few requests: what a folder is called tells enough."""
    try:
        files = folder.files_below()
        beside = folder.parent.folder_names() if not files else []
    except StorageError as error:  # a web server lists nothing
        return f"there is no {folder / manifest.FILE_NAME}, and what else is there cannot be listed ({error})"
    if not files:
        return f"there is nothing at {folder}" + (f"; beside it are {', '.join(beside[-5:])}" if beside else "")
    below = sorted({path.split("/")[0] for path in files if path.endswith(f"/{manifest.FILE_NAME}")})
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    return _uncommitted(folder, files)


def unfinished(files: Iterable[str]) -> list[str]:
    """The folders of a root, by the paths of its files, that hold data of a save of ours, and no manifest."""
    parted = [path.partition("/") for path in files]
    committed = {name for name, _, rest in parted if rest == manifest.FILE_NAME}
    return sorted({name for name, _, rest in parted if datafile.save_of(rest) is not None} - committed)


def what_is_lent(names: Sequence[str]) -> str:
    """Of the folder of a swept step, whose files checkpoints of these ``names`` have borrowed."""
    told = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"no checkpoint any more: its files stay since {told} borrow{'s' if len(names) == 1 else ''} them"


def _uncommitted(folder: Place, files: Sequence[str]) -> str:
    if any(path.startswith("parts/") for path in files):
        return f"{folder} holds a save that never committed; holdfast.recover commits it if all its ranks had finished"
    if any(datafile.save_of(path) for path in files):
        return f"{folder} holds data but no manifest.json: a save that never committed, or its manifest was deleted"
    if any(path.endswith(".safetensors") and "/" not in path for path in files):
        return f"{folder} holds data but no manifest.json: a save that never committed, or another program's files"
    begun = unfinished(files)
    if begun:
        return f"no step was saved here yet: {folder} holds saves that never committed, {', '.join(begun[-5:])}"
    if files and all(path.startswith(f"{storage.JOURNAL}/") for path in files):
        return f"no step was saved here yet: {folder} holds the journal of a run and no checkpoint"
    if not files:
        return f"no step was saved here yet: {folder} is empty"
    return f"{folder} holds no manifest.json, and no checkpoint of a format that holdfast reads (docs/formats.md)"
