"""One read for many: the ranks find out in a load who wants the same bytes, and whether sharing them is worth it.

`load` takes an `offer` of each rank to its first round, lets the first rank say `who_shares`, and has a `Sharing`
read. Where nobody shares nothing is told but a digest, and no process group is made.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.events import log
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.box import Box, intersect
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.share_plan import SHORTEST, Held, Holders, Item, Wants, as_told, may_be_shared, shared_items
from holdfast.plan.spread import Placed, Spread, Whole, boxes_held
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.ranges import Share, Verify, rounds_up
from holdfast.read.read import Files, Wanted, read_boxes
from holdfast.read.shared.pass_on import Line, Took, line_of, read_line
from holdfast.read.shared.relay import Lost, Relay, meet
from holdfast.read.source import ReadStats

How = Literal["auto", "off"]
"""Whether ranks that want the same bytes share the reading of them."""

MakesLine = Callable[[Holders, list[Item], Sequence[TensorRecord], int, Sequence[int]], Line]

LEAST = 64 << 20
"""Ranks that would not all together read so many bytes less do not share: connecting takes as long."""

PART = 0.05
"""Nor if it is a smaller part of what they read."""

MOST_TOLD = 16 << 20
"""Nor if they had to tell each other more bytes than this of what they want."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """What a rank could share: a digest of what it wants (none: nothing), and how many bytes it takes to tell that.

    ``common``: bytes that others may want too, of ``needed``, as far as it can tell alone. ``host``: where it runs.
    """

    wants: str = ""
    told: int = 0
    common: int = 0
    needed: int = 0
    host: str = ""


class Choice(msgspec.Struct, array_like=True):
    """What the first rank makes of all offers: the distinct wants, who has which, who tells them, who is where."""

    name: str = ""
    wants: list[str] = []
    wants_of: list[int] = []
    tell: list[int] = []
    host_of: list[int] = []


class _Told(msgspec.Struct, array_like=True):
    wants: Wants | None = None


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
    if len(first) == len(offers) > 16 or sum(offers[rank].told for rank in first.values()) > MOST_TOLD:
        return Choice()
    index = {wants: i for i, wants in enumerate(first)}
    return Choice(
        secrets.token_hex(8), list(first), [index[offer.wants] for offer in offers],
        list(first.values()) if len(first) > 1 else [], [hosts[offer.host] for offer in offers],
    )  # fmt: skip


@dataclass
class Sharing:
    """What one rank shares in one load. Without lines it reads everything by itself."""

    ranks: Ranks
    manifest: Manifest
    wanted: list[Wanted]
    wants: Wants | None = None
    items: dict[Item, int] = field(default_factory=dict)  # each with its spread
    lines: list[tuple[Line, Relay]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = list(self.manifest.tensors)
        self.records = list(self.manifest.tensors.values())

    def offer(self, spreads: Sequence[Spread]) -> Offer:
        """What this rank could share; ``spreads`` has one for each box that is wanted."""
        if self.ranks.size == 1:
            return Offer()
        number = {name: i for i, name in enumerate(self.names)}
        table: list[Whole | Placed | Held] = []
        known: dict[int, int] = {}
        boxes: dict[tuple[int, tuple[int, ...]], list[Box]] = {}
        held: dict[tuple[int, int], list[Box]] = {}
        for want, spread in zip(self.wanted, spreads, strict=True):
            index = known.get(id(spread))
            if index is None:
                told = as_told(spread, self.ranks.rank)
                if told not in table:
                    table.append(told)
                index = known[id(spread)] = table.index(told)
            if want.box.size:
                tensor = number[want.name]
                self.items[Item(tensor, want.box)] = index
                held.setdefault((tensor, index), []).append(want.box)
                key = index, want.record.shape
                if key not in boxes:
                    boxes[key] = boxes_held(want.record.shape, spread, self.ranks.rank)
        for (tensor, index), found in held.items():
            # What the spread says is what the other ranks go by: a rank that has something else shares nothing.
            if isinstance(table[index], Placed) and set(found) != set(boxes[index, self.records[tensor].shape]):
                return Offer()
        size = self.ranks.size
        shared = [may_be_shared(told, size) for told in table]
        common = sum(self._bytes(item) for item, index in self.items.items() if shared[index])
        needed = sum(self._bytes(item) for item in self.items)
        manifest = self.manifest
        proof = digest(msgspec.msgpack.encode([manifest.save, manifest.files, manifest.tensors]))
        self.wants = Wants(proof, sorted(held), table)
        text = msgspec.msgpack.encode(self.wants)
        return Offer(digest(text), len(text), common, needed, _host(self.ranks.host))

    def agree(self, call: Call, choice: Choice) -> None:
        """Find the ranks that want the same, and connect to them, if all of them can. All ranks call it."""
        wants = self.wants
        if not choice.name or wants is None:
            return
        all_wants = [wants]
        if choice.tell:
            tells = self.ranks.rank in choice.tell
            all_wants = call.exchange(
                "who wants what", lambda: _Told(wants if tells else None),
                lambda notes: [told.wants for told in notes if told.wants is not None], list[Wants],
            )  # fmt: skip
        lines: list[Line] = []

        def gain() -> tuple[int, int]:
            lines.extend(self.lines_among(all_wants, choice))
            return self.gain_of(lines)

        if not call.exchange("share", gain, is_worth_it, bool):
            return
        if not call.exchange("connect", lambda: self._connect(call, choice.name, lines), all, bool):
            self.close()
            self.lines = []

    def lines_among(self, all_wants: Sequence[Wants], choice: Choice, make: MakesLine = line_of) -> Iterator[Line]:
        """What this rank has in common with others, given what they want; ``make`` makes a line of each set of them."""
        own = {item: self.wants.spreads[index] for item, index in self.items.items()} if self.wants else {}
        for holders, items in shared_items(all_wants, choice.wants_of, self.ranks.rank, own).items():
            if sum(map(self._bytes, items)) >= SHORTEST:
                yield make(holders, items, self.records, self.ranks.rank, choice.host_of)

    def gain_of(self, lines: Sequence[Line]) -> tuple[int, int]:
        """Bytes that this rank need not read if these are shared, and bytes that it wants in all."""
        return sum(line.nbytes - line.own for line in lines), sum(map(self._bytes, self.items))

    def _connect(self, call: Call, name: str, lines: list[Line]) -> bool:
        try:
            for line in lines:  # in the same order on all ranks, so that no two wait for each other
                at = f"{name}/{digest(repr(line.holders).encode())}"
                vigil = call.vigil(line.holders)
                relay = meet(
                    self.ranks.store, at, line.seat, line.memory, call.deadline, lambda: self.ranks.limit, vigil
                )  # fmt: skip
                self.lines.append((line, relay))
        except Lost as error:
            log.info("every rank reads for itself: no connection to the others (%s)", error)
            return False
        except BaseException:
            self.close()
            raise
        return True

    def read(self, files: Files, verify: Verify, advance: Callable[[int], None]) -> Took:
        """Fill every view: what is shared in turns with the others, the rest alone.

        Raises what `read_boxes` raises. If another rank fails, this one stops where that one does, and says so.
        """
        took = Took()
        shared = {item for line, _ in self.lines for item in line.items}
        rest, views = list(self.wanted), {item: [] for item in shared}  # type: ignore[var-annotated]
        if shared:
            number = {name: i for i, name in enumerate(self.names)}
            rest = []
            for want in self.wanted:
                item = Item(number[want.name], want.box)
                if item in shared:
                    views[item].append(want.view)
                else:
                    rest.append(want)
            verify = "blocks" if self.rounds_up(verify) else verify
        try:
            for line, relay in self.lines:
                came = read_line(line, relay, views, self.names, self.records, files, verify=verify, advance=advance)
                relay.forget()
                _add(took.stats, came.stats)
                took.received += came.received
                if came.stopped or came.lost:
                    took.stopped, took.lost = came.stopped, came.lost
                    break
        except BaseException:
            self.close()  # who still waits for this rank is told so
            raise
        if took.lost:
            self.close()
        if took.stopped or took.lost:
            return took
        _add(took.stats, read_boxes(files, rest, verify=verify, progress=advance))
        took.stats.needed = sum(want.view.numel() * dtypes.itemsize(want.record.dtype) for want in self.wanted)
        return took

    def close(self) -> None:
        """Leave the other ranks."""
        for _, relay in self.lines:
            relay.close()

    def _bytes(self, item: Item) -> int:
        return item.box.size * dtypes.itemsize(self.records[item.tensor].dtype)

    def rounds_up(self, verify: Verify) -> bool:
        """Whether all blocks that are wanted in part are read whole: as it would be if this rank read everything."""
        if verify is not True:
            return False
        cuts, needed = [], 0
        for want in self.wanted:
            size = dtypes.itemsize(want.record.dtype)
            needed += want.box.size * size
            for cell, file in want.record.touching(want.box):
                part = intersect(cell, want.box)
                if part is not None and part != cell:
                    piece = Piece("", want.record.dtype, cell.lengths, cell.size * size)
                    cuts.append(Share(file, piece, (), part, cell, want.view, want.record.dtype))
        return bool(cuts) and rounds_up(cuts, verify, needed)


def is_worth_it(notes: list[tuple[int, int]]) -> bool:
    """Whether what all ranks together need not read is worth connecting them."""
    gain, needed = (sum(column) for column in zip(*notes, strict=True))
    return bool(gain >= max(LEAST, PART * needed))


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
