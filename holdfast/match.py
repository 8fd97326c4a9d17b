"""A checkpoint compared with one rank's target, name by name, and the reading that follows from it.

`load` makes a `Match`, and so do torch.distributed.checkpoint's calls. Reads nothing before `read`, and hands nothing
back before `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import msgspec
import torch

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.engine.ranges import Verify
from holdfast.engine.ranks import Ranks
from holdfast.engine.read import Wanted
from holdfast.engine.sections import dropped_of, left_of
from holdfast.engine.share import Offer, Sharing
from holdfast.engine.spread import WHOLE, Spread
from holdfast.engine.state import Collected, Entry, Saved, Slot
from holdfast.engine.state.ids import names_for_ids, optimizers_of
from holdfast.engine.state.per_rank import choose, no_rule
from holdfast.errors import Mismatch
from holdfast.nested import nest
from holdfast.ondisk import dtypes, values
from holdfast.ondisk.box import whole
from holdfast.ondisk.manifest import TensorRecord
from holdfast.ondisk.values import JSON


@dataclass
class Loaded:
    """What a load did.

    ``restored``: names of tensors and values that came; ``skipped``: left out by ``only``; ``kept``: not in the
    checkpoint, kept as they were; ``cast``: name to (saved, own) dtype; ``renamed``: saved name to own name.
    Bytes are this rank's: ``bytes_needed`` by its boxes, ``bytes_read`` from storage, ``bytes_received`` from ranks
    that want the same and have read them, ``bytes_unverified`` of those needed whose blocks were read only in part, by
    whichever rank, and so could not be checked (``verify="blocks"`` checks all).
    """

    checkpoint: Checkpoint
    restored: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_unverified: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int | None:
        """The training step of the checkpoint."""
        return self.checkpoint.step


class Fit(msgspec.Struct, array_like=True):
    """How checkpoint and target fit on one rank. ``unclaimed`` has a bit for each saved name, in sorted order."""

    where: str
    names: list[str]
    unclaimed: bytes
    missing: list[str]
    misfits: list[str]
    offer: Offer = Offer()


class Came(msgspec.Struct, array_like=True):
    """How reading ended on a rank that did not fail: whether it has all, or why it stopped."""

    whole: bool
    why: str = ""


def named_ids(
    checkpoint: Checkpoint, target: Callable[[str], str], into: Mapping[str, Any]
) -> tuple[Callable[[str], str], dict[str, JSON]]:
    """``target`` and the saved values, with state under integer ids called by its parameters' names."""
    found = dict(checkpoint.manifest.values)
    states: dict[str, str] = {}
    renamed = {target(name): name for name in found}
    for path in optimizers_of(renamed):
        named, params = names_for_ids(path, {name: found[source] for name, source in renamed.items()}, into)
        states.update(named)
        found.update((renamed[at], fqn) for at, fqn in params.items())
    if not states:
        return target, found

    def called(name: str) -> str:
        own = target(name)
        head = own.rpartition("/")[0]
        while head and head not in states:
            head = head.rpartition("/")[0]
        return states[head] + own[len(head) :] if head else own

    return called, found


def saved_names(
    checkpoint: Checkpoint, target: Callable[[str], str], found: Mapping[str, JSON], asked: Callable[[str], bool]
) -> Saved:
    tensors = {}
    for name, record in checkpoint.records.items():
        own = target(name)
        if asked(own):
            tensors[own] = (record.dtype, record.shape)
    return Saved(tensors, {target(p): v for p, v in found.items() if asked(target(p))})


class Match:
    """The comparison of one checkpoint with one rank's target, and the reading that follows from it."""

    def __init__(
        self, checkpoint: Checkpoint, target: Callable[[str], str], saved: Saved, asked: Callable[[str], bool],
        cast: bool, collected: Collected,
    ) -> None:  # fmt: skip
        self.checkpoint, self.saved, self.asked, self.may_cast, self.state = checkpoint, saved, asked, cast, collected
        self.loaded = Loaded(checkpoint)
        manifest = checkpoint.manifest
        self.source = {target(name): name for name in checkpoint.records}
        self.per_rank = {target(p): p for p in manifest.per_rank if asked(target(p))}
        self.containers = {target(p): kind for p, kind in manifest.containers.items()}
        everything = [*checkpoint.records, *manifest.values, *manifest.per_rank]
        found: set[str] = set()
        for name in everything:
            own = target(name)
            found.add(own)
            if own != name:
                self.loaded.renamed[name] = own
            if not asked(own):
                self.loaded.skipped.append(name)
        if len(found) < len(everything):
            raise Mismatch(f"rename= gives two saved names of {checkpoint.path} the same new name")
        self.claimed: set[str] = set()
        self.wanted: list[Wanted] = []
        self.spreads: list[Spread] = []  # of each that is wanted
        self._sharing: Sharing | None = None
        self.slots: list[Slot] = []
        self.fresh: dict[str, torch.Tensor] = {}

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """What the checkpoint has below a path."""
        return _index_below([*self.saved.values, *self.containers, *self.saved.tensors])

    def compare(self, *, keep: bool, world_size: int) -> Fit:
        """Match every leaf of the target with the checkpoint; nothing is read or changed."""
        missing: list[str] = []
        misfits: list[str] = []
        self._match_tensors(missing, misfits)
        for slot in self.state.slots:
            leaves = self._leaves(slot)
            if leaves:
                self.slots.append(slot)
                self.claimed.update(leaves)
                if slot.check is not None:
                    try:
                        slot.check(self._tree(slot))
                    except Mismatch as error:
                        misfits.append(str(error))
                self.loaded.restored += [name for name in leaves if name in self.saved.values]
            elif self.asked(slot.path):
                missing.append(slot.path)
        for path, leaf in self.state.per_rank.items():
            if path in self.per_rank:
                misfits += no_rule(path, leaf.elsewhere, self.checkpoint.world_size, world_size)
                self.claimed.add(path)
                self.loaded.restored.append(path)
            elif self.asked(path):
                missing.append(path)
        everything = sorted({*self.saved.tensors, *self.saved.values, *self.per_rank})
        bits = bytearray(-(-len(everything) // 8))
        for i, name in enumerate(everything):
            if name not in self.claimed:
                bits[i // 8] |= 1 << (i % 8)
        if keep:
            self.loaded.kept, missing = missing, []
        return Fit(_where(self.checkpoint), everything, bytes(bits), missing, misfits)

    def _match_tensors(self, missing: list[str], misfits: list[str]) -> None:
        tied: dict[str, list[str]] = {}
        for alias, name in self.state.aliases.items():
            tied.setdefault(name, []).append(alias)
        for name, entry in self.state.entries.items():
            if name in self.state.aliases or not self.asked(name):
                continue
            found = [n for n in (name, *tied.get(name, ())) if n in self.saved.tensors]
            if not found:
                missing.append(name)
                continue
            self.claimed.update(found)
            self._match_tensor(found[0], entry, misfits)

    def _match_tensor(self, name: str, entry: Entry, misfits: list[str]) -> None:
        dtype, shape = self.saved.tensors[name]
        if shape != entry.shape:
            misfits.append(f"{entry.name}: saved with shape {list(shape)}, here {list(entry.shape)}")
            return
        if dtype != entry.dtype:
            if not self.may_cast:
                misfits.append(f"{entry.name}: saved as {dtype}, here {entry.dtype} (cast=True converts)")
                return
            self.loaded.cast[entry.name] = (dtype, entry.dtype)
        self.loaded.restored.append(entry.name)
        saved_name, record = self._record(name)
        self.wanted += [Wanted(saved_name, record, view.box, view.tensor) for view in entry.views]
        self.spreads += [entry.spread] * len(entry.views)

    def _record(self, name: str) -> tuple[str, TensorRecord]:
        source = self.source[name]
        return self.checkpoint.saved_name(source), self.checkpoint.records[source]

    def _leaves(self, slot: Slot) -> list[str]:
        """What the checkpoint has at or below a slot: values, containers, and for a whole slot tensors too."""
        found = [
            n for n in (slot.path, *self.below.get(slot.path, ())) if n in self.saved.values or n in self.containers
        ]
        if not any(n in self.saved.values or self.asked(n) for n in found):
            found = []
        if slot.whole:
            for name in self.below.get(slot.path, ()):
                if name in self.saved.tensors:
                    found.append(name)
                    if name not in slot.held and name not in self.fresh:
                        saved_name, record = self._record(name)
                        self.checkpoint.prove([self.source[name]])
                        tensor = torch.empty(record.shape, dtype=dtypes.torch_dtype(record.dtype), device="cpu")
                        self.fresh[name] = tensor
                        self.wanted.append(Wanted(saved_name, record, whole(record.shape), tensor))
                        self.spreads.append(WHOLE)
                        self.loaded.restored.append(name)
        return found

    def sharing(self, ranks: Ranks) -> Sharing:
        """What this rank may share with others of what is wanted; made once."""
        self._sharing = self._sharing or Sharing(ranks, self.checkpoint.manifest, self.wanted)
        return self._sharing

    def read(self, verify: Verify, sharing: Sharing) -> Came:
        """Read every wanted byte, unless another rank fails meanwhile."""
        rank = sharing.ranks.rank
        events.reached("read", self.checkpoint.path, rank)
        with events.task("load", str(self.checkpoint.path), rank, part=True) as task:
            task.total = sum(w.box.size * dtypes.itemsize(w.record.dtype) for w in self.wanted)
            took = sharing.read(self.checkpoint.files, self.checkpoint.verifying(verify), task.advance)
        if took.stopped or took.lost:
            return Came(False, took.lost)
        loaded, stats = self.loaded, took.stats
        loaded.bytes_received = took.received
        loaded.bytes_needed, loaded.bytes_read, loaded.bytes_unverified = stats.needed, stats.read, stats.unverified
        if stats.unverified and verify is True:
            events.log.debug("%d bytes of blocks read in part were not verified", stats.unverified)
        return Came(True)

    def fill(self, sharing: Sharing) -> None:
        """Hand all values back, once every byte is there."""
        rank, world_size = sharing.ranks.rank, sharing.ranks.size
        for action in self.state.then:
            action()
        for slot in self.slots:
            slot.put(self._tree(slot))
        for path, leaf in self.state.per_rank.items():
            if path in self.per_rank:
                saved = self.per_rank[path]
                fetch = partial(self.checkpoint.per_rank, saved)
                leaf.put(choose(leaf.elsewhere, fetch, self.checkpoint.world_size, rank, world_size))
        events.reached("filled", self.checkpoint.path, rank)

    def _tree(self, slot: Slot) -> Any:
        """What was saved at a slot, nested as it was."""
        below = [slot.path, *self.below.get(slot.path, ())]
        leaves: dict[str, Any] = {
            n: values.decoded(self.saved.values[n], n, self.checkpoint.path) for n in below if n in self.saved.values
        }
        if slot.whole:
            leaves.update((n, slot.held.get(n, self.fresh.get(n))) for n in below if n in self.saved.tensors)
        containers = {n: self.containers[n] for n in below if n in self.containers}
        root = "r"
        tree = nest(
            {root + n[len(slot.path) :]: v for n, v in leaves.items()},
            {root + n[len(slot.path) :]: kind for n, kind in containers.items()},
        )
        return tree[root]


def _where(checkpoint: Checkpoint) -> str:
    """The path of a checkpoint, and what it has lost since it was saved."""
    lost = dropped_of(checkpoint.manifest)
    if not lost:
        return str(checkpoint.path)
    left = left_of(checkpoint.manifest)
    only = repr(left[0] if len(left) == 1 else left).replace("'", '"')
    return (
        f"{checkpoint.path}, of which {', '.join(lost)} was dropped by Keep(optimizer_last=…), Keep(model_every=…) or "
        f"holdfast.drop (only={only} loads what is left),"
    )


def _index_below(paths: list[str]) -> dict[str, list[str]]:
    """Every path that is above something, with all that is below it."""
    below: dict[str, list[str]] = {}
    for name in dict.fromkeys(paths):
        at = name
        while "/" in at:
            at = at.rpartition("/")[0]
            below.setdefault(at, []).append(name)
    return below
