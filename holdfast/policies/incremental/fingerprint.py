"""Fingerprints of tensors on an accelerator, worked out there: what has not changed is known without copying it.

`reuse` takes them in each incremental save and compares with those of the save that is its base. They never leave this
process, and none is kept of a save before it is committed.

A fingerprint is two independent multilinear hashes modulo 2^64 for each stretch of the bytes, seen as 32-bit words x:
the sum of a_i * x_i with coefficients drawn at random once for each process. If the coefficients are random, two
different stretches have equal sums with a probability of at most 2^-33 for each hash, 2^-66 for both; the sums of all
stretches, with the length and the type, are joined by BLAKE2b, keyed, to 128 bits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from holdfast.buffers.device import Copier
from holdfast.buffers.stage import contiguous_parts, host_view
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.ranks.ranks import Ranks

ROW = 1 << 18
"""Words of a stretch that has its own sums: the table of coefficients is as long, 4 MiB for both hashes."""

ROWS = 8
"""Stretches at a time: with words of 64 bits, twice, 32 MiB of the device's memory."""

_REMEMBERED = 4  # committed saves: those that a later one may have as its base

Prints = dict[tuple[str, Box], bytes]
"""Fingerprints by name and box."""


def applies(tensor: torch.Tensor) -> bool:
    """Whether a fingerprint spares anything: in host memory the sums of the bytes themselves are as quick."""
    return tensor.device.type != "cpu"


@dataclass
class Fingerprints:
    """Those of the last saves of one group of ranks, or of one Saver, and the random numbers they are made with."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _of: dict[str, Prints] = field(default_factory=dict)
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def of(self, save: str) -> Prints:
        """What is remembered of a committed save; nothing if it is too long ago, or another process made it."""
        return self._of.get(save, {})

    def remember(self, save: str, prints: Prints) -> None:
        """Keep those of a save that is committed."""
        if prints:
            self._of[save] = prints
            for old in list(self._of)[:-_REMEMBERED]:
                del self._of[old]

    def take(self, tensors: Iterable[tuple[str, Box, torch.Tensor]], copier: Copier) -> Prints:
        """The fingerprints of those tensors that are worth one, on the streams of ``copier``; waits for them."""
        taken: list[tuple[tuple[str, Box], str, torch.device, int]] = []  # with the number of its stretches
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for name, box, tensor in tensors:
            if tensor.nbytes and applies(tensor):
                with copier.on(tensor.device):
                    parts = [part for piece in contiguous_parts(tensor) for part in self._sums_of(piece)]
                sums.setdefault(tensor.device, []).extend(parts)
                head = f"{dtypes.name_of(tensor.dtype)} {tensor.nbytes}"
                taken.append(((name, box), head, tensor.device, sum(len(part) for part in parts)))
        sums_of: dict[torch.device, Iterator[bytes]] = {}
        for on, parts in sums.items():
            with copier.on(on):  # one copy to the host for all of them
                sums_of[on] = _items(torch.cat(parts).cpu())
        prints: Prints = {}
        for which, head, on, count in taken:
            joined = hashlib.blake2b(head.encode(), digest_size=16, key=self.key)
            for _ in range(count):
                joined.update(next(sums_of[on]))
            prints[which] = joined.digest()
        return prints

    def _sums_of(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Both sums of each stretch of a contiguous tensor: [stretches, 2], on its device."""
        flat, width = tensor.reshape(-1).view(torch.uint8), 4 * ROW
        whole = flat.numel() // width * width
        for start in range(0, whole, ROWS * width):
            yield self._sum(_words(flat[start : min(start + ROWS * width, whole)]).view(-1, ROW))
        if whole < flat.numel():
            yield self._sum(_words(flat[whole:]).view(1, -1))

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        long = words.to(torch.int64)
        return torch.stack([(long * row[: long.shape[1]]).sum(1) for row in self._table(long)], 1)

    def _table(self, like: torch.Tensor) -> torch.Tensor:
        """The coefficients of both hashes, on the device of ``like``."""
        on = like.device
        if on not in self._tables:
            drawn = bytearray(hashlib.shake_256(self.key).digest(2 * ROW * 8))
            self._tables[on] = like.new_empty(2, ROW).copy_(torch.frombuffer(drawn, dtype=torch.int64).view(2, ROW))
        return self._tables[on]


def fingerprints_of(ranks: Ranks) -> Fingerprints:
    """Those that are remembered between saves of these ranks."""
    known: Fingerprints = ranks.remembered.setdefault("fingerprints", Fingerprints())
    return known


def _items(sums: torch.Tensor) -> Iterator[bytes]:
    data = bytes(host_view(sums.data_ptr(), sums.nbytes))
    return (data[at : at + 16] for at in range(0, len(data), 16))


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words, filled up with zeros: the length is part of the fingerprint."""
    if data.numel() % 4 or data.data_ptr() % 4 or data.storage_offset() % 4:
        padded = data.new_zeros(-(-data.numel() // 4) * 4)
        padded[: data.numel()].copy_(data)
        data = padded
    return data.view(torch.int32)
