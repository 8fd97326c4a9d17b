"""Checkpoints that borrow files from others, made by hand: saved whole, then told to share what has not changed.

Called by the tests of what becomes of such files. Shares whole files: those of which every piece has the same sums.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

import holdfast
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest
from holdfast.ondisk.manifest import FileRecord, Manifest, is_reused, own_path, sibling_of
from holdfast.storage import storage
from holdfast.storage.place import Place

SECTIONS = ("embedding", "model", "optimizer", "head")


def state_of(step: int, **versions: int) -> dict[str, Any]:
    """A state of some sections; each says by its version which numbers it holds."""
    return {
        **{
            name: {"w": torch.full((30, 4), float(versions.get(name, 0) * 10 + at)), "v": torch.arange(5) + at}
            for at, name in enumerate(SECTIONS)
        },
        "step": step,
    }


def save_on(
    state: Mapping[str, Any], path: Place, base: Place | None = None, *, links: bool = False,
    overwrite: bool = False,
) -> Manifest:  # fmt: skip
    """Save, and borrow from ``base`` the files that are equal: linked into the folder, or cited where they lie."""
    lent: dict[tuple[Any, ...], FileRecord] = {}
    if base is not None:
        lender = read_manifest(base)
        lent = {_content(base, file): file._replace(save=file.save or lender.save) for file in lender.data_files}
    record = holdfast.save(state, path, overwrite=overwrite).manifest
    rows, own = [], []
    for file in record.data_files:
        theirs = lent.get(_content(path, file))
        if theirs is not None and base is not None:
            own.append(path / file.path)
            file = _borrowed(theirs, base, path, links=links)
        rows.append(manifest.file_row(file))
    changed = msgspec.structs.replace(record, files=rows)
    (path / manifest.FILE_NAME).write_small(manifest.encode(changed))
    storage.delete(*own)
    return changed


def _borrowed(file: FileRecord, base: Place, path: Place, *, links: bool) -> FileRecord:
    own = own_path(file.path)
    if links and isinstance(path, Path) and isinstance(base, Path):
        if not (path / own).exists():
            os.link(base / file.path, path / own)
        return file._replace(path=own)
    at = file.path if is_reused(file.path) else f"../{base.name}/{file.path}"
    return file._replace(path=own if sibling_of(at)[0] == path.name else at)


def _content(folder: Place, file: FileRecord) -> tuple[Any, ...]:
    data = (folder / file.path).read_small()
    header = datafile.parse_header(data[: file.header_bytes], len(data))
    section = own_path(file.path).partition("/")[0]
    return (section, *((key, piece.dtype, piece.lengths, header.sums[key]) for key, piece in header.pieces.items()))


def needed(root: Place) -> set[str]:
    """All files below ``root`` that a committed checkpoint is made of, by their paths from there."""
    found = set()
    for name in root.folder_names():
        if not (root / name / manifest.FILE_NAME).is_file():
            continue
        record = read_manifest(root / name)
        found.add(f"{name}/{manifest.FILE_NAME}")
        found.update(f"{name}/{path}" for path, _, _ in record.attachments)
        for file in record.data_files:
            found.add(file.path[3:] if is_reused(file.path) else f"{name}/{file.path}")
    return found


def is_state(path: Place, expected: Mapping[str, Any], lost: tuple[str, ...] = ()) -> None:
    """Every byte is proved, and the content is what was saved, but for what the checkpoint has lost."""
    opened = holdfast.open(path)
    opened.verify()
    found = opened.state_dict()
    assert set(found) == set(expected) - set(lost)
    for name, section in found.items():
        if isinstance(section, dict):
            assert all(torch.equal(section[key], expected[name][key]) for key in expected[name])
        else:
            assert section == expected[name]
