"""What ranks cite instead of writing it, folded into the manifest: a draft and citations → a manifest.

The first rank calls `joined` when it commits a save, `parts` when it commits one late. Pure: opens no file, asks no
rank; that the cited files are there is proved by who cites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.commit.commit import complete
from holdfast.errors import HoldfastError
from holdfast.ondisk import datafile, manifest, spans
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Cite


class Did(NamedTuple):
    """What one rank wrote, and what it cites."""

    files: Sequence[FileRecord]
    cites: Sequence[Cite]


def joined(drafted: Manifest, ranks: Sequence[Did]) -> Manifest:
    """The manifest of a save: its draft with what each rank wrote and cited, in order of the ranks.

    Raises HoldfastError if that is not what was planned.
    """
    written = [file for did in ranks for file in did.files]
    if not any(did.cites for did in ranks):
        return complete(drafted, written)
    borrowed = {cite.file[0]: cite.record for did in ranks for cite in did.cites}
    folded = fold(drafted, {file.path for file in written}, [did.cites for did in ranks])
    return complete(folded, [*written, *borrowed.values()])


def fold(drafted: Manifest, written: set[str], cites: Sequence[Sequence[Cite]]) -> Manifest:
    """The draft with cited tensors in the files that are cited, and without the files that nobody had to write.

    ``cites[r]`` are those of rank r, ``written`` the paths of all files that were written. Cited files come after
    those, by the save that wrote them and then by rank, so that the files of a tensor stay a few ranges.
    """
    planned = {str(row[0]): index for index, row in enumerate(drafted.files)}
    borrowed: list[tuple[str, int, Cite]] = []  # (save, planned file that it stands in for, citation)
    for rank, own in enumerate(cites):
        for cite in own:
            path = datafile.file_name(_section_of(cite.file[0]), rank, drafted.world_size, drafted.save, cite.volume)
            if path not in planned:
                raise HoldfastError(f"{cite.file[0]} is cited for {path}, which nobody planned; a fault of holdfast")
            borrowed.append((cite.file[4], planned[path], cite))
    borrowed.sort(key=lambda found: (found[0], found[1], found[2].file[0]))
    own_files = [index for path, index in planned.items() if path in written]
    number = {index: at for at, index in enumerate(own_files)}
    rows = [drafted.files[index] for index in own_files]
    listed: dict[str, int] = {}
    # For each set of tensors that is cited as one: in place of which planned file which file comes.
    stands: dict[str, dict[int, int]] = {}
    for _, index, cite in borrowed:
        at = listed.setdefault(cite.file[0], len(own_files) + len(listed))
        if at == len(rows):
            rows.append(manifest.file_row(cite.record))
        if stands.setdefault(cite.tensors, {}).setdefault(index, at) != at:
            raise HoldfastError(f"{cite.file[0]} and another file are cited for the same tensors; a fault of holdfast")
    sets_of: dict[int, list[str]] = {}
    for text in stands:
        cited = spans.read(text)
        if cited.count > len(drafted.tensors) or cited.largest >= len(drafted.tensors):
            raise HoldfastError(f"tensors {text[:40]!r} are cited, of {len(drafted.tensors)}; a fault of holdfast")
        for tensor in cited:
            sets_of.setdefault(tensor, []).append(text)
    # Thousands of tensors lie alike and are cited alike: each such kind is worked out once.
    known: dict[tuple[str, tuple[str, ...]], str] = {}
    tensors = {}
    for position, (name, record) in enumerate(drafted.tensors.items()):
        key = (record.files, tuple(sets_of.get(position, ())))
        if key not in known:
            known[key] = _renumbered(name, record.files, [stands[text] for text in key[1]], number)
        tensors[name] = TensorRecord(record.dtype, record.shape, record.cells, known[key])
    per_rank = {path: _renumbered(path, files, [], number) for path, files in drafted.per_rank.items()}
    return msgspec.structs.replace(drafted, files=rows, tensors=tensors, per_rank=per_rank)


def _renumbered(name: str, files: str, stands: list[dict[int, int]], number: dict[int, int]) -> str:
    """The files of one tensor: where a rank cites it the cited one, else the one that the rank wrote."""
    found = []
    for index in manifest.expand(files):
        at = [stand[index] for stand in stands if index in stand]
        if not at and index in number:
            at = [number[index]]
        if len(at) != 1:
            what = "cited twice" if at else "neither written nor cited"
            raise HoldfastError(f"{name} was {what}; this is a fault of holdfast, please report it")
        found.append(at[0])
    return manifest.ranges(found)


def _section_of(path: str) -> str:
    return path.rpartition("/")[0].rpartition("/")[2]
