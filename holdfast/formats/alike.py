"""Whether values that several ranks saved are the same, by reading as few of their bytes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import xxhash

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.formats.machine.pickles import Record
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Stored

COMPARED = 64 << 20
"""Larger tensors are read for a comparison no more: they stay apart."""

BUDGET = 1 << 30
"""So many bytes at most are read to compare the tensors of one checkpoint."""

_RUN, _GAP = 8 << 20, 64 << 10


def same_tensors(groups: Sequence[Sequence[Stored]]) -> list[bool]:
    """For each group of tensors whether all are equal in type, shape and bytes.

    The CRC-32 that torch's archives keep of each storage spares the reading; what has none is read, small neighbours
    together. Beyond `COMPARED` and `BUDGET` nothing is known, which counts as not the same.
    """
    answers: list[bool | None] = [_by_sums(group) for group in groups]
    wanted: dict[Stretch, bytes] = {}
    left = BUDGET
    for i, group in enumerate(groups):
        nbytes = sum(tensor.nbytes for tensor in group)
        if answers[i] is None and (group[0].nbytes > COMPARED or nbytes > left):
            log.warning("tensors of %d bytes on %d ranks are too large to compare: one for each", nbytes, len(group))
            answers[i] = False
        elif answers[i] is None:
            left -= nbytes
            wanted.update((stretch, b"") for tensor in group for _, stretch in tensor.pieces)
    _digest(wanted)
    for i, group in enumerate(groups):
        if answers[i] is None:
            answers[i] = len({tuple((box, wanted[stretch]) for box, stretch in tensor.pieces) for tensor in group}) == 1
    return [bool(answer) for answer in answers]


def _by_sums(group: Sequence[Stored]) -> bool | None:
    """The answer that needs no reading; None if there is none."""
    if len(group) < 2 or all(tensor == group[0] for tensor in group):
        return True
    if len({(tensor.dtype, tensor.shape, *(box for box, _ in tensor.pieces)) for tensor in group}) > 1:
        return False
    sums = [tuple(_sum_of(stretch) for _, stretch in tensor.pieces) for tensor in group]
    if any(None in of_tensor for of_tensor in sums):
        return None
    if len(set(sums)) == 1:
        return True
    # Storages that differ may still be alike where these tensors lie, if those are parts of them.
    whole = all(s.member is not None and s.nbytes == s.member.nbytes for t in group for _, s in t.pieces)
    return False if whole else None


def _sum_of(stretch: Stretch) -> tuple[int, int, int, int] | None:
    member = stretch.member
    return None if member is None else (member.crc32, member.nbytes, stretch.begin - member.begin, stretch.nbytes)


def _digest(wanted: dict[Stretch, bytes]) -> None:
    """Fill in a digest of the bytes of each stretch; neighbours in a file are read at once."""
    in_order = sorted(wanted, key=lambda s: (str(s.source.path), id(s.source), s.begin))
    for _, of_source in groupby(in_order, key=lambda s: (str(s.source.path), type(s))):
        for run in _runs(of_source):
            begin, end = run[0].begin, max(s.begin + s.nbytes for s in run)
            if len(run) == 1 or type(run[0]) is not Stretch:
                for stretch in run:
                    wanted[stretch] = _digest_of(stretch)
                continue
            data = run[0].source.read(begin, end - begin)
            if len(data) < end - begin:
                raise Damaged(f"{run[0].source.path} ends at byte {begin + len(data)}")
            for stretch in run:
                wanted[stretch] = xxhash.xxh3_128_digest(data[stretch.begin - begin :][: stretch.nbytes])


def _runs(stretches: Iterable[Stretch]) -> Iterable[list[Stretch]]:
    run: list[Stretch] = []
    for stretch in stretches:
        near = run and stretch.source == run[0].source and stretch.begin <= run[-1].begin + run[-1].nbytes + _GAP
        if run and not (near and stretch.begin + stretch.nbytes - run[0].begin <= _RUN):
            yield run
            run = []
        run.append(stretch)
    if run:
        yield run


def _digest_of(stretch: Stretch) -> bytes:
    digest = xxhash.xxh3_128()
    for at in range(0, stretch.nbytes, _RUN):
        digest.update(stretch.read(at, min(_RUN, stretch.nbytes - at)))
    return digest.digest()


def alike(a: Any, b: Any) -> bool:
    """Whether two values read from files are equal: NaN is like NaN, records by what they hold, tensors by bytes."""
    # No recursion: what a pickle nests it may nest deep, and records (a device mesh) may hold themselves.
    todo, seen = [(a, b)], set()
    while todo:
        a, b = todo.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        if type(a) is not type(b):
            return False
        if isinstance(a, Record):
            todo += [(a.name, b.name), (a.args, b.args), (a.state, b.state), (a.items, b.items)]
            todo.append((a.elements, b.elements))
        elif isinstance(a, dict):
            if a.keys() != b.keys():
                return False
            todo += [(value, b[key]) for key, value in a.items()]
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            todo += zip(a, b, strict=True)
        elif isinstance(a, Stored):
            if not same_tensors([[a, b]])[0]:
                return False
            continue
        elif a != b and not (a != a and b != b):
            return False
        else:
            continue
        seen.add((id(a), id(b)))
    return True
