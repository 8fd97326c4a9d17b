"""A checkpoint compared with one rank's target, name by name, and the reading that follows from it.

`load` makes a `Match`, and so do torch.distributed.checkpoint's calls. Reads nothing before `read`, and hands nothing
back before `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.commit.sections import dropped_of, left_of
from holdfast.errors import HoldfastError, Mismatch
from holdfast.matching.loaded import Loaded
from holdfast.matching.tied import same_as_saved, same_bytes, same_saved
from holdfast.ondisk import dtypes, values
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.values import JSON
from holdfast.plan.spread import Spread
from holdfast.ranks.ranks import Ranks
from holdfast.read.nested import nest
from holdfast.read.ranges import Verify
from holdfast.read.read import Wanted, read_boxes
from holdfast.read.shared.share import Offer, Sharing
from holdfast.state import Collected, Entry, Saved, Target
from holdfast.state.ids import names_for_ids, optimizers_of
from holdfast.state.per_rank import choose, no_rule

MOST_EARLY = 64 << 20
"""Bytes of objects that each rank reads before anything is changed; of more, they are read with all the rest."""

UNLIKE_SHAPE = "saved with shape"
"""In what is said of a tensor that has another shape here."""


class Fit(msgspec.Struct, array_like=True):
    """How checkpoint and target fit on one rank. ``unclaimed`` has a bit for each saved name, in sorted order.

    ``unfit``: patterns of ``only=`` that fit nothing, with what errors say of each; ``awaited``: those that fit the
    target alone.
    """

    where: str
    names: list[str]
    unclaimed: bytes
    missing: list[str]
    misfits: list[str]
    offer: Offer = Offer()
    early: bool = False
    unfit: dict[str, str] = {}
    awaited: list[str] = []


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
    containers = {target(p): kind for p, kind in checkpoint.manifest.containers.items()}
    return Saved(tensors, {target(p): v for p, v in found.items() if asked(target(p))}, containers, asked)


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
        self.containers = saved.containers
        everything = [*checkpoint.records, *manifest.values, *manifest.per_rank]
        found: set[str] = set()
        self.in_part: set[str] = set()  # paths above a name that is not asked for
        for name in everything:
            own = target(name)
            found.add(own)
            if own != name:
                self.loaded.renamed[name] = own
            if not asked(own):
                self.loaded.skipped.append(name)
                while "/" in own and (own := own.rpartition("/")[0]) not in self.in_part:
                    self.in_part.add(own)
        if len(found) < len(everything):
            raise Mismatch(f"rename= gives two saved names of {checkpoint.path} the same new name")
        self.claimed: set[str] = set()
        self.wanted: list[Wanted] = []
        self.spreads: list[Spread] = []  # of each that is wanted
        self._sharing: Sharing | None = None
        self.targets: list[Target] = []
        self.early: list[Target] = []  # of objects that are handed their state before anything else is changed
        self.early_wanted: list[tuple[Wanted, Spread]] = []
        self.fresh: dict[str, Any] = {}

    def compare(self, *, keep: bool, world_size: int, early: bool = True) -> Fit:
        """Match every leaf of the target with the checkpoint; nothing is changed.

        With ``early``, objects with methods of their own are left to `hand_over_early`, if what they take is not large.
        """
        missing: list[str] = []
        misfits: list[str] = []
        self._match_tensors(missing, misfits)
        for target in self.state.handback.targets:
            self._match_target(target, missing, misfits)
        for name, tensor in self.state.handback.must_equal.items():
            self._match_equal(name, tensor, misfits)
        if not early or sum(w.box.size * dtypes.itemsize(w.record.dtype) for w, _ in self.early_wanted) > MOST_EARLY:
            self.targets, self.early = [*self.targets, *self.early], []
            self.wanted += [wanted for wanted, _ in self.early_wanted]
            self.spreads += [spread for _, spread in self.early_wanted]
            self.early_wanted.clear()
        if not keep:
            self.loaded.cleared += [name for name in self.state.handback.clears if self.asked(name)]
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
        return Fit(_where(self.checkpoint), everything, bytes(bits), missing, misfits, early=bool(self.early))

    def _match_tensors(self, missing: list[str], misfits: list[str]) -> None:
        tied: dict[str, list[str]] = {}
        for alias, name in self.state.aliases.items():
            tied.setdefault(name, []).append(alias)
        for name, entry in self.state.entries.items():
            if name in self.state.aliases or not self.asked(name):
                continue
            stored = [n for n in (name, *tied.get(name, ())) if n in self.saved.tensors]
            if not stored:
                missing.append(name)
                continue
            self.claimed.update(stored)
            misfits += self._unlike(entry, stored)
            self._match_tensor(stored[0], entry, misfits)

    def _unlike(self, entry: Entry, stored: list[str]) -> Iterator[str]:
        """Of a tensor that is tied here: the names under which other numbers were saved."""
        first = self._record(stored[0])[0]
        for name in stored[1:]:
            boxes = [view.box for view in entry.views]
            if self._record(name)[0] != first and not same_saved(
                self.checkpoint, self.source[stored[0]], self.source[name], boxes
            ):
                yield (
                    f"{name}: saved as another tensor than {stored[0]}, here both are one (tied); untie them, or leave "
                    "one out by only="
                )

    def _match_equal(self, name: str, tensor: torch.Tensor, misfits: list[str]) -> None:
        """An entry of a module's state dict that nothing takes back: the saved one has to be what is there."""
        if name not in self.saved.tensors or not self.asked(name):
            return
        self.claimed.add(name)
        if not same_as_saved(self.checkpoint, self.source[name], tensor):
            misfits.append(
                f"{name}: saved with another value than it has here, and nothing takes it back: the module adds it to "
                "its state dict, but has neither a _load_from_state_dict nor a load hook that loads it"
            )

    def _match_tensor(self, name: str, entry: Entry, misfits: list[str]) -> None:
        dtype, shape = self.saved.tensors[name]
        if shape != entry.shape:
            misfits.append(f"{entry.name}: {UNLIKE_SHAPE} {list(shape)}, here {list(entry.shape)}")
            return
        if any(_shares_elements(view.tensor) for view in entry.views):
            misfits.append(
                f"{entry.name}: is an expanded tensor here, whose elements share memory; give a clone() of it"
            )
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

    def _match_target(self, target: Target, missing: list[str], misfits: list[str]) -> None:
        missing += [name for name in target.needs if self.asked(name) and not self.saved.has(name)]
        leaves = self._leaves(target)
        if not leaves:
            if self.asked(target.path) and not target.needs:
                missing.append(target.path)
            return
        (self.targets if target.undoing is None else self.early).append(target)
        self.claimed.update(leaves)
        self.loaded.restored += [name for name in leaves if name in self.saved.values]
        if target.whole:
            for name in leaves:
                if name in self.saved.tensors:
                    self._make(target, name, misfits)
        if target.check is not None:
            try:
                target.check(self._tree(target))
            except Mismatch as error:
                misfits.append(str(error))

    def _names(self, target: Target) -> Sequence[str]:
        """The names that a target takes, of all that was saved at or below its path."""
        return target.names if target.names is not None else (target.path, *self.saved.below(target.path))

    def _leaves(self, target: Target) -> list[str]:
        """What the checkpoint has of a target: values, containers, and for a whole target tensors too."""
        names = self._names(target)
        held = [n for n in names if n in self.saved.values or (target.whole and n in self.saved.tensors)]
        empty = [n for n in names if n in self.containers]
        return [*held, *empty] if held or any(self.asked(n) for n in empty) else []

    def _make(self, target: Target, name: str, misfits: list[str]) -> None:
        """Memory for a tensor that an object takes whole."""
        dtype, shape = self.saved.tensors[name]
        own_dtype, own_shape = target.expects.get(name, (dtype, None))
        if own_shape is not None and own_shape != shape:
            misfits.append(f"{name}: {UNLIKE_SHAPE} {list(shape)}, here {list(own_shape)}")
            return
        if own_dtype != dtype:
            if not self.may_cast:
                misfits.append(f"{name}: saved as {dtype}, here {own_dtype} (cast=True converts)")
                return
            self.loaded.cast[name] = (dtype, own_dtype)
        saved_name, record = self._record(name)
        self.checkpoint.prove([self.source[name]])
        if target.maker is None:
            raise TypeError("a target that takes tensors has to make them")
        try:
            value, entries = target.maker.make(name, dtype, shape)
        except Mismatch as error:
            misfits.append(str(error))
            return
        self.fresh[name] = value
        self.loaded.restored.append(name)
        for entry in entries:
            wanted = [Wanted(saved_name, record, view.box, view.tensor) for view in entry.views]
            if target.undoing is not None:
                self.early_wanted += [(one, entry.spread) for one in wanted]
            else:
                self.wanted += wanted
                self.spreads += [entry.spread] * len(wanted)

    def sharing(self, ranks: Ranks) -> Sharing:
        """What this rank may share with others of what is wanted; made once."""
        self._sharing = self._sharing or Sharing(ranks, self.checkpoint.manifest, self.wanted)
        return self._sharing

    def hand_over_early(self, verify: Verify) -> Iterator[Callable[[], None]]:
        """Read what objects take by methods of their own, and hand it to them; yields for each what undoes that.

        They may refuse it, and nothing but them has been changed by then.
        """
        wanted = [one for one, _ in self.early_wanted]
        stats = read_boxes(self.checkpoint.files, wanted, verify=self.checkpoint.verifying(verify))
        loaded = self.loaded
        loaded.bytes_needed, loaded.bytes_read, loaded.bytes_unverified = stats.needed, stats.read, stats.unverified
        for target in self.early:
            if target.undoing is not None:
                yield target.undoing()
            self._put(target, "nothing else was changed")

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
        loaded.bytes_needed += stats.needed
        loaded.bytes_read += stats.read
        loaded.bytes_unverified += stats.unverified
        if stats.unverified and verify is True:
            events.log.debug("%d bytes of blocks read in part were not verified", stats.unverified)
        return Came(True)

    def fill(self, sharing: Sharing) -> None:
        """Hand all values back, once every byte is there."""
        rank, world_size = sharing.ranks.rank, sharing.ranks.size
        for name in self.loaded.cleared:
            self.state.handback.clears[name]()
        for action in self.state.handback.before:
            action()
        for target in [*self.targets, *(target for target in self.early if target.again)]:
            self._put(target, "other objects may have been restored by then")
        for path, leaf in self.state.per_rank.items():
            if path in self.per_rank:
                saved = self.per_rank[path]
                fetch = partial(self.checkpoint.per_rank, saved)
                leaf.put(choose(leaf.elsewhere, fetch, self.checkpoint.world_size, rank, world_size))
        for action in self.state.handback.after:
            action()
        self._tell_what_arrived()
        events.reached("filled", self.checkpoint.path, rank)

    def _tell_what_arrived(self) -> None:
        """What was handed to methods of an object and does not stand in its state dict as it was saved."""
        for target in (*self.targets, *self.early):
            if target.present is None:
                continue
            present = target.present()
            for name in (n for n in self._names(target) if n in self.fresh):
                value, part = present.get(name), name.rpartition("/")[0] in present
                if not part and not (isinstance(value, torch.Tensor) and same_bytes(value, self.fresh[name])):
                    self.loaded.restored.remove(name)
                    self.loaded.handed.append(name)

    def _put(self, target: Target, rest: str) -> None:
        """Hand a target what was saved of it; should it refuse, the error says what became of the ``rest``."""
        try:
            put = target.put_some if target.path in self.in_part else None
            (put or target.put)(self._tree(target))
        except HoldfastError:
            raise
        except Exception as error:  # whatever the object's own method raises
            raise Mismatch(
                f"{target.path} refused what was saved of it ({type(error).__name__}: {error}); {rest}"
            ) from error

    def _tree(self, target: Target) -> Any:
        """What was saved at a target, nested as it was."""
        below = self._names(target)
        leaves: dict[str, Any] = {}
        if target.maker is not None:
            leaves.update((n, self.fresh[n]) for n in below if n in self.fresh)
            target.maker.assemble(leaves)
        leaves.update(
            (n, values.decoded(self.saved.values[n], n, self.checkpoint.path)) for n in below if n in self.saved.values
        )
        containers = {n: self.containers[n] for n in below if n in self.containers and n not in leaves}
        root = "r"
        tree = nest(
            {root + n[len(target.path) :]: v for n, v in leaves.items()},
            {root + n[len(target.path) :]: kind for n, kind in containers.items()},
        )
        return tree[root]


def _shares_elements(tensor: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
