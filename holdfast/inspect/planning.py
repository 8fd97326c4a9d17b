"""What a load on some mesh would read, rank by rank, planned by the reader's own code without ranks or a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.inspect.mesh import Mesh, Rule
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.patterns import TENSOR, Patterns, selector
from holdfast.plan.share_plan import Holders, Item, Wants
from holdfast.plan.spread import Spread, boxes_held
from holdfast.read.files import Files
from holdfast.read.ranges import GAP, Verify
from holdfast.read.read import jobs_for, overlaps_of
from holdfast.read.shared.demand import Choice, Demand, Offer, demand_of
from holdfast.read.shared.pass_on import LONGEST, Line, line_of, wanted_of
from holdfast.read.shared.relay import seat_of
from holdfast.read.shared.share import is_worth_it, who_shares
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted


@dataclass(frozen=True)
class RankReads:
    """What one rank does in a load: bytes ``needed`` for its shards, ``read`` from storage, ``received`` from others.

    ``requests`` are those of a file system or store that has nothing in a cache, ``files`` how many files it opens.
    """

    rank: int
    node: int
    needed: int
    read: int
    received: int
    requests: int
    files: int


@dataclass(frozen=True)
class NodeReads:
    """The sums over the ranks of one node."""

    node: int
    needed: int
    read: int
    requests: int
    files: int


@dataclass(frozen=True)
class Plan:
    """A load that was not made. ``state``: bytes of all tensors that it is about, each once.

    ``shares``: whether ranks would read together what several want (``share="auto"``).
    """

    path: str
    mesh: str
    node_size: int
    state: int
    shares: bool
    ranks: tuple[RankReads, ...]
    nodes: tuple[NodeReads, ...]

    @property
    def needed(self) -> int:
        """Bytes that all ranks together need."""
        return sum(rank.needed for rank in self.ranks)

    @property
    def read(self) -> int:
        """Bytes that all ranks together read."""
        return sum(rank.read for rank in self.ranks)

    @property
    def requests(self) -> int:
        return sum(rank.requests for rank in self.ranks)

    @property
    def balance(self) -> float:
        """The most that a rank reads as a multiple of the mean: 1 is even."""
        return max(rank.read for rank in self.ranks) * len(self.ranks) / self.read if self.read else 1.0


def plan(
    checkpoint: Checkpoint, mesh: Mesh, *, rules: Sequence[Rule] = (), only: Patterns = "*", node_size: int = 8,
    share: bool = True, verify: Verify = True,
) -> Plan:  # fmt: skip
    """What `holdfast.load` would read on ``mesh``, with ``node_size`` ranks on each node.

    For targets in host memory, of the saved dtypes. Tied tensors are read once; values, and the manifest, which every
    rank reads, are left out. Raises Mismatch if a pattern of ``only`` fits no tensor, ValueError for rules that do not
    fit, Damaged.
    """
    tensors = checkpoint.manifest.tensors
    wanted = selector(only, tensors, checkpoint.path, said="", what=TENSOR)
    records = {name: record for name, record in tensors.items() if wanted(name)}
    if not records:
        raise Mismatch(f"{checkpoint.path} has no tensor, and so nothing to plan")
    return _Planning(checkpoint, mesh, records, rules, node_size, verify).plan(share=share)


_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # a tensor may be larger than memory; Python names it from 3.11 on


class _Planning:
    def __init__(
        self, checkpoint: Checkpoint, mesh: Mesh, records: dict[str, TensorRecord], rules: Sequence[Rule],
        node_size: int, verify: Verify,
    ) -> None:  # fmt: skip
        self.checkpoint, self.mesh, self.records, self.node_size = checkpoint, mesh, records, node_size
        self.verify = checkpoint.reader.verifying(verify)
        # Equal spreads are one object: the reader works out once what it knows by identity.
        known: dict[Spread, Spread] = {}
        spreads = {name: mesh.spread(name, record.shape, rules) for name, record in records.items()}
        self.spreads = {name: known.setdefault(spread, spread) for name, spread in spreads.items()}
        self.headers = [file.header_bytes for file in checkpoint.manifest.data_files]
        # Views of memory that nobody touches: plans only look where they would lie.
        largest = max(record.nbytes for record in records.values())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.memory = torch.frombuffer(mmap.mmap(-1, max(largest, 2 * LONGEST), flags=flags), dtype=torch.uint8)
        self._lines: dict[tuple[Holders, tuple[Item, ...]], Line] = {}

    def plan(self, *, share: bool) -> Plan:
        size = self.mesh.ranks
        choice, wants_of_senders = self._agreed() if share and size > 1 else (Choice(), [])
        ranks = []
        for rank in range(size):
            demand = self._demand(rank)
            lines = list(demand.lines(wants_of_senders or _wants(demand), choice, self._line)) if choice.name else []
            ranks.append(self._rank(rank, demand, lines))
        nodes = [
            NodeReads(
                start // self.node_size,
                *(sum(getattr(rank, what) for rank in some) for what in ("needed", "read", "requests", "files")),
            )
            for start in range(0, size, self.node_size)
            for some in [ranks[start : start + self.node_size]]
        ]
        state = sum(record.nbytes for record in self.records.values())
        where = str(self.checkpoint.path)
        return Plan(where, str(self.mesh), self.node_size, state, bool(choice.name), tuple(ranks), tuple(nodes))

    def _demand(self, rank: int) -> Demand:
        """What a rank wants."""
        wanted, spreads = [], []
        held: dict[tuple[tuple[int, ...], int], list[Box]] = {}  # most tensors are cut like many others
        for name, record in self.records.items():
            spread = self.spreads[name]
            key = record.shape, id(spread)
            if key not in held:
                held[key] = boxes_held(record.shape, spread, rank)
            for box in held[key]:
                wanted.append(Wanted(self.checkpoint.saved_name(name), record, box, self._view(record, box)))
                spreads.append(spread)
        files = None if self.checkpoint.remap is None else self.checkpoint.files
        return demand_of(wanted, spreads, self.checkpoint.manifest, rank, shares=self.mesh.ranks > 1, files=files)

    def _view(self, record: TensorRecord, box: Box) -> torch.Tensor:
        nbytes = box.size * dtypes.itemsize(record.dtype)
        return self.memory[:nbytes].view(dtypes.torch_dtype(record.dtype)).view(box.lengths)

    def _agreed(self) -> tuple[Choice, list[Wants]]:
        """What all ranks would agree on: who shares, and what the senders want; an empty choice if none does."""
        offers: list[Offer] = []
        wants: dict[str, Wants] = {}
        for rank in range(self.mesh.ranks):
            demand = self._demand(rank)
            offer = demand.offer(self.mesh.ranks, f"node {rank // self.node_size}")
            offers.append(offer)
            wants.setdefault(offer.wants, *_wants(demand))
        choice = who_shares(offers)
        wants_of_senders = [wants[offers[rank].wants] for rank in choice.senders]
        if not choice.name:
            return choice, []
        gains = []
        for rank in range(self.mesh.ranks):
            demand = self._demand(rank)
            gains.append(demand.gain(list(demand.lines(wants_of_senders or _wants(demand), choice, self._line))))
        return (choice, wants_of_senders) if is_worth_it(gains) else (Choice(), [])

    def _line(
        self, holders: Holders, items: list[Item], records: Sequence[TensorRecord], rank: int, host_of: Sequence[int]
    ) -> Line:
        """`line_of`, made once for all of its holders."""
        key = holders, tuple(items)
        if key not in self._lines:
            self._lines[key] = line_of(holders, items, records, rank, host_of)
        return replace(self._lines[key], seat=seat_of(holders, rank, host_of))

    def _rank(self, rank: int, demand: Demand, lines: Sequence[Line]) -> RankReads:
        alone = demand.apart(lines)[1]
        verify = demand.verifying(self.verify) if lines else self.verify
        tally = _Tally(self.headers)
        for line in lines:
            reader = line.seat.reader
            for window in line.windows[reader] if reader is not None else []:
                tally.add(self.checkpoint.files, wanted_of(line, window, demand.tensors, self.memory), verify)
        tally.add(self.checkpoint.files, alone, verify)
        received = sum(line.nbytes - line.own for line in lines)
        return RankReads(
            rank, rank // self.node_size, demand.nbytes, tally.read, received, tally.requests, len(tally.files)
        )  # fmt: skip


def _wants(demand: Demand) -> list[Wants]:
    return [demand.wants or Wants("", [], [])]


class _Tally:
    """What one rank asks of storage."""

    def __init__(self, headers: Sequence[int]) -> None:
        self.headers, self.files = headers, set[int]()
        self.read = self.requests = 0

    def add(self, files: Files, wanted: Sequence[Wanted], verify: Verify) -> None:
        overlaps, round_up = overlaps_of(files, [want for want in wanted if want.fill is None], verify, ReadStats())
        for index, some in overlaps.items():
            if index not in self.files:
                self.files.add(index)
                header = self.headers[index] if index < len(self.headers) else 0  # of what needs unpacking, none
                self.read += header
                self.requests += header > 0
            stored = files.path(index).is_remote
            gap = 16 * GAP if stored else GAP
            for job in jobs_for(some, verify, round_up=round_up, gap=gap, straight=not stored):
                self.read += job[-1].begin + job[-1].nbytes - job[0].begin
                self.requests += 1
