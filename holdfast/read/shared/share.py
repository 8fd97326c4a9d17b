"""One read for many ranks: each rank offers what it wants, those that want the same connect, and all read in turns.

`load` takes an `offer` of each rank to its first round and lets the first rank say `who_shares`; all `agree`, and each
reads with its `Sharing`. `holdfast show --mesh` asks the same without other ranks. Ranks that share nothing only
exchange a digest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.errors import HoldfastError
from holdfast.events import log
from holdfast.ondisk.blocks import digest
from holdfast.plan.share_plan import Wants
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.files import Files
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.shared.demand import Choice, Demand, Offer
from holdfast.read.shared.pass_on import Line, Outcome, read_line
from holdfast.read.shared.relay import Lost, Relay, meet
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted
from holdfast.storage.local.large import is_cached

How = Literal["auto", "off"]
"""Whether ranks that want the same bytes share the reading of them."""


class _Sent(msgspec.Struct, array_like=True):
    wants: Wants | None = None


def offer(demand: Demand, ranks: Ranks, files: Files) -> Offer:
    """What this rank could share with others."""
    if demand.wants is None:
        return Offer()
    own = demand.offer(ranks.size, _host(ranks.host))
    return msgspec.structs.replace(own, cached=own.common >= LEAST // ranks.size and _are_cached(files, demand.wanted))


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


def _are_cached(files: Files, wanted: Sequence[Wanted]) -> bool:
    """Whether what a rank wants lies in the page cache of its machine, by three places of some of the files."""
    read = [want for want in wanted if want.nbytes]
    some = read[:: -(-len(read) // LOOKED_AT) or 1]
    numbers = {file for want in some for _, file in want.touching()}
    try:
        return bool(numbers) and all(_is_cached(files, number) for number in sorted(numbers)[:LOOKED_AT])
    except (HoldfastError, OSError):  # the read says what is wrong
        return False


def _is_cached(files: Files, number: int) -> bool:
    if files.plain(number) is None:  # of a store, or to be unpacked
        return False
    with files.opened(number) as opened:
        if not isinstance(opened, tuple):
            return False
        size = os.fstat(opened[0]).st_size
        return all(is_cached(opened[0], at, min(size - at, 1 << 20)) for at in (0, size // 2, max(size - (1 << 20), 0)))


LEAST = 64 << 20
"""Ranks do not share if all together they would read fewer bytes less than this: connecting takes as long."""

PART = 0.05
"""Nor if that is a smaller part of what they read."""

MOST_COMPARED = 16 << 20
"""Nor if they had to send each other more bytes than this to compare what they want."""

LOOKED_AT = 16
"""Files of which a rank looks whether they are in the page cache, at the most."""


def who_shares(offers: Sequence[Offer]) -> Choice:
    """On the first rank: whether it may be worth it to share. An empty choice says no."""
    common, needed = sum(offer.common for offer in offers), sum(offer.needed for offer in offers)
    if len(offers) < 2 or not all(offer.wants for offer in offers) or common < max(LEAST, PART * needed):
        return Choice()
    if all(offer.cached for offer in offers):  # to copy pages is faster than to take turns (measured)
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
