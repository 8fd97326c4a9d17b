"""What is said of a path that holds no checkpoint: what is there instead, and what to do.

`open` and `read_manifest` raise NotACheckpoint with it. Reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.engine import storage
from holdfast.engine.stores.place import Location, Place
from holdfast.errors import StorageError
from holdfast.ondisk import manifest


def what_is_there(folder: Path) -> str:
    """What a local path holds that is no checkpoint, and which path might be meant."""
    if not folder.exists():
        above = folder.parent
        kin = sorted(p.parent.name for p in above.glob(f"*/{manifest.FILE_NAME}")) if above.is_dir() else []
        return f"there is nothing at {folder}" + (
            f"; beside it are the checkpoints {', '.join(kin[-5:])}" if kin else ""
        )
    if folder.is_file():
        hint = f"; the checkpoint is its folder {folder.parent}" if folder.name == manifest.FILE_NAME else ""
        return f"{folder} is a file of no format that holdfast reads (docs/formats.md lists them){hint}"
    below = sorted(p.parent.name for p in folder.glob(f"*/{manifest.FILE_NAME}"))
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    return _uncommitted(folder, storage.files_below(folder))


def what_is_in_store(folder: Place) -> str:
    """The same with few requests: what a folder is called tells enough."""
    try:
        files = storage.files_below(folder)
        beside = storage.folders_in(folder.parent) if not files else []
    except StorageError as error:  # a web server lists nothing
        return f"there is no {folder / manifest.FILE_NAME}, and what else is there cannot be listed ({error})"
    if not files:
        return f"there is nothing at {folder}" + (f"; beside it are {', '.join(beside[-5:])}" if beside else "")
    below = sorted({path.split("/")[0] for path in files if path.endswith(f"/{manifest.FILE_NAME}")})
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    return _uncommitted(folder, files)


def _uncommitted(folder: Location, files: Sequence[str]) -> str:
    if any(path.startswith("parts/") for path in files):
        return f"{folder} holds a save that never committed; holdfast.recover commits it if all its ranks had finished"
    if any(path.endswith(".safetensors") for path in files):
        return f"{folder} holds data but no manifest.json: a save that never committed, or another program's files"
    return f"{folder} holds no manifest.json, and no checkpoint of a format that holdfast reads (docs/formats.md)"
