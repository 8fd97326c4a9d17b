"""Compares two checkpoints name by name: names, shapes, types, and how far the numbers are apart.

It holds one box of each at most, and does not read tensors whose recorded sums are equal in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch

from holdfast.checkpoint import Checkpoint
from holdfast.inspect.reading import BOX, boxes_of, groups, has_numbers, numbers, read_box, read_together
from holdfast.inspect.statistics import norm_of
from holdfast.ondisk import dtypes, spans, values
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.patterns import Patterns, names_in, selector
from holdfast.read.source import ReadStats

_Pair = tuple[torch.Tensor, torch.Tensor]
Status = Literal["same", "changed", "shape", "dtype", "only in a", "only in b"]


@dataclass(frozen=True)
class Difference:
    """How a name differs between checkpoints ``a`` and ``b``; ``nbytes`` are those in ``a``, or in ``b`` if only there.

    ``same`` means to the last bit; with ``by_checksums`` it says that the same was saved, as equal sums are recorded
    for both, and nothing of the bytes on disk now, which were not read. ``shape``: the shapes differ, or the number of
    ranks of a value by rank. ``dtype``: only the types do (the numbers are compared all the same), or it is a tensor in
    one and a value in the other.

    ``largest`` and ``mean`` are of the absolute differences, ``norm`` is the root of the sum of their squares;
    ``norm_a`` and ``norm_b`` are those of the numbers themselves, ``cosine`` is that of the angle between them.
    Elements where either is NaN or infinite are left out of all of these; ``nonfinite`` counts those of them that
    differ. Floats are None where they say nothing, as for values. For what is the same, ``cosine``,
    ``norm_a`` and ``norm_b`` are None, and the rest is 0.
    """

    name: str
    status: Status
    nbytes: int
    largest: float | None = None
    mean: float | None = None
    cosine: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm: float | None = None
    nonfinite: int = 0
    by_checksums: bool = False

    @property
    def relative(self) -> float | None:
        """``norm`` as a part of the larger of ``norm_a`` and ``norm_b``: 0 to 2; None if there is no ``norm``."""
        if self.norm is None:
            return None
        larger = max(self.norm_a or 0.0, self.norm_b or 0.0)
        return self.norm / larger if larger else 0.0


def compare(a: Checkpoint, b: Checkpoint, *, only: Patterns = "*") -> Iterator[Difference]:
    """Every name that is in either and fits ``only``: tensors in the order of ``a``, then those of ``b``, then values.

    Takes some 170 MiB whatever the size of a tensor. Equal sums prove that the same was saved, not that the bytes on
    disk are still good (`Difference.by_checksums`): `holdfast.tools.verify` checks that. Raises Mismatch for a pattern
    that fits no name of either, Damaged for altered bytes among those it reads.
    """
    return _differences(a, b, only, _tensors, _value_status)


def compare_names(a: Checkpoint, b: Checkpoint, *, only: Patterns = "*") -> Iterator[Difference]:
    """`compare` of names, shapes and dtypes alone: nothing is read, and ``same`` says nothing of numbers and values."""

    def kinds(a: Checkpoint, b: Checkpoint, both: Mapping[str, TensorRecord]) -> Iterator[Difference]:
        for name, record in both.items():
            other = b.records[name]
            status: Status = "same" if record.dtype == other.dtype else "dtype"
            yield Difference(name, status if record.shape == other.shape else "shape", record.nbytes)

    return _differences(a, b, only, kinds, lambda a, b, path, in_a, in_b: "same" if in_a == in_b else "dtype")


def _differences(
    a: Checkpoint,
    b: Checkpoint,
    only: Patterns,
    tensors: Callable[[Checkpoint, Checkpoint, Mapping[str, TensorRecord]], Iterator[Difference]],
    value: Callable[[Checkpoint, Checkpoint, str, bool, bool], Status],
) -> Iterator[Difference]:
    """Every name; ``tensors`` and ``value`` compare what both have."""
    known = dict.fromkeys((*names_in(a.manifest), *names_in(b.manifest)))
    wanted = selector(only, known, f"neither {a.path} nor {b.path}", said="", what="a name that")
    in_a, in_b = ({name: r for name, r in c.records.items() if wanted(name)} for c in (a, b))
    values_a, values_b = _values(a, wanted), _values(b, wanted)
    both = {name: record for name, record in in_a.items() if name in in_b}
    compared = tensors(a, b, both)
    for name, record in in_a.items():
        missing: Status = "dtype" if name in values_b else "only in a"
        yield next(compared) if name in both else Difference(name, missing, record.nbytes)
    for name, record in in_b.items():
        if name not in in_a:
            yield Difference(name, "dtype" if name in values_a else "only in b", record.nbytes)
    for name in {**values_a, **values_b}:
        if name in values_a and name in values_b:
            yield Difference(name, value(a, b, name, values_a[name], values_b[name]), 0)
        elif name not in in_a and name not in in_b:
            yield Difference(name, "only in a" if name in values_a else "only in b", 0)


def _tensors(a: Checkpoint, b: Checkpoint, both: Mapping[str, TensorRecord]) -> Iterator[Difference]:
    """The differences of tensors that both have, in order; small ones are read together."""
    # Tied tensors are looked at once.
    first: dict[tuple[str, str], str] = {}
    for name in both:
        first.setdefault((a.saved_name(name), b.saved_name(name)), name)
    same = _same_by_checksums(a, b, first.values())

    def to_read(name: str) -> bool:
        key = a.saved_name(name), b.saved_name(name)
        return first[key] == name and name not in same and both[name].shape == b.records[name].shape

    done: dict[str, Difference] = {}
    for group in groups((name, _bytes_read(a, b, name) if to_read(name) else 0) for name in both):
        small = [name for name in group if to_read(name) and _bytes_read(a, b, name) <= BOX]
        x, y = (read_together(a, small), read_together(b, small)) if small else ({}, {})
        for name in group:
            earlier = first[a.saved_name(name), b.saved_name(name)]
            if earlier != name:
                yield replace(done[earlier], name=name)
                continue
            nbytes = both[name].nbytes
            if both[name].shape != b.records[name].shape:
                done[name] = Difference(name, "shape", nbytes)
            elif name in same:
                done[name] = replace(_same(name, nbytes), by_checksums=True)
            elif name in x:
                done[name] = _measured(a, b, name, [(x[name], y[name])])
            else:
                done[name] = _streamed(a, b, name)
            yield done[name]


def _bytes_read(a: Checkpoint, b: Checkpoint, name: str) -> int:
    return max(a.records[name].nbytes, b.records[name].nbytes)


def _same(name: str, nbytes: int) -> Difference:
    return Difference(name, "same", nbytes, largest=0.0, mean=0.0, norm=0.0)


def _same_by_checksums(a: Checkpoint, b: Checkpoint, asked: Iterable[str]) -> set[str]:
    """The names whose cells and recorded sums are equal in both; none unless both are ours: others have no sums."""
    if a.format != "holdfast" or b.format != "holdfast":
        return set()
    names = [
        n
        for n in asked
        if (a.records[n].dtype, a.records[n].shape) == (b.records[n].dtype, b.records[n].shape)
        and not any(c.files.is_made(c.saved_name(n)) for c in (a, b))  # a sum is of bytes as they lie in a file
    ]
    stats = ReadStats()
    for checkpoint in (a, b):
        texts = {checkpoint.records[name].files for name in names}
        checkpoint.files.prepare({index for text in texts for index in spans.read(text)}, stats)
    return {name for name in names if _sums(a, name) == _sums(b, name)}


def _sums(checkpoint: Checkpoint, name: str) -> list[tuple[Box, Any]]:
    """Each cell of a tensor with the sums of its blocks; one that has none is equal to no other."""
    record, sums_by_cell = checkpoint.records[name], []
    for cell, index in record.boxes():
        _, _, sums = checkpoint.files.piece(index, checkpoint.saved_name(name), cell, record, ReadStats())
        sums_by_cell.append((cell, tuple(sums) if sums else object()))
    return sums_by_cell


def _streamed(a: Checkpoint, b: Checkpoint, name: str) -> Difference:
    record, other = a.records[name], b.records[name]
    boxes = boxes_of(record.shape, max(dtypes.itemsize(record.dtype), dtypes.itemsize(other.dtype)))
    if record.dtype != other.dtype:
        return _measured(a, b, name, (_pair(a, b, name, box) for box in boxes))
    # Most tensors differ at once or not at all: what was read up to the first difference is read again for the norms.
    every = list(boxes)
    if all(_equal(*_pair(a, b, name, box)) for box in every):
        return _same(name, record.nbytes)
    return _measured(a, b, name, (_pair(a, b, name, box) for box in every))


def _pair(a: Checkpoint, b: Checkpoint, name: str, box: Box) -> _Pair:
    return read_box(a, name, box), read_box(b, name, box)


def _measured(a: Checkpoint, b: Checkpoint, name: str, pairs: Iterable[_Pair]) -> Difference:
    """The difference of a tensor, from pairs of its parts."""
    record, other = a.records[name], b.records[name]
    alike = record.dtype == other.dtype
    comparable = has_numbers(record.dtype) and has_numbers(other.dtype) and _packed(record) == _packed(other)
    distance, equal = _Distance(), alike
    for x, y in pairs:
        same = alike and _equal(x, y)
        equal = equal and same
        if comparable:
            distance.add(x, y)
        del x, y  # before the next ones are read: else four boxes are held
    if equal:
        return _same(name, record.nbytes)
    status: Status = "changed" if alike else "dtype"
    return distance.difference(name, status, record.nbytes) if comparable else Difference(name, status, record.nbytes)


def _packed(record: TensorRecord) -> bool:
    return record.dtype == "float4_e2m1fn_x2"  # two numbers an element


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one type hold the same bits: also of NaN, and of zeros with a sign."""
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


class _Distance:
    """How far numbers are apart, stretch by stretch."""

    def __init__(self) -> None:
        self.count = self.nonfinite = 0
        self.largest = self.total = self.dot = self.norm_a = self.norm_b = self.norm = 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for p, q in zip(numbers(x), numbers(y), strict=True):
            self._add(p, q)

    def _add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.is_complex() != y.is_complex():
            x, y = x.to(torch.complex128), y.to(torch.complex128)
        finite = torch.isfinite(x) & torch.isfinite(y)
        if not bool(finite.all()):
            p, q = x[~finite], y[~finite]
            self.nonfinite += int((~((p == q) | (p.isnan() & q.isnan()))).sum())
            x, y = x[finite], y[finite]
        if not x.numel():
            return
        off = (x - y).abs()
        self.count += x.numel()
        self.largest = max(self.largest, float(off.max()))
        self.total += float(off.sum())
        self.dot += float(torch.dot(x, y)) if not x.is_complex() else torch.vdot(x, y).real.item()
        self.norm_a = math.hypot(self.norm_a, norm_of(x))
        self.norm_b = math.hypot(self.norm_b, norm_of(y))
        self.norm = math.hypot(self.norm, norm_of(off))

    def difference(self, name: str, status: Status, nbytes: int) -> Difference:
        if not self.count:
            return Difference(name, status, nbytes, nonfinite=self.nonfinite)
        product = self.norm_a * self.norm_b
        cosine = min(1.0, max(-1.0, self.dot / product)) if 1e-290 < product < math.inf else None
        return Difference(
            name, status, nbytes, self.largest, self.total / self.count, cosine, self.norm_a, self.norm_b, self.norm,
            self.nonfinite,
        )  # fmt: skip


def _values(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, bool]:
    """Every value by its path, and whether it differs by rank."""
    by_rank_of = dict.fromkeys(checkpoint.manifest.values, False) | dict.fromkeys(checkpoint.differing, True)
    return {path: by_rank for path, by_rank in by_rank_of.items() if wanted(path)}


def _value_status(a: Checkpoint, b: Checkpoint, path: str, by_rank_a: bool, by_rank_b: bool) -> Status:
    if by_rank_a != by_rank_b:
        return "dtype"
    if not by_rank_a:
        same = _text(a.manifest.values[path]) == _text(b.manifest.values[path])
        return "same" if same else "changed"
    if a.world_size != b.world_size:
        return "shape"
    for rank in range(a.world_size):
        if not _same_tree(a.per_rank(path, rank), b.per_rank(path, rank)):
            return "changed"
    return "same"


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")  # Python holds 1, 1.0 and True for equal


def _same_tree(x: Any, y: Any) -> bool:
    held: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    texts = []
    for value, tensors in zip((x, y), held, strict=True):

        def put(tensor: torch.Tensor, tensors: list[torch.Tensor] = tensors) -> str:
            tensors.append(tensor)
            return f"{tensor.dtype} {list(tensor.shape)}"

        texts.append(_text(values.encode_tree(value, put)))
    return texts[0] == texts[1] and all(_equal(p, q) for p, q in zip(*held, strict=True))
