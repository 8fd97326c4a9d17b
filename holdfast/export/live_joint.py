"""Windows that ranks of one machine fill together, in memory that they share; one of them writes each.

Tensors that are cut by columns lie in a file as short runs of all ranks in turn, and writing them one by one takes
many times as long as the windows that they make up. `LiveWork` calls `write_joint`. If the ranks cannot share memory,
or one of them is gone, each writes what it has by itself: the bytes are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from holdfast.buffers.device import Moments
from holdfast.buffers.memory import Buffer
from holdfast.export.draft import WINDOW, Fixed
from holdfast.export.live_windows import ROOM, Image, fill, write_runs
from holdfast.export.patches import Cell, Footprint, Patch, edges_of, parted, runs_of
from holdfast.read.shared.relay import Lost, Relay

FROM = 2048
"""Runs in all windows that would be joint; fewer are not worth that ranks connect."""

LEAST = 32
"""Runs in one window."""

SLOTS = 4
"""Windows that are filled at a time, each written by another rank; while they are written, as many more are filled."""


def joint_cells(of_ranks: Sequence[Mapping[Cell, Sequence[Footprint]]]) -> list[Cell]:
    """The windows to fill together, of what each rank of a machine writes; the same on each of them."""
    holders: Counter[Cell] = Counter()
    runs: Counter[Cell] = Counter()
    for cells in of_ranks:
        holders.update(cells.keys())
        for cell, places in cells.items():
            runs[cell] += sum(place.run_count for place in places)
    chosen = sorted(cell for cell, count in runs.items() if holders[cell] > 1 and count >= LEAST)
    return chosen if sum(runs[cell] for cell in chosen) >= FROM else []


def memory_for(ranks: int) -> int:
    """Bytes that so many ranks share."""
    return 2 * min(ranks, SLOTS) * ROOM


def write_joint(
    joint: Sequence[Cell], own: Mapping[Cell, Sequence[Patch]], of_all: Mapping[Cell, Sequence[Footprint]],
    relay: Relay, content: Path, moments: Moments, progress: Callable[[int], None], *, apart: bool,
) -> list[Fixed]:  # fmt: skip
    """Fill these windows with what this rank has of them, and write every n-th, with what all have of it: ``of_all``.

    ``apart``: ranks on other machines write these files too. Returns bytes in sectors that this machine does not fill
    alone, which are not written then. Raises Lost if another rank does not come, or has failed.
    """
    seat, kept = relay.seat, list[Fixed]()
    slots = min(len(seat.beside), SLOTS)
    pending: Future[list[Fixed]] | None = None

    def image(number: int) -> Image:
        begin, memory = number * ROOM, relay.memory
        return Image(Buffer(memory.memory, memory.view[begin : begin + ROOM], memory.address + begin))

    def write(cell: Cell, number: int) -> list[Fixed]:
        (path, window), runs = cell, runs_of(of_all[cell])
        edges = edges_of(runs) if apart else []
        return write_runs(content, path, image(number).memory.view, window * WINDOW, *parted(runs, edges))

    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-convert") as pool:
        for turn, at in enumerate(range(0, len(joint), slots)):
            first = turn % 2 * slots  # the other half is being written
            try:
                for number, cell in enumerate(joint[at : at + slots]):
                    patches = own.get(cell, ())
                    fill(patches, image(first + number), cell[1] * WINDOW, moments)
                    progress(sum(patch.place.nbytes for patch in patches))
                kept += pending.result() if pending is not None else []
            except BaseException:
                with suppress(Lost):
                    relay.sum_beside([1])
                raise
            if relay.sum_beside([0])[0]:
                raise Lost("another rank has failed")
            mine = at + seat.place
            writes = seat.place < slots and mine < len(joint)
            pending = pool.submit(write, joint[mine], first + seat.place) if writes else None
        kept += pending.result() if pending is not None else []
    return kept
