"""What came out of `benchmarks.cloud`: one row for each link, work and system, and the bars it must clear.

Filled by the bench, shown by `cloud_report`, written as JSON. Never rounds, never drops a repetition, and never passes
a bar whose figure is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.bar import Bar
from benchmarks.cloud_systems import FLOORS, FSSPEC, HOLDFAST, RAW_NAMES
from benchmarks.gauge import Spent
from benchmarks.jobs import LoadCost
from benchmarks.repeated import Repeated, times
from tests.servers.faults import Exchange

SAVE, LOAD = "save", "load"
SAVE_BY_MORE, LOAD_BY_LESS, MODEL = "save, 4 ranks", "load, 4 → 2 ranks", "model only, 4 → 2 ranks"


@dataclass
class Row(Repeated):
    """One system at one work over one link. ``nbytes``: of all that the ranks together save or want.

    One element a repetition, of all ranks together, where there was a proxy to count: ``requests``, ``sent`` and
    ``fetched`` bytes of bodies, ``proxy`` CPU seconds; ``methods`` counts the requests of the last repetition.
    ``told``: bytes read over needed on the worst rank, as the system says itself.
    """

    link: str
    work: str
    system: str
    nbytes: int
    told: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    proxy: list[float] = field(default_factory=list)
    methods: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def add(self, ranks: Sequence[Spent | LoadCost]) -> None:
        """One repetition, as its ranks measured it."""
        self.add_spent([rank.spent if isinstance(rank, LoadCost) else rank for rank in ranks])
        told = [rank.told for rank in ranks if isinstance(rank, LoadCost) and rank.told is not None]
        if told:
            self.told.append(max(t.read / t.needed for t in told))

    def add_seen(self, exchanges: Sequence[Exchange], proxy: float) -> None:
        """The same repetition, as the proxy saw it."""
        self.requests.append(len(exchanges))
        self.sent.append(sum(e.up for e in exchanges))
        self.fetched.append(sum(e.down for e in exchanges))
        self.proxy.append(proxy)
        self.methods = dict(Counter(e.method for e in exchanges))

    @property
    def cpu_per_gib(self) -> float | None:
        return median(self.cpu) / self.nbytes * 2**30 if self.cpu else None

    @property
    def ratio(self) -> float | None:
        """Bytes on the wire over bytes of tensors, by the worst repetition: fetched by loads, sent by saves."""
        moved = self.sent if self.work in (SAVE, SAVE_BY_MORE) else self.fetched
        return max(moved, default=0) / self.nbytes if moved else None


class Rows:
    """All rows of a run."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Row] = {}

    def of(self, link: str, work: str, system: str, nbytes: int) -> Row:
        """The row of these, made if it is new."""
        return self._rows.setdefault((link, work, system), Row(link, work, system, nbytes))

    def find(self, link: str, work: str, system: str) -> Row | None:
        return self._rows.get((link, work, system))

    def tables(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by link and work."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self._rows.values():
            found.setdefault((row.link, row.work), []).append(row)
        return found

    def times(self, link: str, work: str, over: str, under: str, *, best: bool = False) -> float | None:
        """Seconds of ``over`` by seconds of ``under``: medians, or the best repetition of each."""
        return times(self.find(link, work, over), self.find(link, work, under), best=best)

    def limit(self, link: str, work: str) -> str:
        """The setting of raw obstore that was the fastest at this work."""
        found = {name: row.median for name in RAW_NAMES if (row := self.find(link, work, name)) and row.median}
        return min(found, key=lambda name: found[name]) if found else RAW_NAMES[0]

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: what was measured and what follows from it."""
        return [
            {
                **vars(row), "median": row.median, "best": row.best, "cpu_s_per_gib": row.cpu_per_gib,
                "on_the_wire": row.ratio, "times_holdfast": self.times(row.link, row.work, row.system, HOLDFAST),
            }
            for row in self._rows.values()
        ]  # fmt: skip


def judge(rows: Rows, link: str) -> list[Bar]:
    """Every bar, over this link."""

    def faster(what: str, work: str, than: str, least: float) -> Bar:
        fair = (rows.times(link, work, than, HOLDFAST), rows.times(link, work, than, HOLDFAST, best=True))
        return Bar(what, *fair, least=least)

    def beside_raw(work: str) -> Bar:
        raw = rows.limit(link, work)
        floor = rows.times(link, work, raw, FLOORS[raw].name)
        return replace(faster(f"{work}, share of raw obstore's rate", work, raw, 0.85), floor=floor)

    model = rows.find(link, MODEL, HOLDFAST)
    fetched = max([model.ratio or 0.0, *model.told]) if model and model.ratio else None
    return [
        beside_raw(SAVE),
        beside_raw(LOAD),
        faster("save, as many times as fast as DCP with fsspec", SAVE, FSSPEC, 5.0),
        faster("load, as many times as fast as DCP with fsspec", LOAD, FSSPEC, 6.0),
        Bar("save, CPU seconds over those of raw obstore", _cpu_share(rows, link), most=1.3),
        Bar("model only, resharded: bytes fetched over needed, by the worst count", fetched, most=1.05),
    ]


def _cpu_share(rows: Rows, link: str) -> float | None:
    own, raw = rows.find(link, SAVE, HOLDFAST), rows.find(link, SAVE, rows.limit(link, SAVE))
    if own is None or raw is None or own.cpu_per_gib is None or not raw.cpu_per_gib:
        return None
    return own.cpu_per_gib / raw.cpu_per_gib
