"""What is wrong with a checkpoint: faults in its files, and the tensors that they hit.

`examine` finds faults; `verify`, `repair` and scrubbing report damages. Never reads a file: the manifest says it all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from holdfast.errors import Damaged
from holdfast.ondisk import datafile, dtypes, manifest, names
from holdfast.ondisk.box import Box, flat_boxes
from holdfast.ondisk.manifest import Manifest
from holdfast.storage.place import Place

FIRST = 2
"""Tensors that a row of a table names at the most."""

NAMED = 12
"""Tensors that a line of an error names at the most; the report has all of them."""


class Fault(msgspec.Struct, frozen=True, order=True):
    """What is wrong in one data file, by its number in the manifest; small enough to send to other ranks.

    ``key`` is the piece that is hit, ``at`` where in the piece it begins, ``begin`` where in the file. Without a key it
    is the file as a whole that is missing, cut or has a wrong header. ``nbytes`` is 0 where a piece is missing.
    """

    file: int
    begin: int = 0
    nbytes: int = 0
    key: str = ""
    at: int = 0
    what: str = ""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: ``nbytes`` from byte ``begin`` of ``file`` on, and what they are.

    ``tensor`` is the name of a tensor and ``box`` the part of it that is hit, (offsets, lengths) in elements; ``value``
    is ``path@rank`` where it is a value of one rank. All are empty for an attachment, and for bytes that nothing needs.
    """

    file: str
    what: str
    tensor: str = ""
    box: Box | None = None
    value: str = ""
    begin: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.tensor}{self.box or ''}" if self.tensor else f"value {self.value}" if self.value else self.file


class Findings(msgspec.Struct):
    """What is wrong in one rank's part: faults of data files, and the rest. Small enough to send to other ranks."""

    save: str
    nbytes: int
    read: int
    unverified: int
    faults: list[Fault]
    others: list[Damage]


@dataclass(frozen=True)
class Verified:
    """The outcome of a verification.

    ``nbytes`` were checked, ``read`` came from storage (of all ranks that took part), ``unverified`` of what was
    checked have no sum to compare with. ``deep`` is False if only headers, sizes and attachments were looked at.
    ``tensors`` are all names that are hit, those of tied tensors too.
    """

    path: str
    deep: bool
    nbytes: int
    read: int
    unverified: int
    seconds: float
    damages: tuple[Damage, ...] = ()
    tensors: tuple[str, ...] = field(default=())

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages


Contents = dict[str, tuple[str, Box | None]]
"""By key what the manifest says that a file holds: a tensor and its box, or ``path@rank`` and no box."""


def contents(record: Manifest, files: Container[int]) -> dict[int, Contents]:
    """What the manifest says that these ``files`` hold."""
    by_file: dict[int, Contents] = {}
    for name, tensor in record.tensors.items():
        short = names.in_section(name)
        for box, index in tensor.boxes():
            if index in files:
                by_file.setdefault(index, {})[datafile.key_of(short, box, tensor.shape)] = name, box
    for path, indices in record.per_rank.items():
        short = names.in_section(path)
        for rank, index in enumerate(manifest.expand(indices)):
            if index in files:
                by_file.setdefault(index, {})[f"{short}@{rank}"] = f"{path}@{rank}", None
    return by_file


def damages(record: Manifest, faults: Iterable[Fault], folder: Place) -> list[Damage]:
    """What faults in the files of a ``folder`` mean for tensors, in the order of files and bytes."""
    ordered = sorted(set(faults))
    held = contents(record, {fault.file for fault in ordered})
    damaged: list[Damage] = []
    for fault in ordered:
        file, inside = str(folder / record.data_files[fault.file].path), held.get(fault.file, {})
        if not fault.key:
            nbytes = record.data_files[fault.file].bytes
            hits = list(inside.values()) or [("", None)]
            damaged += [_damage(file, fault.what, name, box, 0, nbytes) for name, box in hits]
            continue
        name, box = inside.get(fault.key) or _part_of_value(fault.key, inside)
        if box is not None and fault.nbytes:
            box = _hit(box, dtypes.itemsize(record.tensors[name].dtype), fault.at, fault.nbytes)
        damaged.append(_damage(file, fault.what, name, box, fault.begin, fault.nbytes))
    return damaged


def _damage(file: str, what: str, name: str, box: Box | None, begin: int, nbytes: int) -> Damage:
    if box is None:
        return Damage(file, what, value=name, begin=begin, nbytes=nbytes)
    return Damage(file, what, name, box, begin=begin, nbytes=nbytes)


def _part_of_value(key: str, inside: Contents) -> tuple[str, Box | None]:
    """A tensor in a value of one rank is kept under a key below the value's own; anything else is nobody's."""
    return inside.get(key.partition("@")[0] + "@" + key.partition("@")[2].partition("/")[0], ("", None))


def _hit(cell: Box, itemsize: int, at: int, nbytes: int) -> Box:
    """The smallest box of the tensor with these bytes of a cell in it."""
    parts = flat_boxes(cell.lengths, at // itemsize, -(-(at + nbytes) // itemsize))
    low = tuple(map(min, zip(*(part.offsets for part in parts), strict=True)))
    high = tuple(map(max, zip(*(part.ends for part in parts), strict=True)))
    offsets = tuple(a + b for a, b in zip(low, cell.offsets, strict=True))
    return Box(offsets, tuple(b - a for a, b in zip(low, high, strict=True)))


def tensors_hit(damaged: Iterable[Damage], record: Manifest) -> tuple[str, ...]:
    """Every name under which a tensor that is hit can be asked for."""
    hit = dict.fromkeys(damage.tensor for damage in damaged if damage.tensor)
    return (*hit, *(alias for alias, name in record.aliases.items() if name in hit))


def by_fault(damaged: Iterable[Damage]) -> list[list[Damage]]:
    """The damages of each fault, in order: a file that is missing is one, whatever the number of tensors in it."""
    faults: dict[tuple[str, str, int, int], list[Damage]] = {}
    for one in damaged:
        faults.setdefault((one.file, one.what, one.begin, one.nbytes), []).append(one)
    return list(faults.values())


def hit_by(fault: Sequence[Damage]) -> str:
    """What the damages of one fault hit, of many the number and the first names; empty if nothing needs the bytes."""
    hits = [str(one) for one in fault if one.tensor or one.value]
    if len(hits) < 2:
        return "".join(hits)
    kinds = "tensors" if all(one.tensor for one in fault) else "tensors and values"
    more = f" … and {len(hits) - FIRST} more" if len(hits) > FIRST else ""
    return f"{len(hits)} {kinds}: {', '.join(hits[:FIRST])}{more}"


def error_of(path: object, damaged: Sequence[Damage]) -> Damaged:
    """The error that lists every fault once, each with the tensors that it hits."""
    hits: dict[str, list[str]] = {}
    for damage in damaged:
        names = hits.setdefault(damage.what, [])
        if damage.tensor or damage.value:
            names.append(str(damage))
    lines = []
    for what, names in hits.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(f"{what} (hits {', '.join(names[:NAMED])}{more})" if names else what)
    return Damaged("\n".join([f"{path} is damaged:", *lines]))


def verdict(
    path: Place, record: Manifest, findings: Findings, *, deep: bool, began: float, raises: bool
) -> Verified:  # fmt: skip
    """What findings of a search that ``began`` then mean for tensors. With ``raises``, raises Damaged for them."""
    damaged = (*findings.others, *damages(record, findings.faults, path))
    if damaged and raises:
        raise error_of(path, damaged)
    hit = tensors_hit(damaged, record)
    return Verified(
        str(path), deep, findings.nbytes, findings.read, findings.unverified, monotonic() - began, damaged, hit
    )
