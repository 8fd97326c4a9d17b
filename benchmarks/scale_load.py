"""A restart on another number of ranks, all but its bytes: which requests one rank makes, and for how many bytes.

Called by the simulator with a simulated checkpoint. Matches, cuts and joins with the reader's own functions, and stops
where the reader would read.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from time import process_time

import torch

from benchmarks.scale_save import Saved, as_new, writer_of
from benchmarks.scale_states import Shape, World
from holdfast.buffers.memory import no_collection
from holdfast.ondisk import datafile
from holdfast.ondisk.datafile import Header
from holdfast.read.files import DataFiles
from holdfast.read.ranges import jobs_of, ranges_of
from holdfast.read.read import overlaps_of
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted
from holdfast.storage.local.local_place import LocalPlace

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 does not name


@dataclass
class LoadCost:
    """The rank, of those looked at, that plans longest, asks most and reads most; bytes over bytes needed."""

    ranks: int
    plan_s: float = 0.0
    files: int = 0
    requests: int = 0
    headers: float = 0.0
    read: float = 0.0

    def add(self, plan_s: float, stats: ReadStats, files: int, headers: int) -> None:
        """One rank more."""
        self.plan_s = max(self.plan_s, plan_s)
        self.files, self.requests = max(self.files, files), max(self.requests, stats.requests)
        self.headers = max(self.headers, headers / stats.needed)
        self.read = max(self.read, stats.read / stats.needed)


class SimulatedFiles(DataFiles):
    """The data files of a simulated checkpoint, whose headers are made when they are asked for.

    ``spent`` are CPU seconds that went into making them, which a load does not do.
    """

    def __init__(self, saved: Saved) -> None:
        super().__init__(LocalPlace("checkpoint"), saved.record.data_files)
        self.saved, self.spent = saved, 0.0

    def _read_header(self, index: int) -> Header:
        began = process_time()
        record = self.records[index]
        data, size = self.saved.files(writer_of(record.path))[record.path]
        self.spent += process_time() - began
        return datafile.parse_header(data, size)


class Memory:
    """Host memory for any number of views that nobody writes: all of them the same pages, none of them real."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._bytes = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)

    def view(self, lengths: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in it."""
        return self._bytes[: prod(lengths) * dtype.itemsize].view(dtype).view(lengths)


def load(saved: Saved, world: World, ranks: list[int]) -> LoadCost:
    """What each of ``ranks`` of the new ``world`` does; the worst of them."""
    largest = max(
        box.size * 4 for rank in ranks for p in world.parameters(world.stage(rank)) for box in world.boxes(p, rank)
    )
    memory, cost = Memory(max(largest, mmap.PAGESIZE)), LoadCost(world.sharding.world)
    for rank in ranks:
        wanted = [
            Wanted(entry.name, saved.record.tensors[entry.name], view.box, view.tensor)
            for entry in world.collected(rank, memory.view).entries.values()
            for view in entry.views
        ]
        files, stats = SimulatedFiles(saved), ReadStats()
        as_new()
        with no_collection():
            began = process_time()
            _plan(files, wanted, stats)
            took = process_time() - began - files.spent
        headers = sum(files.records[index].header_bytes for index in files._headers)
        cost.add(took, stats, len(files._headers), headers)
    return cost


def _plan(files: SimulatedFiles, wanted: list[Wanted], stats: ReadStats) -> None:
    """`read_boxes` up to where it reads, each request counted in its stead."""
    plans, round_up = overlaps_of(files, wanted, True, stats)
    for overlaps in plans.values():
        ordered = sorted(overlaps, key=lambda overlap: overlap.piece.begin)
        for job in jobs_of(r for overlap in ordered for r in ranges_of(overlap, True, round_up=round_up)):
            stats.add(max(r.begin + r.nbytes for r in job) - job[0].begin)
