"""Whether tensors still hold what a file of the base holds: the sums of their blocks against those in its header.

`reuse` asks for one file at a time. Reads every byte that counts as equal, from where it lies; of a tensor that has
changed, in most cases, one block alone.

We rejected torch's version counters, although they are free: they miss changes that torch does not count, and a load
would restore a wrong value much later. Reading memory is cheap beside writing a disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from holdfast.buffers import device
from holdfast.buffers.device import Copier
from holdfast.buffers.memory import Buffer, buffer
from holdfast.buffers.stage import contiguous_parts, host_view, is_plain_memory
from holdfast.ondisk import blocks
from holdfast.ondisk.blocks import BLOCK

SUMMERS = 2
"""Threads that sum: xxhash lets other threads run meanwhile, and two of them read memory about as fast as it goes."""

JOB = 8 << 20
"""Bytes that a thread sums before it takes the next; small tensors are done together."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A tensor that this rank would write as these pieces (``numbers``, ``keys``) of an image; the base has it too.

    ``same`` is known from fingerprints; None if the bytes have to tell.
    """

    name: str
    numbers: list[int]
    keys: list[str]
    sources: list[torch.Tensor]
    same: bool | None = None

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


class _Tally:
    """The claims that may still be equal, and whether enough of the file is left with them."""

    def __init__(self, claims: Sequence[Claim], enough: float) -> None:
        self._left, self._enough = sum(claim.nbytes for claim in claims), enough
        self._changed: set[int] = set()
        self._lock = threading.Lock()

    @property
    def hopeless(self) -> bool:
        return self._left < self._enough

    def is_out(self, claim: Claim) -> bool:
        """Whether there is no use in looking at this tensor any further."""
        return self.hopeless or id(claim) in self._changed

    def changed(self, claim: Claim) -> None:
        with self._lock:
            if id(claim) not in self._changed:
                self._changed.add(id(claim))
                self._left -= claim.nbytes


def unchanged(claims: Sequence[Claim], sums: Mapping[str, Sequence[str]], enough: float, copier: Copier) -> list[Claim]:
    """The claims that hold; none if they have fewer than ``enough`` bytes together. ``sums`` are those of each key."""
    tally = _Tally(claims, enough)
    lying: list[Claim] = []
    away: list[Claim] = []
    for claim in claims:
        if claim.same is None:
            (lying if all(s.device.type == "cpu" and is_plain_memory(s) for s in claim.sources) else away).append(claim)
    for claim in claims:
        counts = [blocks.count(source.nbytes) for source in claim.sources]
        if claim.same is False or (claim.same is None and [len(sums.get(key, ())) for key in claim.keys] != counts):
            tally.changed(claim)
    jobs = _jobs(lying, sums)
    if sum(claim.nbytes for claim in lying) > JOB:
        with ThreadPoolExecutor(SUMMERS, thread_name_prefix="holdfast-sum") as pool:
            for done in pool.map(lambda job: _look(job, tally), jobs):
                del done  # raises what a thread met
    else:
        for job in jobs:
            _look(job, tally)
    with _Bounce() as bounce:
        for claim in away:
            if not tally.is_out(claim):
                _look_at_copies(claim, sums, tally, copier, bounce)
    return [] if tally.hopeless else [claim for claim in claims if not tally.is_out(claim)]


_Block = tuple[Claim, int, int, str]  # address, bytes, sum


def _jobs(claims: Sequence[Claim], sums: Mapping[str, Sequence[str]]) -> Iterator[list[_Block]]:
    """All blocks, some megabytes at a time."""
    job: list[_Block] = []
    nbytes = 0
    for claim in claims:
        for key, source in zip(claim.keys, claim.sources, strict=True):
            address = source.data_ptr()
            for number, known in enumerate(sums.get(key, ())):
                size = min(BLOCK, source.nbytes - number * BLOCK)
                if nbytes + size > JOB and job:
                    yield job
                    job, nbytes = [], 0
                job.append((claim, address + number * BLOCK, size, known))
                nbytes += size
    yield job


def _look(job: list[_Block], tally: _Tally) -> None:
    for claim, address, nbytes, known in job:
        if not tally.is_out(claim) and blocks.block_sum(host_view(address, nbytes)) != known:
            tally.changed(claim)


class _Bounce:
    """A block of host memory that a device copies into, made when it is needed."""

    def __init__(self) -> None:
        self._made: Buffer | None = None
        self._pinned = False

    def __enter__(self) -> _Bounce:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None and self._pinned:
            device.unpin(self._made.address)

    def memory(self) -> Buffer:
        if self._made is None:
            self._made = buffer(BLOCK)
            self._pinned = device.pin(self._made.address, BLOCK)
        return self._made


def _look_at_copies(
    claim: Claim, sums: Mapping[str, Sequence[str]], tally: _Tally, copier: Copier, bounce: _Bounce
) -> None:
    """Tensors that lie scattered or on a device: by way of host memory, a block at a time."""
    for key, source in zip(claim.keys, claim.sources, strict=True):
        for known, own in zip(sums.get(key, ()), _sums_of(source, copier, bounce), strict=True):
            if known != own:
                tally.changed(claim)
                return


def _sums_of(source: torch.Tensor, copier: Copier, bounce: _Bounce) -> Iterator[str]:
    total, room = blocks.running_sum(), BLOCK
    for view in _stretches(source, copier, bounce):
        at = 0
        while at < len(view):
            n = min(room, len(view) - at)
            total.update(view[at : at + n])
            at, room = at + n, room - n
            if not room:
                yield total.hexdigest()
                total, room = blocks.running_sum(), BLOCK
    if room < BLOCK:
        yield total.hexdigest()


def _stretches(source: torch.Tensor, copier: Copier, bounce: _Bounce) -> Iterator[memoryview]:
    """The bytes of a tensor in order, in memory that is good until the next is asked for."""
    with copier.on(source.device):
        parts = contiguous_parts(source)
    while True:
        with copier.on(source.device):  # a part that is made contiguous on the way is made on the side stream
            part = next(parts, None)
        if part is None:
            return
        if part.device.type == "cpu":
            yield host_view(part.data_ptr(), part.nbytes)
            continue
        memory = bounce.memory()
        for at in range(0, part.nbytes, BLOCK):
            n = min(BLOCK, part.nbytes - at)
            copier.copy(part, at, n, memory.address)
            copier.moment().wait()
            yield memory.view[:n]
