"""A conversion from a state in the memory of the ranks: what they gathered looks like a checkpoint to the rest.

`convert` makes a `LiveWork` of a state. Each rank writes the boxes that a save would have it write, as ranges of the
files themselves. Never gathers a tensor, and never goes on from what an earlier call has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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
from holdfast.export.draft import Fixed, Span
from holdfast.export.live_windows import write_windows
from holdfast.export.partial import Journal, Partial
from holdfast.export.patches import Patch, Region, edges_of, patch_of, regions_of, runs_of, windows_of
from holdfast.export.work import ConvertWork, Note, Options
from holdfast.ondisk.manifest import Manifest
from holdfast.plan.layout import join_owned
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Call, Ranks
from holdfast.read.damage import Findings
from holdfast.read.files import AsStored, Files
from holdfast.read.ranges import Verify
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
    """A state that all ranks have gathered and agree on."""

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
    return Live(job, value_of(gathered), agreed)


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
    """One conversion of a live state on one rank."""

    def __init__(self, live: Live, target: Place, options: Options, ranks: Ranks, partial: Partial) -> None:
        super().__init__(_NAME, target, options, ranks, partial)
        self._live = live
        self._windows: list[list[Patch]] = []

    def _opened(self) -> Checkpoint:
        return Checkpoint(_NAME, reader=LiveReader(self._live))

    def _stamps(self) -> list[tuple[str, int, str | int]]:
        return [(self._live.agreed.save, 0, "")]  # of this call alone: what it leaves is of no use to another

    def plan(self) -> str:
        """As of a checkpoint, and the bytes that the first rank would have to write for this one."""
        plan = super().plan()
        edges = [edge for window in self._windows for run in runs_of(window) for edge in edges_of(run)]
        return f"{plan} {sum(end - begin for begin, end in edges) if self._apart else 0}"

    @property
    def _apart(self) -> bool:
        """Whether the ranks are on several machines."""
        return len(set(self.ranks.main.hosts or [])) > 1

    def _cut(self) -> None:
        """What this rank writes: of the tensors that were selected, and no others, so that ranks write equally much."""
        spans: defaultdict[str, list[tuple[Region, Span]]] = defaultdict(list)
        for span in self.draft.spans:
            for region in regions_of(span.leaf):
                spans[region.name].append((region, span))
        plan, state = self._live.plan, self._live.gathered.state
        wanted = {name: tensor for name, tensor in plan.tensors.items() if name in spans}
        patches = []
        for name, _, box in replace(plan, tensors=wanted).written_by(self.ranks.rank):
            for region, span in spans[name]:
                part = region.within(box)
                if part is not None:
                    patches.append(patch_of(part, memory_of(state, name, part.box), span))
        self._windows = windows_of(patches)

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
        target, nbytes = str(self.partial.target), sum(p.nbytes for window in self._windows for p in window)
        journal = Journal(self.partial, self.ranks.rank)  # its lock tells that this rank is still at it
        try:
            with events.task("convert", target, self.ranks.rank, nbytes) as task:
                edges = write_windows(
                    self._windows, self.partial.content, self._live.gathered.moments, task.advance, apart=self._apart
                )
        finally:
            journal.close()
        self.converted.bytes_read = nbytes
        return Note([], [(edge.path, edge.offset, edge.data) for edge in edges])

    def _joined(self, notes: list[Note]) -> tuple[list[Fixed], list[str]]:
        edges = [Fixed(*edge) for note in notes for edge in note.edges]
        return sorted(edges), [""] * len(self.draft.spans)
