"""A save by very many ranks, all but its bytes: agreement, plan, images, manifest, on one rank and on the first.

Called by the simulator. Runs holdfast's own functions in the order of a save; only the other ranks and the memory
are missing. CPU seconds, never the clock's.
"""

from __future__ import annotations

import functools
import gc
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from time import process_time
from typing import Any, TypeVar

import msgspec
import torch

from benchmarks.scale_states import Parameter, Shape, World
from benchmarks.scale_talk import Meeting
from holdfast.buffers.memory import no_collection
from holdfast.commit.agree import Agreed, plan_for
from holdfast.commit.draft import Identity, complete, draft
from holdfast.ondisk import blocks, datafile, dtypes, manifest
from holdfast.ondisk.box import regular_cuts
from holdfast.ondisk.cells import Cells
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.plan.layout import Layout, digest_of, join_owned
from holdfast.plan.plan import Plan, make_plan
from holdfast.ranks.ranks import Ranks
from holdfast.state.leaves import layout_of, owned_values
from holdfast.write.datafiles import DataFile, datafiles_of

SAVE, RUN = "7c1e09ab52d3f410", "0123456789abcdef"
_FILE = re.compile(r".*/(\d+)-of-\d+\..*")

Result = TypeVar("Result")


@dataclass
class SaveCost:
    """One save. ``_s`` are CPU seconds, ``_bytes`` bytes; balance is of bytes written, over the mean of all ranks."""

    layouts: int = 0
    # one rank
    describe_s: float = 0.0
    plan_s: float = 0.0
    plan_bytes: int = 0
    images_s: float = 0.0
    later_s: float = 0.0
    pieces: int = 0
    note_bytes: int = 0
    answer_bytes: int = 0
    later_note_bytes: int = 0
    later_answer_bytes: int = 0
    # the first rank
    decide_s: float = 0.0
    later_decide_s: float = 0.0
    draft_s: float = 0.0
    complete_s: float = 0.0
    encode_s: float = 0.0
    # what is committed
    tensors: int = 0
    files: int = 0
    manifest_bytes: int = 0
    decode_s: float = 0.0
    balance: float = 0.0
    best_balance: float = 0.0

    @property
    def first_save_s(self) -> float:
        """All that a rank plans for its first save."""
        return self.describe_s + self.plan_s

    @property
    def first_rank_s(self) -> float:
        """What the first rank does beyond that, for all ranks."""
        return self.decide_s + self.draft_s + self.complete_s + self.encode_s

    @property
    def manifest_share(self) -> float:
        """Bytes of the manifest over 100 for each tensor and 100 for each file."""
        return self.manifest_bytes / (100 * self.tensors + 100 * self.files)


@dataclass
class Saved:
    """A simulated checkpoint: what a load finds."""

    world: World
    plan: Plan
    record: Manifest
    cost: SaveCost
    _files: dict[int, dict[str, tuple[bytes, int]]] = field(default_factory=dict)

    def files(self, rank: int) -> dict[str, tuple[bytes, int]]:
        """The data files that a rank writes: headers, their sums zero, and bytes of the whole files."""
        if rank not in self._files:
            ranks = Ranks(rank, self.world.sharding.world)
            self._files[rank] = {}
            for image in datafiles_of(self.world.collected(rank), self.plan, ranks, SAVE):
                header = header_of(image, rank)
                self._files[rank][image.path] = (header, len(header) + image.nbytes)
        return self._files[rank]


def header_of(image: DataFile, rank: int) -> bytes:
    """A header as `write` makes it, with sums of zeros."""
    sums = ",".join("0" * (16 * blocks.count(piece.nbytes)) for piece in image.pieces)
    return datafile.build_header(
        image.pieces, save=SAVE, rank=rank, section=image.section, shapes=image.shapes, sums=sums
    )


def writer_of(path: str) -> int:
    """The rank that writes a data file."""
    match = _FILE.fullmatch(path)
    if match is None:
        raise ValueError(f"{path} is no data file")
    return int(match[1])


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What ``work`` returns, and the CPU seconds that it took."""
    with no_collection():
        began = process_time()
        result = work()
        return result, process_time() - began


def as_new() -> None:
    """Forget what holdfast has worked out: the next call costs what the first one does."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("holdfast."):
            found.cache_clear()


def save(world: World, *, rank: int | None = None, memory: bool = True) -> Saved:
    """Everything up to the manifest. ``rank`` is the one rank that is looked at; ``memory``: measure it too."""
    size = world.sharding.world
    rank = size // 2 if rank is None else rank
    cost, state = SaveCost(layouts=len(world.layouts)), world.collected(rank)
    meeting = Meeting(world)

    as_new()
    _, cost.describe_s = timed(lambda: _described(state))
    agreement, talk = meeting.agree()
    cost.note_bytes, cost.answer_bytes, cost.decide_s = talk.note_bytes, talk.answer_bytes, talk.first_s
    if memory:
        cost.plan_bytes = _peak(agreement, rank)
    as_new()
    ranks = Ranks(rank, size)
    plan, cost.plan_s = timed(lambda: _planned(ranks, agreement))
    images, cost.images_s = timed(lambda: datafiles_of(state, plan, ranks, agreement.save))
    cost.pieces = sum(len(image.pieces) for image in images)

    agreement, talk = meeting.agree()
    cost.later_note_bytes, cost.later_answer_bytes = talk.note_bytes, talk.answer_bytes
    cost.later_decide_s = talk.first_s

    def later() -> None:
        _described(state)
        _planned(ranks, agreement)

    cost.later_s = min(timed(later)[1] for _ in range(3))
    return _committed(world, agreement, plan, cost)


def _described(state: Any) -> str:
    return digest_of(layout_of(state))


def _planned(ranks: Ranks, agreement: Agreed) -> Plan:
    plan = plan_for(ranks, agreement)
    sum(1 for _ in plan.written_by(ranks.rank))
    return plan


def _peak(agreement: Agreed, rank: int) -> int:
    """The most memory that a rank has for its plan at once, the layouts that it was told included."""
    told = msgspec.msgpack.encode(agreement.layouts)
    as_new()
    gc.collect()
    tracemalloc.start()
    try:
        with no_collection():
            plan = make_plan(msgspec.msgpack.decode(told, type=list[Layout]), agreement.layout_of)
            sum(1 for _ in plan.written_by(rank))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _committed(world: World, agreement: Agreed, plan: Plan, cost: SaveCost) -> Saved:
    """What the first rank does once all have written; the sizes of files are those that the manifest tells."""
    size = world.sharding.world
    state = world.collected(0)
    identity = Identity(SAVE, RUN, 1000, size)
    told = [(r, i, owned_values(world.collected(r))) for i, r in enumerate(world.tellers)]
    joined = join_owned(agreement.layouts, told)
    drafted, cost.draft_s = timed(lambda: draft(identity, plan, state.values, state.kinds, joined, []))
    written = bytes_of(drafted)
    saved = Saved(world, plan, drafted, cost)
    # The header of a rank that was not looked at is taken to be as long as the longest of those that were.
    lengths: dict[str, int] = {}
    for rank in {0, size // 2, size - 1}:
        for path, (header, _) in saved.files(rank).items():
            section = path.partition("/")[0]
            lengths[section] = max(lengths.get(section, 0), len(header))
    files = []
    for i, (row, nbytes) in enumerate(zip(drafted.files, written.tolist(), strict=True)):
        length = lengths.get(str(row[0]).partition("/")[0], datafile.ALIGN)
        files.append(FileRecord(str(row[0]), length + nbytes, length, f"{i:032x}"))
    record, cost.complete_s = timed(lambda: complete(drafted, files))
    data, cost.encode_s = timed(lambda: manifest.encode(record))
    cost.tensors, cost.files, cost.manifest_bytes = len(record.tensors), len(record.files), len(data)
    as_new()
    saved.record, cost.decode_s = timed(lambda: manifest.decode(data, "manifest.json"))
    by_rank = torch.zeros(size, dtype=torch.float64)
    by_rank.index_add_(0, torch.tensor([writer_of(file.path) for file in files]), written.double())
    mean = float(by_rank.mean())
    cost.balance = float(by_rank.max()) / mean
    cost.best_balance = max(1.0, float(alone(world).max()) / mean)
    return saved


def bytes_of(record: Manifest) -> torch.Tensor:
    """Tensor bytes of each data file, by the cells that the manifest tells."""
    total = torch.zeros(len(record.files), dtype=torch.int64)
    alike = Counter(
        (t.dtype, t.shape, tuple(t.cells) if isinstance(t.cells, list) else t.cells, t.files)
        for t in record.tensors.values()
    )
    for (dtype, shape, cells, files), count in alike.items():
        volumes = _volumes(shape, cells) * (count * dtypes.itemsize(dtype))
        total.index_add_(0, torch.tensor(manifest.expand(files)), volumes)
    return total


def _volumes(shape: Shape, cells: tuple[int, ...] | Cells | None) -> torch.Tensor:
    """Elements of each cell."""
    if isinstance(cells, Cells) and cells.boxes is not None:
        return torch.tensor([prod(lengths) for _, lengths in cells.boxes])
    if isinstance(cells, Cells):
        cuts = cells.cuts or ()
    else:
        cuts = tuple(regular_cuts(n, cell) for n, cell in zip(shape, cells or shape, strict=True))
    volumes = torch.ones(1, dtype=torch.int64)
    for axis in cuts:
        volumes = torch.outer(volumes, torch.tensor(axis).diff()).flatten()
    return volumes


def alone(world: World) -> torch.Tensor:
    """Bytes of each rank that no other rank holds: no plan gives it less to write."""
    model, sharding = world.model, world.sharding
    found = torch.zeros(sharding.world, dtype=torch.float64)
    if sharding.replicas > 1:
        return found
    for stage in range(sharding.stages):
        shared = Counter(
            (p.shape, p.cut, p.expert)
            for p in world.parameters(stage)
            if p.expert or p.cut is not None or sharding.tensor == 1
        )
        first = stage * sharding.stage_size
        for (shape, cut, expert), count in shared.items():
            parameter = Parameter("", shape, 0, cut, expert)
            held = [prod(sharding.extents(parameter, position)) for position in range(sharding.stage_size)]
            found[first : first + sharding.stage_size] += torch.tensor(held) * float(count)
    return found * (dtypes.itemsize(model.dtype) + 8)
