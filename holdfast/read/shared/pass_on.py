"""Reading in turns: each rank of those that want the same bytes reads a part, and takes the rest from the others.

`share` calls `read_line` for each set of ranks. Each window is checked by the rank that reads it, while the last one is
being passed on. A rank that fails goes on meeting the others until all of them know; none is left waiting for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from holdfast.buffers.memory import move
from holdfast.buffers.scatter import deliver
from holdfast.buffers.stage import is_plain_memory
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, flat_boxes, relative
from holdfast.ondisk.cells import TensorRecord
from holdfast.plan.share_plan import ALIGN, Atom, Holders, Item, Placing, atoms_of, run_at, runs_of, windows_of
from holdfast.read.files import Files
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.shared.relay import TRAILER, Lost, Relay, Seat, seat_of
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted

Tensors = Sequence[tuple[str, TensorRecord]]
"""The tensors of a checkpoint, by the numbers that items have."""

MEMORY = 128 << 20
"""Bytes of host memory for slices of other hosts, beside two windows of each rank that reads."""

LONGEST = BLOCK
"""Bytes of a window at the most. Longer ones overlap no better, and each page of them costs every rank a fault."""

SHORTEST_SLICE = 4 << 10
"""Bytes that a rank sends to other hosts at a time, at the least."""


@dataclass(frozen=True)
class Line:
    """What a set of ranks wants, laid end to end, and who reads which part of it; the same on all but for the seat."""

    holders: Holders
    items: list[Item]
    atoms: list[Atom]
    seat: Seat
    runs: list[range]
    windows: list[list[list[Placing]]]  # of each reader
    window: int  # bytes of memory for one
    slice: int  # bytes of a window that are passed on at a time

    @property
    def nbytes(self) -> int:
        return sum(atom.nbytes for atom in self.atoms)

    @property
    def own(self) -> int:
        """Bytes that this rank reads."""
        reader = self.seat.reader
        return 0 if reader is None else sum(self.atoms[number].nbytes for number in self.runs[reader])

    @property
    def width(self) -> int:
        """Bytes of a slice in memory. Between hosts it ends with a word on how its sender fares."""
        return self.window if self.seat.hosts == 1 else self.slice + TRAILER

    @property
    def memory(self) -> int:
        """Bytes that a host needs to take slices from all readers while the last ones are still in use."""
        return 2 * len(self.runs) * self.width

    def turns(self, window: int) -> int:
        """How many slices the longest window of that number has."""
        ends = [w[window][-1] for w in self.windows if window < len(w)]
        return -(-max(p.offset + self.atoms[p.atom].nbytes for p in ends) // self.slice)


def line_of(
    holders: Holders, items: list[Item], records: Sequence[TensorRecord], rank: int, host_of: Sequence[int]
) -> Line:
    """The line of ``holders`` as ``rank``, one of them, sees it; rank r runs on host ``host_of[r]``."""
    seat, atoms = seat_of(holders, rank, host_of), atoms_of(items, records)
    runs = runs_of(atoms, seat.hosts * seat.lanes)
    windows = [windows_of(atoms, run, LONGEST) for run in runs]
    longest = max(p.offset + atoms[p.atom].nbytes for mine in windows for window in mine for p in window[-1:])
    window = slice_ = -(-longest // ALIGN) * ALIGN
    if seat.hosts > 1:
        slice_ = min(window, max(SHORTEST_SLICE, MEMORY // 2 // len(runs) // ALIGN * ALIGN))
    return Line(holders, items, atoms, seat, runs, windows, window, slice_)


@dataclass
class Outcome:
    """What a line gave this rank. ``stopped``: another rank failed, and tells why; ``lost``: the others are gone."""

    stats: ReadStats = field(default_factory=ReadStats)
    received: int = 0
    stopped: bool = False
    lost: str = ""


def read_line(
    line: Line, relay: Relay, views: Mapping[Item, Sequence[torch.Tensor]], tensors: Tensors, files: Files, *,
    verify: Verify, advance: Callable[[int], None],
) -> Outcome:  # fmt: skip
    """Read this rank's part of a line, take the rest from the others, and fill this rank's views of all items.

    Every holder calls it. Raises what this rank itself failed of, once the others know. What another rank failed of is
    raised there.
    """
    return _Passing(line, relay, views, tensors, files, verify, advance).run()


def wanted_of(line: Line, window: Sequence[Placing], tensors: Tensors, memory: torch.Tensor) -> list[Wanted]:
    """What a reader reads into the ``memory`` of a window."""
    wanted = []
    for number, offset in window:
        atom = line.atoms[number]
        name, record = tensors[line.items[atom.item].tensor]
        view = memory[offset : offset + atom.nbytes].view(dtypes.torch_dtype(record.dtype))
        if atom.at < 0:
            wanted.append(Wanted(name, record, atom.share, view.view(atom.share.lengths)))
        else:
            flat = TensorRecord(record.dtype, (atom.cell.size,), None, str(atom.file))
            wanted.append(Wanted(name, flat, Box((atom.at,), (atom.elements,)), view, (atom.cell, record)))
    return wanted


class _Memory:
    """Where slices of a line arrive, and windows of this rank's own wait.

    On one host a window is read to where all ranks can see it; between hosts it is kept ``apart`` and sent in slices.
    """

    def __init__(self, line: Line, relay: Relay) -> None:
        memory = torch.frombuffer(relay.memory.view, dtype=torch.uint8)
        self.slices = memory[: line.memory].view(2, len(line.runs), line.width)
        across = line.seat.hosts > 1
        self.apart = torch.empty(2, line.window, dtype=torch.uint8, device="cpu") if across else None
        self.sent = torch.zeros(line.width if across else 0, dtype=torch.uint8, device="cpu")


class _Passing:
    def __init__(
        self, line: Line, relay: Relay, views: Mapping[Item, Sequence[torch.Tensor]], tensors: Tensors, files: Files,
        verify: Verify, advance: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.line, self.relay, self.views, self.tensors = line, relay, views, tensors
        self.files, self.verify, self.advance = files, verify, advance
        self.outcome = Outcome()
        self.failure: BaseException | None = None
        self.failed_beside = 0
        self.offsets = [[[p.offset for p in window] for window in windows] for windows in line.windows]
        self.memory = _Memory(line, relay)

    def run(self) -> Outcome:
        line, reader = self.line, self.line.seat.reader
        own = line.windows[reader] if reader is not None else []
        turn = 0
        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-share") as pool:
            coming: Future[int] | None = pool.submit(self._read, own[0], 0) if own else None
            for window in range(max(len(windows) for windows in line.windows)):
                unverified, coming = self._outcome(coming), None
                for number in range(line.turns(window)):
                    try:
                        failed, unchecked = self._meet(window, number, turn, unverified)
                    except Lost as error:
                        self.outcome.lost = str(error)
                        return self._end()
                    if failed:
                        self.outcome.stopped = True
                        return self._end()
                    if number == 0 and window + 1 < len(own):
                        # Only now: the memory of the window before this one has been emptied by all who met.
                        coming = pool.submit(self._read, own[window + 1], (window + 1) % 2)
                    unverified = 0
                    self.outcome.stats.unverified += unchecked
                    try:
                        self._take(window, number, turn)
                    except BaseException as error:  # noqa: BLE001 - the others hear of it, and it is raised at the end
                        self.failure = self.failure or error
                    turn += 1
        return self._end()

    def _outcome(self, coming: Future[int] | None) -> int:
        """Wait for this rank's own window; the bytes of it that could not be checked."""
        try:
            return coming.result() if coming is not None else 0
        except BaseException as error:  # noqa: BLE001 - the others hear of it, and it is raised at the end
            self.failure = self.failure or error
            return 0

    def _end(self) -> Outcome:
        failure = self.failure or self.relay.interrupt
        if failure is not None:
            raise failure
        self.outcome.received = self.line.nbytes - self.line.own
        return self.outcome

    def _read(self, window: list[Placing], parity: int) -> int:
        """Fill a window from storage; the bytes that could not be checked."""
        reader = self.line.seat.reader or 0
        memory = self.memory.slices[parity, reader] if self.memory.apart is None else self.memory.apart[parity]
        wanted = wanted_of(self.line, window, self.tensors, memory)
        stats = read_boxes(self.files, wanted, verify=self.verify)
        self.outcome.stats.read += stats.read
        self.outcome.stats.requests += stats.requests
        return stats.unverified

    def _meet(self, window: int, number: int, turn: int, unverified: int) -> tuple[int, int]:
        """Meet the others, after which all slices are there: (how many failed, bytes not checked). Raises Lost."""
        failed = int(self.failure is not None or self.relay.interrupt is not None)
        if self.memory.apart is None:
            failed, unverified = self.relay.sum_beside([failed, unverified])
            return failed, unverified
        # What fails on a host is known there first, and goes to the others with the next slice: so all of them stop
        # at the same one.
        seat, slices = self.line.seat, self.memory.slices[turn % 2]
        if seat.across:
            part = self.memory.apart[window % 2][number * self.line.slice : (number + 1) * self.line.slice]
            self.memory.sent[: len(part)] = part
            self.memory.sent[-TRAILER:].view(torch.int64)[:2] = torch.tensor(
                [failed + self.failed_beside, unverified], device="cpu"
            )
            lane = slices[seat.place * seat.hosts : (seat.place + 1) * seat.hosts]
            self.relay.gather_across(lane.view(-1), self.memory.sent)
        self.failed_beside = self.relay.sum_beside([failed])[0]
        trailers = slices[:, -TRAILER:].contiguous().view(torch.int64)
        all_failed, all_unverified = trailers[:, :2].sum(0).tolist()
        return all_failed, all_unverified

    def _take(self, window: int, number: int, turn: int) -> None:
        """Copy what has come to where it belongs."""
        begin, done = number * self.line.slice, 0
        end = begin + self.line.slice
        for reader, windows in enumerate(self.line.windows):
            if window >= len(windows):
                continue
            memory, placings = self.memory.slices[turn % 2, reader], windows[window]
            for at in range(max(bisect_right(self.offsets[reader][window], begin) - 1, 0), len(placings)):
                placing = placings[at]
                atom = self.line.atoms[placing.atom]
                low, high = max(placing.offset, begin), min(placing.offset + atom.nbytes, end)
                if placing.offset >= end:
                    break
                if low < high:
                    done += self._put(atom, low - placing.offset, memory[low - begin : high - begin])
        self.advance(done)

    def _put(self, atom: Atom, skipped: int, part_of_atom: torch.Tensor) -> int:
        """Copy a part of an atom, ``skipped`` bytes from its start, into all views of its item; the bytes copied."""
        item = self.line.items[atom.item]
        dtype = dtypes.torch_dtype(self.tensors[item.tensor][1].dtype)
        first = atom.first + skipped // dtype.itemsize
        start = run_at(atom.share, item.box)
        for view in self.views[item]:
            if start is not None and view.dtype == dtype and view.device.type == "cpu" and is_plain_memory(view):
                move(view.data_ptr() + (start + first) * dtype.itemsize, part_of_atom.data_ptr(), part_of_atom.nbytes)
                continue
            host, at, shift = part_of_atom.view(dtype), 0, relative(atom.share, item.box).offsets
            for part in flat_boxes(atom.share.lengths, first, first + host.numel()):
                target = view
                for dim, (offset, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
                    target = target.narrow(dim, shift[dim] + offset, length)
                deliver(host[at : at + part.size].view(part.lengths), target)
                at += part.size
        return part_of_atom.nbytes * len(self.views[item])
