"""A target in a repository of a hub: whether it may go there, and one commit of all its files.

`to_store` calls it, and `copy` by way of that. Never deletes a file that is no part of a checkpoint.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from holdfast import events
from holdfast.commit.folder import taken
from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk import manifest
from holdfast.storage.hub import push as hub
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.store_place import StorePlace

_ALONGSIDE = (".gitattributes", ".gitignore")

_OLD = (
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model-*.bin", "pytorch_model.bin.index.json", ".metadata", "*.distcp",
)  # fmt: skip
"""What a reader could take for a part of the new checkpoint."""


def prepare_push(place: StorePlace, *, overwrite: bool) -> None:
    """Make the repository if there is none. Raises StorageError, Unsupported if nothing may be pushed."""
    hub.prepare(place)
    existing = [path for path in place.files_below() if path not in _ALONGSIDE] if not place.is_file() else [place.name]
    if existing and not overwrite:
        raise taken(f"{place} holds {existing[0]}{' and more' if len(existing) > 1 else ''}")


def push(grown: LocalPlace, place: StorePlace) -> int:
    """Commit a complete target in the place of the checkpoint that was there; the bytes of its files.

    What is no part of a checkpoint stays, unless the target has a file of the same name.
    """
    if grown.is_file():
        if not place.key:
            raise Unsupported(f"the target is one file: name it in the repository, as {place}/model.pt")
        sizes, files, stale = {"": grown.stat().st_size}, {"": Path(grown)}, set[str]()
    else:
        sizes = grown.sizes_below()
        files = {path: Path(grown / path) for path in sizes}
        stale = _checkpoint_at(place) - {*sizes}
    with events.task("upload", str(place), total=sum(sizes.values())) as task:
        address = hub.push(files, place, stale=stale, message="Upload a checkpoint with holdfast")
        task.advance(sum(sizes.values()))
    events.log.info("%s was pushed: %s", place, address)
    return sum(sizes.values())


def _checkpoint_at(place: StorePlace) -> set[str]:
    """The files of the checkpoint that is there: those of another format in the folder itself, or of its manifest."""
    there = {*place.files_below()}
    files = {path for path in there if "/" not in path and any(fnmatch(path, old) for old in _OLD)}
    if manifest.FILE_NAME in there:
        files.add(manifest.FILE_NAME)
        try:
            record = read_manifest(place)
        except (Damaged, NotACheckpoint, Unsupported) as error:
            events.log.warning("what %s names stays there, as its manifest cannot be read: %s", place, error)
        else:
            files |= {file.path for file in record.data_files} | {path for path, *_ in record.attachments}
    return files & there
