"""A conversion from a state in the memory of the ranks: what they gathered looks like a checkpoint to the rest.

`convert` makes a `LiveWork` of a state. Each rank writes the boxes that a save would have it write, as ranges of the
files themselves. Never gathers a tensor, and never goes on from what an earlier call has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.errors import Unsupported
from holdfast.export.copying import sync
from holdfast.export.draft import Fixed, Span
from holdfast.export.live_joint import joint_cells, memory_for, write_joint
from holdfast.export.live_reader import NAME, Live, LiveReader, RemappedState
from holdfast.export.live_windows import write_cells
from holdfast.export.partial import Journal, Partial
from holdfast.export.patches import (
    Cell,
    Footprint,
    Patch,
    edges_of,
    patch_of,
    patches_by_cell,
    places_by_cell,
    runs_of,
)  # fmt: skip
from holdfast.export.regions import Constant, Region, cells_in, narrowed, regions_of
from holdfast.export.work import ConvertWork, Note, Options
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Ranks
from holdfast.read.shared.relay import Lost, Relay, meet, seat_of
from holdfast.remap.nodes import Node
from holdfast.storage.place import Place
from holdfast.write.datafiles import memory_of

EDGES = 64 << 20
"""Bytes that the first rank writes for all ranks, where ranks on several machines share sectors."""


def check_live(options: Options) -> None:
    """Raises Unsupported for a format that takes checkpoints alone."""
    if options.to == "holdfast":
        raise Unsupported('a state becomes a checkpoint of holdfast by holdfast.save; to="huggingface" converts it')
    if options.to != "huggingface":
        raise Unsupported(
            f"to={options.to!r} is made of a checkpoint, not of a state in memory: save the state (holdfast.save) and "
            'convert the checkpoint, or convert to="huggingface"'
        )


class LiveWork(ConvertWork):
    """One conversion of a live state on one rank.

    ``_cells`` are the windows of the files with what this rank writes to them, ``_places`` what each rank of this
    machine does, this one among them.
    """

    def __init__(self, live: Live, target: Place, options: Options, ranks: Ranks, partial: Partial) -> None:
        super().__init__(NAME, target, options, ranks, partial)
        self._live = live
        self._nodes: dict[str, Node] = {}
        self._cells: dict[Cell, list[Patch]] = {}
        self._places: dict[int, dict[Cell, list[Footprint]]] = {}

    def _opened(self) -> Checkpoint:
        reader = LiveReader(self._live)
        if self.options.remap is None:
            return Checkpoint(NAME, reader=reader)
        remapped = RemappedState(reader, self.options.remap)
        self._nodes = remapped.nodes
        return Checkpoint(NAME, reader=remapped)

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
        mine = list(self._written_by(self.ranks.rank))
        self._cells = patches_by_cell(
            patch_of(place, memory, dtypes.torch_dtype(span.leaf.dtype)) for place, memory, span in mine
        )
        beside = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self.ranks.rank]]
        if self.ranks.size > 1:
            self._places = {rank: places_by_cell(place for place, _, _ in self._written_by(rank)) for rank in beside}

    def _written_by(self, rank: int) -> Iterator[tuple[Footprint, torch.Tensor, Span]]:
        """What a rank writes, with its memory, which is of no use if the rank is another one."""
        plan, state, own = self._selected, self._live.gathered.state, rank == self.ranks.rank
        for name, tensor, box in plan.written_by(rank):
            if not box.size:
                continue
            memory = memory_of(state, name, box) if own else torch.empty(box.lengths, device="meta")
            cells: dict[tuple[int, ...], list[tuple[Box, torch.Tensor]]] = {}
            for region, span in self._regions[name]:
                if region.shape not in cells:
                    cells[region.shape] = list(cells_in(region.shape, tensor.shape, box, memory))
                for cell, part in cells[region.shape]:
                    inner = region.within(cell)
                    if inner is not None:
                        yield inner.footprint(span), narrowed(part, cell, inner.box), span
        if rank == 0:
            for constant, span in self._constants:
                yield constant.footprint(span), constant.memory(span.leaf), span

    @cached_property
    def _sources(self) -> list[tuple[Region | Constant, Span]]:
        of_spans = ((regions_of(span.leaf, self._nodes.get(span.leaf.saved)), span) for span in self.draft.spans)
        return [(region, span) for regions, span in of_spans for region in regions]

    @cached_property
    def _regions(self) -> dict[str, list[tuple[Region, Span]]]:
        """By the name of the source's tensor."""
        regions: dict[str, list[tuple[Region, Span]]] = {}
        for region, span in self._sources:
            if isinstance(region, Region):
                regions.setdefault(region.name, []).append((region, span))
        return regions

    @property
    def _constants(self) -> list[tuple[Constant, Span]]:
        return [(constant, span) for constant, span in self._sources if isinstance(constant, Constant)]

    @cached_property
    def _selected(self) -> Plan:
        plan = self._live.plan
        return replace(plan, tensors={name: plan.tensors[name] for name in plan.tensors if name in self._regions})

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
