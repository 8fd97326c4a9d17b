"""What one rank wants, in the words in which ranks compare it: boxes of tensors, and the spread of each.

`load` and torch's own call make a `demand_of` each rank, `share` goes by it. Never reads a byte, and meets nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch

from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.box import Box, intersect
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.share_plan import SHORTEST, Held, Holders, Item, Wants, as_told, may_be_shared, shared_items
from holdfast.plan.spread import Boxes, Placed, Spread, Whole, boxes_held
from holdfast.read.files import Files
from holdfast.read.ranges import Overlap, Verify, rounds_up
from holdfast.read.shared.pass_on import Line, line_of
from holdfast.read.wanted import Wanted

MakesLine = Callable[[Holders, list[Item], Sequence[TensorRecord], int, Sequence[int]], Line]


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """What a rank could share: a digest of its `Wants` (empty: nothing), and how many bytes these are.

    ``common``: bytes that others may want too, of ``needed``, as far as it can tell alone. ``host``: where it runs.
    ``cached``: whether it finds them in the page cache.
    """

    wants: str = ""
    wants_bytes: int = 0
    common: int = 0
    needed: int = 0
    host: str = ""
    cached: bool = False


class Choice(msgspec.Struct, array_like=True):
    """What the first rank makes of all offers: the distinct wants, who has which, who sends them, who is where."""

    name: str = ""
    wants: list[str] = []
    wants_of: list[int] = []
    senders: list[int] = []
    host_of: list[int] = []


@dataclass(frozen=True)
class Demand:
    """What one rank wants. ``items``: each box with the index of its spread in ``wants``; none if it shares nothing."""

    rank: int
    tensors: list[tuple[str, TensorRecord]]
    wanted: list[Wanted]
    items: dict[Item, int]
    wants: Wants | None

    @cached_property
    def nbytes(self) -> int:
        return sum(want.nbytes for want in self.wanted)

    def offer(self, size: int, host: str) -> Offer:
        """What this rank, one of ``size`` and on ``host``, could share."""
        if self.wants is None:
            return Offer()
        shared = [may_be_shared(spread, size) for spread in self.wants.spreads]
        common = self._bytes(item for item, index in self.items.items() if shared[index])
        text = msgspec.msgpack.encode(self.wants)
        return Offer(digest(text), len(text), common, self._bytes(self.items), host)

    def lines(self, wants: Sequence[Wants], choice: Choice, make: MakesLine = line_of) -> Iterator[Line]:
        """What this rank has in common with others, given what they want; ``make`` makes a line of each set of them."""
        own = {item: self.wants.spreads[index] for item, index in self.items.items()} if self.wants else {}
        records = [record for _, record in self.tensors]
        for holders, items in shared_items(wants, choice.wants_of, self.rank, own).items():
            if self._bytes(items) >= SHORTEST:
                yield make(holders, items, records, self.rank, choice.host_of)

    def gain(self, lines: Sequence[Line]) -> tuple[int, int]:
        """Bytes that this rank need not read if these are shared, and bytes that it wants in all."""
        return sum(line.nbytes - line.own for line in lines), self._bytes(self.items)

    def apart(self, lines: Sequence[Line]) -> tuple[dict[Item, list[torch.Tensor]], list[Wanted]]:
        """The views that lines fill, by item, and what this rank has to read alone."""
        views: dict[Item, list[torch.Tensor]] = {item: [] for line in lines for item in line.items}
        if not views:
            return views, self.wanted
        number = {name: i for i, (name, _) in enumerate(self.tensors)}
        alone = []
        for want in self.wanted:
            item = Item(number[want.name], want.box) if want.fill is None else None
            if item in views:
                views[item].append(want.view)
            else:
                alone.append(want)
        return views, alone

    def verifying(self, verify: Verify) -> Verify:
        """How shared reads are verified: as many whole blocks as if this rank read everything."""
        if verify is not True:
            return verify
        cuts = []
        for want in self.wanted:
            size = dtypes.itemsize(want.record.dtype)
            for cell, file in want.touching():
                part = intersect(cell, want.box)
                if part is not None and part != cell:
                    piece = Piece("", want.record.dtype, cell.lengths, cell.size * size)
                    cuts.append(Overlap(file, piece, (), part, cell, want.view, want.record.dtype))
        return "blocks" if cuts and rounds_up(cuts, verify, self.nbytes) else verify

    def _bytes(self, items: Iterable[Item]) -> int:
        return sum(item.box.size * dtypes.itemsize(self.tensors[item.tensor][1].dtype) for item in items)


ALONE = Boxes(())
"""The spread of what this rank reads by itself."""

MOST_BOXES = 64
"""Under a map a rank may want thousands of short runs of a tensor. It does not send a list of more boxes than this."""


def _spreads_of(wanted: Sequence[Wanted], rank: int) -> list[Spread]:
    """Spreads that only say which boxes these are: a target's layout says nothing of what its tensors are made of."""
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for want in wanted:
        if want.fill is None and want.box.size:
            boxes.setdefault(want.name, []).append(want.box)
    known: dict[tuple[object, ...], Spread] = {}
    spreads: dict[str, Spread] = {}
    for name, those in boxes.items():
        of = tuple(sorted(set(those)))
        spreads[name] = known.setdefault(of, Boxes(((rank, of),))) if len(of) <= MOST_BOXES else ALONE
    return [ALONE if want.fill is not None else spreads.get(want.name, ALONE) for want in wanted]


def demand_of(
    wanted: list[Wanted], spreads: Sequence[Spread], manifest: Manifest, rank: int, *, shares: bool = True,
    files: Files | None = None,
) -> Demand:  # fmt: skip
    """The demand of a rank that wants these boxes, each of a tensor with that spread.

    It shares nothing with ``shares=False``, or if it has other boxes than its spreads say: these are what the other
    ranks go by. ``files``: under a map, what knows the tensors that others are made of; their boxes go by themselves.
    """
    if files is not None:
        wanted, manifest = [*files.expanded(wanted)], files.stored(manifest)
        spreads = _spreads_of(wanted, rank)
    tensors = list(manifest.tensors.items())
    alone = Demand(rank, tensors, wanted, {}, None)
    if not shares:
        return alone
    number = {name: i for i, (name, _) in enumerate(tensors)}
    table: list[Whole | Placed | Held] = []
    places: dict[Whole | Placed | Held, int] = {}
    known: dict[int, int] = {}
    boxes: dict[tuple[int, tuple[int, ...]], list[Box]] = {}
    held: dict[tuple[int, int], list[Box]] = {}
    items: dict[Item, int] = {}
    for want, spread in zip(wanted, spreads, strict=True):
        if spread is ALONE:
            continue
        index = known.get(id(spread))
        if index is None:
            comparable = as_told(spread, rank)
            index = known[id(spread)] = places.setdefault(comparable, len(table))
            table += [comparable] if index == len(table) else []
        if want.box.size:
            tensor = number[want.name]
            items[Item(tensor, want.box)] = index
            held.setdefault((tensor, index), []).append(want.box)
            key = index, want.record.shape
            if isinstance(spread, Placed) and key not in boxes:
                boxes[key] = boxes_held(want.record.shape, spread, rank)
    for (tensor, index), own in held.items():
        if isinstance(table[index], Placed) and set(own) != set(boxes[index, tensors[tensor][1].shape]):
            return alone
    proof = digest(msgspec.msgpack.encode([manifest.save, manifest.files, manifest.tensors]))
    return Demand(rank, tensors, wanted, items, Wants(proof, sorted(held), table))
