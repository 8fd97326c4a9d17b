"""Sections of a committed checkpoint: which it has, and taking some away by a new manifest over the same files.

`drop` and the manager's steps call it. Never writes a byte of data, and never deletes what the new manifest names.

We rejected a second kind of checkpoint, and a copy of the model. A data file holds one section, so a shorter manifest
is enough.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from functools import lru_cache

import msgspec

from holdfast.commit.commit import place_signature, remove_old_files
from holdfast.commit.reused import ReusedPaths
from holdfast.errors import NotACheckpoint, Unsupported
from holdfast.ondisk import manifest, names
from holdfast.ondisk.manifest import Manifest, own_path
from holdfast.storage import storage
from holdfast.storage.place import Place

DROPPED = "dropped"
"""The key of ``producer`` under which a manifest tells what it has lost: sections, joined by ``/``."""

MARK = ".holdfast-dropping"
"""Stands in a folder of a store while files go that its manifest names no more: by it a sweep finds the rest."""


def dropped_of(record: Manifest) -> list[str]:
    """Sections that the checkpoint has lost since it was saved."""
    noted = record.producer.get(DROPPED, "")
    return noted.split("/") if noted else []


def sections_of(record: Manifest) -> list[str]:
    """The sections of a checkpoint. Values at the top of the state belong to none."""
    paths = [*record.tensors, *record.aliases, *record.per_rank]
    sections = dict.fromkeys(names.section_of(path) for path in paths)
    sections.update(dict.fromkeys(path.partition("/")[0] for path in record.values if "/" in path))
    return list(sections)


def left_of(record: Manifest) -> list[str]:
    """The first keys of all that a checkpoint holds: what ``only=`` may name."""
    paths = [*record.tensors, *record.aliases, *record.values, *record.per_rank]
    return list(dict.fromkeys(path.partition("/")[0] for path in paths))


def without(record: Manifest, gone: Collection[str]) -> Manifest:
    """The manifest without the sections ``gone``: the same save, fewer tensors, values and files.

    Raises Unsupported if a tensor that stays is tied to one that goes, and so has its bytes there.
    """
    for alias, name in record.aliases.items():
        if names.section_of(name) in gone and names.section_of(alias) not in gone:
            raise Unsupported(f"{alias} shares the bytes of {name}: without the section of {name} it would be lost too")
    files = record.data_files
    stay = [index for index, file in enumerate(files) if own_path(file.path).partition("/")[0] not in gone]
    number = {old: new for new, old in enumerate(stay)}

    @lru_cache(maxsize=4096)
    def renumbered(indices: str) -> str:
        try:
            return manifest.ranges(number[index] for index in manifest.expand(indices))
        except KeyError as error:
            path = files[int(error.args[0])].path
            raise Unsupported(f"{path} holds what belongs to another section, which would be lost too") from None

    return msgspec.structs.replace(
        record,
        producer={**record.producer, DROPPED: "/".join(dict.fromkeys([*dropped_of(record), *gone]))},
        files=[manifest.file_row(files[index]) for index in stay],
        tensors={
            name: msgspec.structs.replace(tensor, files=renumbered(tensor.files))
            for name, tensor in record.tensors.items()
            if names.section_of(name) not in gone
        },
        values={path: value for path, value in record.values.items() if "/" not in path or not _below(path, gone)},
        containers={path: kind for path, kind in record.containers.items() if not _below(path, gone)},
        aliases={a: name for a, name in record.aliases.items() if names.section_of(a) not in gone},
        per_rank={p: renumbered(f) for p, f in record.per_rank.items() if names.section_of(p) not in gone},
    )


def _below(path: str, sections: Collection[str]) -> bool:
    return path.partition("/")[0] in sections


def lost_files(old: Manifest, new: Manifest) -> list[tuple[str, int]]:
    """Paths and bytes of the files that only ``old`` names."""
    kept = {file.path for file in new.data_files}
    return [(file.path, file.bytes) for file in old.data_files if file.path not in kept]


def replace(
    folder: Place, old: Manifest, new: Manifest, reused: ReusedPaths | None = None, *, signed: bytes | None = None
) -> None:  # fmt: skip
    """Put ``new`` in the place of ``old`` in one step, then delete what nobody needs any more.

    ``reused``: what the other checkpoints reuse, if the caller knows. ``signed``: the signature of the new one; that of
    the old one goes with it.
    A crash in between leaves files that no manifest names, to be swept. Raises NotACheckpoint if ``old`` is not there
    any more: a save or a delete came in between.
    """
    target, data = folder / manifest.FILE_NAME, manifest.encode(new)
    marks = [] if folder.has_locks else [folder / MARK]
    for (
        mark
    ) in marks:  # by their names what is left of a drop in a store cannot be distinguished from the files that stay
        mark.write_small(b"sections are being dropped, or were when a process died\n")
    try:
        _refuse_another(target, old)
    except NotACheckpoint:
        storage.delete(*marks)
        raise
    if signed is not None:
        place_signature(folder, new, signed)
    target.replace_small(data, f".manifest.{new.save}.{secrets.token_hex(4)}.tmp")
    if remove_old_files(folder, old, new, reused):
        storage.delete(*marks)


def _refuse_another(target: Place, old: Manifest) -> None:
    # A store has no condition for a replacement; on disk nobody else should be at it. So the gap is kept short.
    try:
        standing = manifest.decode(target.read_small(), str(target))
    except FileNotFoundError:
        standing = None
    if standing != old:
        fate = "deleted" if standing is None else "replaced"
        raise NotACheckpoint(f"{target} was {fate} meanwhile, and is left alone")
