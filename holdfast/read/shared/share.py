"""One read for many ranks: each rank offers what it wants, those that want the same connect, and all read in turns.

`load` takes an `offer` of each rank to its first round and lets the first rank say `who_shares`; all `agree`, and each
reads with its `Sharing`. `holdfast show --mesh` asks the same without other ranks. Ranks that share nothing only
exchange a digest.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import torch

from holdfast.events import log
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.box import Box, intersect
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.share_plan import SHORTEST, Held, Holders, Item, Wants, as_told, may_be_shared, shared_items
from holdfast.plan.spread import Boxes, Placed, Spread, Whole, boxes_held
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.files import Files
from holdfast.read.ranges import Overlap, Verify, rounds_up
from holdfast.read.read import read_boxes
from holdfast.read.shared.pass_on import Line, Outcome, line_of, read_line
from holdfast.read.shared.relay import Lost, Relay, meet
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted

How = Literal["auto", "off"]
"""Whether ranks that want the same bytes share the reading of them."""


class _Sent(msgspec.Struct, array_like=True):
    wants: Wants | None = None


def offer(demand: Demand, ranks: Ranks) -> Offer:
    """What this rank could share with others."""
    return Offer() if demand.wants is None else demand.offer(ranks.size, _host(ranks.host))


def agree(call: Call, demand: Demand, choice: Choice) -> Sharing:
    """Find the ranks that want the same, and connect to them, if all of them can. All ranks call it."""
    alone = Sharing(demand)
    if not choice.name or demand.wants is None:
        return alone
    wants = [demand.wants]
    if choice.senders:
        own = _Sent(demand.wants if call.ranks.rank in choice.senders else None)
        wants = call.exchange(
            "who wants what", lambda: own, lambda sent: [one.wants for one in sent if one.wants is not None],
            list[Wants],
        )  # fmt: skip
    lines: list[Line] = []

    def gain() -> tuple[int, int]:
        lines.extend(demand.lines(wants, choice))
        return demand.gain(lines)

    if not call.exchange("share", gain, is_worth_it, bool):
        return alone
    sharing = Sharing(demand)
    if not call.exchange("connect", lambda: _connect(call, choice.name, lines, sharing), all, bool):
        sharing.close()
        return alone
    return sharing


def _connect(call: Call, name: str, lines: Sequence[Line], sharing: Sharing) -> bool:
    ranks = call.ranks
    try:
        for line in lines:  # in the same order on all ranks, so that no two wait for each other
            at = f"{name}/{digest(repr(line.holders).encode())}"
            vigil = call.vigil(line.holders)
            relay = meet(ranks.store, at, line.seat, line.memory, call.deadline, lambda: ranks.limit, vigil)
            sharing.lines.append((line, relay))
    except Lost as error:
        log.info("every rank reads for itself: no connection to the others (%s)", error)
        return False
    except BaseException:
        sharing.close()
        raise
    return True


@dataclass(frozen=True)
class Sharing:
    """The connections of one rank in one load. Without any it reads everything by itself."""

    demand: Demand
    lines: list[tuple[Line, Relay]] = field(default_factory=list)

    def read(self, files: Files, verify: Verify, advance: Callable[[int], None]) -> Outcome:
        """Fill every view: what is shared in turns with the others, the rest alone.

        Raises what `read_boxes` raises. If another rank fails, this one stops where that one does, and says so.
        """
        demand, total = self.demand, Outcome()
        views, alone = demand.apart([line for line, _ in self.lines])
        verify = demand.verifying(verify) if self.lines else verify
        try:
            for line, relay in self.lines:
                part = read_line(line, relay, views, demand.tensors, files, verify=verify, advance=advance)
                relay.forget()
                _add(total.stats, part.stats)
                total.received += part.received
                if part.stopped or part.lost:
                    total.stopped, total.lost = part.stopped, part.lost
                    break
        except BaseException:
            self.close()  # ranks that still wait for this one learn of it by that
            raise
        if total.lost:
            self.close()
        if total.stopped or total.lost:
            return total
        _add(total.stats, read_boxes(files, alone, verify=verify, progress=advance))
        total.stats.needed = demand.nbytes
        return total

    def close(self) -> None:
        """Leave the other ranks."""
        for _, relay in self.lines:
            relay.close()


def _add(total: ReadStats, part: ReadStats) -> None:
    total.read += part.read
    total.requests += part.requests
    total.unverified += part.unverified


def _host(name: str) -> str:
    """Stands for a machine, or for a container, whose processes can see each other: names alone may be alike."""
    seen = ""
    with suppress(OSError):
        seen = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
    return digest(f"{name} {seen}".encode())[:16]


MakesLine = Callable[[Holders, list[Item], Sequence[TensorRecord], int, Sequence[int]], Line]

LEAST = 64 << 20
"""Ranks do not share if all together they would read fewer bytes less than this: connecting takes as long."""

PART = 0.05
"""Nor if that is a smaller part of what they read."""

MOST_COMPARED = 16 << 20
"""Nor if they had to send each other more bytes than this to compare what they want."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """What a rank could share: a digest of its `Wants` (empty: nothing), and how many bytes these are.

    ``common``: bytes that others may want too, of ``needed``, as far as it can tell alone. ``host``: where it runs.
    """

    wants: str = ""
    wants_bytes: int = 0
    common: int = 0
    needed: int = 0
    host: str = ""


class Choice(msgspec.Struct, array_like=True):
    """What the first rank makes of all offers: the distinct wants, who has which, who sends them, who is where."""

    name: str = ""
    wants: list[str] = []
    wants_of: list[int] = []
    senders: list[int] = []
    host_of: list[int] = []


def who_shares(offers: Sequence[Offer]) -> Choice:
    """On the first rank: whether it may be worth it to share. An empty choice says no."""
    common, needed = sum(offer.common for offer in offers), sum(offer.needed for offer in offers)
    if len(offers) < 2 or not all(offer.wants for offer in offers) or common < max(LEAST, PART * needed):
        return Choice()
    first: dict[str, int] = {}
    hosts: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        first.setdefault(offer.wants, rank)
        hosts.setdefault(offer.host, len(hosts))
    compared = sum(offers[rank].wants_bytes for rank in first.values())
    if len(first) == len(offers) > 16 or compared > MOST_COMPARED:
        return Choice()
    index = {wants: i for i, wants in enumerate(first)}
    return Choice(
        secrets.token_hex(8), list(first), [index[offer.wants] for offer in offers],
        list(first.values()) if len(first) > 1 else [], [hosts[offer.host] for offer in offers],
    )  # fmt: skip


def is_worth_it(gains: list[tuple[int, int]]) -> bool:
    """Whether what all ranks together need not read is worth connecting them; see `Demand.gain`."""
    gain, needed = (sum(column) for column in zip(*gains, strict=True))
    return bool(gain >= max(LEAST, PART * needed))


@dataclass(frozen=True)
class Demand:
    """What one rank wants. ``items``: each box with the index of its spread in ``wants``; none if it shares nothing."""

    rank: int
    tensors: list[tuple[str, TensorRecord]]
    wanted: list[Wanted]
    items: dict[Item, int]
    wants: Wants | None

    @property
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
            for cell, file in want.record.touching(want.box):
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
