"""A conversion from a state in the memory of the ranks: what they gathered looks like a checkpoint to the rest.

`convert` makes a `LiveWork` of a state. Each rank writes the boxes that a save would have it write, as ranges of the
files themselves. Never gathers a tensor, and never goes on from what an earlier call has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.checkpoint import Checkpoint
from holdfast.commit import draft
from holdfast.commit.agree import Agreed, agree, plan_for
from holdfast.commit.draft import Identity
from holdfast.commit.gather import Gathered, gather
from holdfast.commit.job import Job, attempt, value_of
from holdfast.errors import HoldfastError, Unsupported
from holdfast.export.copying import sync
from holdfast.export.draft import Fixed, Span
from holdfast.export.live_joint import joint_cells, memory_for, write_joint
from holdfast.export.live_windows import write_cells
from holdfast.export.partial import Journal, Partial
from holdfast.export.patches import (
    Cell,
    Footprint,
    Patch,
    Region,
    edges_of,
    patch_of,
    patches_by_cell,
    places_by_cell,
    regions_of,
    runs_of,
)  # fmt: skip
from holdfast.export.work import ConvertWork, Note, Options
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.layout import join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.damage import Findings
from holdfast.read.files import AsStored, Files
from holdfast.read.ranges import Verify
from holdfast.read.shared.relay import Lost, Relay, meet, seat_of
from holdfast.state.leaves import owned_values
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.write.datafiles import memory_of

EDGES = 64 << 20
"""Bytes that the first rank writes for all ranks, where ranks on several machines share sectors."""

_NAME = LocalPlace("the state")
"""What errors call it."""


@dataclass(frozen=True)
class Live:
    """A state that all ranks have gathered and agree on, within a call."""

    call: Call
    job: Job
    gathered: Gathered
    agreed: Agreed

    @cached_property
    def plan(self) -> Plan:
        """Which rank has which boxes. Raises Mismatch where the ranks do not fit together."""
        return plan_for(self.job.ranks, self.agreed)


def gather_live(call: Call, state: Mapping[str, Any]) -> Live:
    """Gather the state, as a save does. All ranks call it; what one of them raises is raised by all."""
    job = Job(call.ranks, None, None, "")
    with no_collection():
        gathered = attempt(gather, job, state, {})
    agreed = agree(call, job, gathered)
    if agreed is None:
        raise HoldfastError("a state was not gathered, as a rank was busy; this is a fault of holdfast")
    return Live(call, job, value_of(gathered), agreed)


def check_live(options: Options) -> None:
    """Raises Unsupported for what takes checkpoints alone."""
    if options.remap is not None:
        raise Unsupported("remap= takes a checkpoint: save the state (holdfast.save) and convert that")
    if options.to == "holdfast":
        raise Unsupported('a state becomes a checkpoint of holdfast by holdfast.save; to="huggingface" converts it')
    if options.to != "huggingface":
        raise Unsupported(
            f"to={options.to!r} is made of a checkpoint, not of a state in memory: save the state (holdfast.save) and "
            'convert the checkpoint, or convert to="huggingface"'
        )


class LiveReader:
    """A `Reader` of what the ranks have gathered: its names, shapes, types and values. Its bytes are not read."""

    format, reading, signed_by = "state", "", None

    def __init__(self, live: Live) -> None:
        self.path: Place = _NAME
        self.left_out: Mapping[str, str] = {}
        self.attachments: Mapping[str, int] = {}
        self._live = live

    @cached_property
    def manifest(self) -> Manifest:
        job, agreed, state = self._live.job, self._live.agreed, self._live.gathered.state
        owned = agreed.owned or join_owned([self._live.gathered.layout], [(0, 0, owned_values(state))])
        identity = Identity(agreed.save, job.run, None, job.ranks.size)
        return draft.draft(identity, self._live.plan, agreed.values, {}, owned, [])

    @property
    def files(self) -> Files:
        return _InMemory()

    def stored_name(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)

    def attachment(self, name: str) -> bytes:
        raise KeyError(name)

    def per_rank(self, path: str, rank: int) -> Any:
        raise _no_file()

    def verifying(self, verify: Verify) -> Verify:
        return verify

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        raise _no_file()


class _InMemory(AsStored):
    """`Files` of a state: there are none."""

    def _none(self, *args: object) -> Any:
        raise _no_file()

    path = plain = prepare = prove = piece = opened = _none


def _no_file() -> HoldfastError:
    return HoldfastError("bytes of a state in memory were to be read from a file; this is a fault of holdfast")


class LiveWork(ConvertWork):
    """One conversion of a live state on one rank.

    ``_cells`` are the windows of the files with what this rank writes to them, ``_places`` what each rank of this
    machine does, this one among them.
    """

    def __init__(self, live: Live, target: Place, options: Options, ranks: Ranks, partial: Partial) -> None:
        super().__init__(_NAME, target, options, ranks, partial)
        self._live = live
        self._cells: dict[Cell, list[Patch]] = {}
        self._places: dict[int, dict[Cell, list[Footprint]]] = {}

    def _opened(self) -> Checkpoint:
        return Checkpoint(_NAME, reader=LiveReader(self._live))

    def _stamps(self) -> list[tuple[str, int, str | int]]:
        return [(self._live.agreed.save, 0, "")]  # of this call alone: what it leaves is of no use to another

    @property
    def _hosts(self) -> list[str]:
        return self.ranks.main.hosts or [""] * self.ranks.size

    @property
    def _apart(self) -> bool:
        """Whether the ranks are on several machines."""
        return len(set(self._hosts)) > 1

    @cached_property
    def _of_all(self) -> dict[Cell, list[Footprint]]:
        """What all ranks of this machine write."""
        cells: dict[Cell, list[Footprint]] = {}
        for places in self._places.values():
            for cell, own in places.items():
                cells.setdefault(cell, []).extend(own)
        return cells

    def _cut(self) -> None:
        """What ranks write: of the tensors that were selected, and no others, so that they write equally much."""
        spans: defaultdict[str, list[tuple[Region, Span]]] = defaultdict(list)
        for span in self.draft.spans:
            for region in regions_of(span.leaf):
                spans[region.name].append((region, span))
        tensors = {name: tensor for name, tensor in self._live.plan.tensors.items() if name in spans}
        plan, state, rank = replace(self._live.plan, tensors=tensors), self._live.gathered.state, self.ranks.rank

        def parts(writer: int) -> Iterator[tuple[Region, Span]]:
            for name, _, box in plan.written_by(writer):
                for region, span in spans[name]:
                    part = region.within(box)
                    if part is not None:
                        yield part, span

        self._cells = patches_by_cell(
            patch_of(part, memory_of(state, part.name, part.box), span) for part, span in parts(rank)
        )
        beside = [other for other, host in enumerate(self._hosts) if host == self._hosts[rank]]
        if self.ranks.size > 1:
            self._places = {
                other: places_by_cell(part.footprint(span) for part, span in parts(other)) for other in beside
            }

    def plan(self) -> str:
        """As of a checkpoint, and the bytes that the first rank would have to write for this machine."""
        plan, edges = super().plan(), 0
        if self._apart and self.ranks.rank == min(self._places):
            ends = (edge for places in self._of_all.values() for edge in edges_of(runs_of(places)))
            edges = sum(end - begin for begin, end in ends)
        return f"{plan} {edges}"

    def begin(self, plans: list[str]) -> str:
        edges = sum(int(plan.partition(" ")[2]) for plan in plans)
        if edges > EDGES:
            raise Unsupported(
                f"ranks on several machines share {edges >> 20} MiB of pages of {self.partial.target}, as its tensors "
                "are cut in short rows: save the state (holdfast.save) and convert the checkpoint"
            )
        return super().begin([plan.partition(" ")[0] for plan in plans])

    def copy(self, done: str) -> Note:
        """Write this rank's share."""
        nbytes = sum(patch.place.nbytes for patches in self._cells.values() for patch in patches)
        journal = Journal(self.partial, self.ranks.rank)  # its lock tells that this rank is still at it
        try:
            with events.task("convert", str(self.partial.target), self.ranks.rank, nbytes) as task:
                edges = self._write(task)
                for path in {path for path, _ in self._of_all or self._cells}:
                    sync(self.partial.content / path)
        finally:
            journal.close()
        self.converted.bytes_read = nbytes
        return Note([], [(edge.path, edge.offset, edge.data) for edge in edges])

    def _write(self, task: events.Task) -> list[Fixed]:
        content, moments, cells = self.partial.content, self._live.gathered.moments, self._cells
        joint = joint_cells(list(self._places.values()))
        edges: list[Fixed] = []
        if joint:
            relay: Relay | None = None
            try:
                relay = self._connected(joint)
                edges = write_joint(
                    joint, cells, self._of_all, relay, content, moments, task.advance, apart=self._apart
                )
                cells = {cell: patches for cell, patches in cells.items() if cell not in set(joint)}
            except Lost as error:
                events.log.info("each rank writes %s for itself: %s", self.partial.target, error)
            finally:
                if relay is not None:
                    relay.close()
        beside = self._of_all if self._apart else None
        return edges + write_cells(cells, beside, content, moments, task.advance)

    def _connected(self, joint: Sequence[Cell]) -> Relay:
        """A connection to the other ranks of this machine. Raises Lost."""
        ranks, call, beside = self.ranks, self._live.call, sorted(self._places)
        seat = seat_of(beside, ranks.rank, [0] * ranks.size)
        name = f"live/{self._live.agreed.save}/{beside[0]}"
        limit = lambda: ranks.limit  # noqa: E731
        return meet(ranks.store, name, seat, memory_for(len(beside)), call.deadline, limit, call.vigil(beside))

    def _joined(self, notes: list[Note]) -> tuple[list[Fixed], list[str]]:
        edges = [Fixed(*edge) for note in notes for edge in note.edges]
        return sorted(edges), [""] * len(self.draft.spans)
