"""What a manifest would say of tensors, worked out from the headers of data files alone.

`rescue` calls it. Pure: headers come in, records go out. Never joins files of two saves, and never passes over a hole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import msgspec

from holdfast.ondisk import datafile, dtypes, manifest, names
from holdfast.ondisk.box import Box, parse, tiling_fault, whole
from holdfast.ondisk.cells import TensorRecord, cells_for
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import FileRecord

_NAME = re.compile(r"(?P<section>[^/]+)/(?P<rank>\d+)-of-(?P<world>\d+)(\.(?P<volume>\d+))?\.(?P<save>[0-9a-f]{16})\.")


class DataFile(NamedTuple):
    """A data file: its record, what its name says, and its header."""

    record: FileRecord
    section: str
    rank: int
    world_size: int
    volume: int
    header: Header


@dataclass
class Rebuilt:
    """What the files of one save hold. ``faults`` say why it is not whole; ``unsure``: which files may be missing."""

    world_size: int
    files: list[FileRecord]
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    per_rank: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


@dataclass
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    files: dict[Box, int] = field(default_factory=dict)


def described(record: FileRecord, header: Header) -> DataFile:
    """A data file with what its name says. Raises ValueError if its header says something else."""
    named = _NAME.match(record.path)
    if named is None:
        raise ValueError("its name is not that of a data file")
    said = (header.metadata.get("save"), header.metadata.get("rank"), header.metadata.get("section"))
    if said != (named["save"], str(int(named["rank"])), named["section"]):
        raise ValueError(f"its header says that it is of save, rank and section {said}")
    volume = int(named["volume"] or 0)
    return DataFile(record, named["section"], int(named["rank"]), int(named["world"]), volume, header)


def rebuilt(files: Sequence[DataFile]) -> Rebuilt:
    """Join the files of one save: tensors in the order of the files, each proved to be tiled by its pieces."""
    ordered = sorted(files, key=lambda file: (file.section, file.volume, file.rank))
    made = Rebuilt(ordered[0].world_size, [file.record for file in ordered])
    tensors: dict[str, _Tensor] = {}
    values: dict[str, dict[int, int]] = {}
    for index, file in enumerate(ordered):
        if file.world_size != made.world_size:
            made.faults.append(f"{file.record.path} is of {file.world_size} ranks, others of {made.world_size}")
        try:
            shapes = msgspec.json.decode(file.header.metadata.get("shapes", "{}"), type=dict[str, tuple[int, ...]])
        except msgspec.MsgspecError as error:
            made.faults.append(f"{file.record.path} has no valid shapes: {error}")
            continue
        for key, piece in file.header.pieces.items():
            if "@" in key:
                path, _, rank = key.partition("@")
                if rank.isdigit():
                    values.setdefault(names.from_section(file.section, path), {})[int(rank)] = index
            else:
                _add(made, tensors, file, index, piece, shapes)
    for name, tensor in tensors.items():
        _tile(made, name, tensor)
    for path, at in values.items():
        if sorted(at) == list(range(made.world_size)):
            made.per_rank[path] = manifest.ranges(at[rank] for rank in range(made.world_size))
        else:
            made.faults.append(f"the value {path} is there of {len(at)} of {made.world_size} ranks")
    made.unsure += _not_seen(ordered, made.world_size)
    return made


def _add(
    made: Rebuilt, tensors: dict[str, _Tensor], file: DataFile, index: int, piece: Piece,
    shapes: dict[str, tuple[int, ...]],
) -> None:  # fmt: skip
    base = datafile.base_of(piece.key)
    name, shape = names.from_section(file.section, base), shapes.get(base, piece.lengths)
    try:
        box = parse(piece.key[len(base) :]) if piece.key != base else whole(shape)
    except ValueError as error:
        made.faults.append(f"{file.record.path} holds {piece.key!r}: {error}")
        return
    tensor = tensors.setdefault(name, _Tensor(piece.dtype, shape))
    if (tensor.dtype, tensor.shape) != (piece.dtype, shape):
        made.faults.append(f"{name} is {tensor.dtype} {list(tensor.shape)} and, in {file.record.path}, {piece.dtype}")
    elif piece.nbytes != box.size * dtypes.itemsize(piece.dtype):
        made.faults.append(f"{file.record.path} holds {piece.nbytes} bytes of {piece.key}, which has others")
    elif box.size:
        tensor.files.setdefault(box, index)


def _tile(made: Rebuilt, name: str, tensor: _Tensor) -> None:
    if not prod(tensor.shape):
        made.tensors[name] = TensorRecord(tensor.dtype, tensor.shape, None, "")
        return
    boxes = list(tensor.files)
    fault = tiling_fault(tensor.shape, boxes)
    if fault is not None:
        made.faults.append(f"{name} of shape {list(tensor.shape)} is not whole: {fault}")
        return
    cells, order = cells_for(tensor.shape, boxes)
    files = manifest.ranges(tensor.files[boxes[i]] for i in order)
    made.tensors[name] = TensorRecord(tensor.dtype, tensor.shape, cells, files)


def _not_seen(files: Sequence[DataFile], world_size: int) -> list[str]:
    """Sections of which some ranks have no file: they may have written none, or it is lost."""
    seen: dict[tuple[str, int], set[int]] = {}
    for file in files:
        seen.setdefault((file.section, file.volume), set()).add(file.rank)
    return [
        f"{section}{f', volume {volume}' if volume else ''}, has no file of {world_size - len(ranks)} of {world_size} "
        "ranks"
        for (section, volume), ranks in seen.items()
        if len(ranks) < world_size
    ]
