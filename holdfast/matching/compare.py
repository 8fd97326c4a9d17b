"""A checkpoint compared with one rank's target, name by name: what the load will read, and what stands against it.

`load` and torch's calls call `compare`. Changes nothing, and reads only tensors that must be equal already: names that
are one tensor here, and what nothing can take back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.matching.differences import UNLIKE_SHAPE, Differences, Loaded, described
from holdfast.matching.names import Names, leaves_of, tree_of
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.plan.spread import Spread
from holdfast.read.wanted import Wanted
from holdfast.state import Collected, Entry, Target
from holdfast.state.leaves import View
from holdfast.state.per_rank import no_rule

MOST_EARLY = 64 << 20
"""Bytes of objects that each rank reads before anything is changed; of more, they are read with all the rest."""


@dataclass(frozen=True)
class Batch:
    """What is restored at one time: ``targets`` that are handed values, and the boxes that are read before.

    ``spreads``: how the tensor of each box lies over the ranks.
    """

    targets: list[Target] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)

    def __add__(self, other: Batch) -> Batch:
        return Batch(self.targets + other.targets, self.wanted + other.wanted, self.spreads + other.spreads)


@dataclass(frozen=True)
class Matched:
    """What a load will do on one rank: read these boxes and hand back these values.

    ``early`` is for objects that take their state by a method that may refuse it, before anything else is changed;
    ``rest`` is for all others. ``fresh``: new tensors for objects, by name. ``claimed``: what the target has a place
    for. ``report``: what will have been restored.
    """

    names: Names
    state: Collected
    early: Batch
    rest: Batch
    fresh: dict[str, Any]
    claimed: set[str]
    report: Loaded

    @property
    def checkpoint(self) -> Checkpoint:
        return self.names.checkpoint


def compare(
    names: Names, state: Collected, *, cast: bool, keep: bool, world_size: int, early: bool = True
) -> tuple[Matched, Differences]:  # fmt: skip
    """Compare every leaf of the target with the checkpoint; nothing is changed.

    With ``early``, objects with methods of their own get a batch of their own, if what they take is not large.
    """
    return _Comparison(names, state, cast).run(keep=keep, world_size=world_size, early=early)


@dataclass
class _Comparison:
    names: Names
    state: Collected
    cast: bool
    early: Batch = field(default_factory=Batch)
    rest: Batch = field(default_factory=Batch)
    fresh: dict[str, Any] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    restored: list[str] = field(default_factory=list)
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    castable: bool = False

    def run(self, *, keep: bool, world_size: int, early: bool) -> tuple[Matched, Differences]:
        names, state, asked = self.names, self.state, self.names.saved.asked
        self.tensors()
        for target in state.handback.targets:
            self.target(target)
        for name, tensor in state.handback.must_equal.items():
            self.constant(name, tensor)
        if not early or sum(want.nbytes for want in self.early.wanted) > MOST_EARLY:
            self.rest, self.early = self.rest + self.early, Batch()
        for path, leaf in state.per_rank.items():
            if path in names.per_rank:
                self.misfits += no_rule(path, leaf.elsewhere, names.checkpoint.world_size, world_size)
                self.claimed.add(path)
                self.restored.append(path)
            elif asked(path):
                self.missing.append(path)
        report = Loaded(
            names.checkpoint, self.restored, names.skipped, kept=self.missing if keep else [],
            cleared=[] if keep else [name for name in state.handback.clears if asked(name)], cast=self.casts,
            renamed=names.renamed,
        )  # fmt: skip
        matched = Matched(names, state, self.early, self.rest, self.fresh, self.claimed, report)
        everything, missing = names.asked_for, [] if keep else self.missing
        return matched, Differences(
            described(names.checkpoint), everything, self._unclaimed(everything), missing, self.misfits,
            self._shapes(missing), self.castable,
        )  # fmt: skip

    def _shapes(self, missing: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """What tells which saved tensor a missing one may be; nothing if none is missing."""
        if not missing:
            return {}
        saved, entries = self.names.saved.tensors, self.state.entries
        unclaimed = {name: shape for name, (_, shape) in saved.items() if name not in self.claimed}
        return unclaimed | {name: entries[name].shape for name in missing if name in entries}

    def _unclaimed(self, everything: list[str]) -> bytes:
        bits = bytearray(-(-len(everything) // 8))
        for i, name in enumerate(everything):
            if name not in self.claimed:
                bits[i // 8] |= 1 << (i % 8)
        return bytes(bits)

    def tensors(self) -> None:
        """Match the tensors that are filled where they are."""
        saved, aliases = self.names.saved, self.state.aliases
        tied: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            tied.setdefault(name, [name]).append(alias)
        for name, entry in self.state.entries.items():
            if name in aliases or not saved.asked(name):
                continue
            if name in saved.tensors and name not in tied:  # most are
                self.claimed.add(name)
                self._tensor(name, entry)
                continue
            stored = [n for n in tied.get(name, ()) if n in saved.tensors]
            if not stored:
                self.missing.append(name)
                continue
            self.claimed.update(stored)
            if len(stored) > 1:
                self.misfits += self._untied(entry, stored)
            self._tensor(stored[0], entry)

    def _untied(self, entry: Entry, stored: Sequence[str]) -> Iterator[str]:
        """Of a tensor that is tied here: the names under which other numbers were saved."""
        names = self.names
        first = names.stored(stored[0])[0]
        boxes = [view.box for view in entry.views]
        for name in stored[1:]:
            if names.stored(name)[0] != first and not same_saved(
                names.checkpoint, names.sources[stored[0]], names.sources[name], boxes
            ):
                yield (
                    f"{name}: saved as another tensor than {stored[0]}, here both are one (tied); untie them, or leave "
                    "one out by only="
                )

    def _tensor(self, name: str, entry: Entry) -> None:
        if any(map(_shares_elements, entry.views)):
            if self._fits_shape(entry.name, self.names.saved.tensors[name][1], entry.shape):
                self.misfits.append(
                    f"{entry.name}: is an expanded tensor here, whose elements share memory; give a clone() of it"
                )
        elif self._fits(name, entry.name, entry.dtype, entry.shape):
            self.restored.append(entry.name)
            self._read(self.rest, name, [entry])

    def _fits_shape(self, own_name: str, shape: tuple[int, ...], own_shape: tuple[int, ...]) -> bool:
        if shape != own_shape:
            self.misfits.append(f"{own_name}: {UNLIKE_SHAPE} {list(shape)}, here {list(own_shape)}")
        return shape == own_shape

    def _fits(self, name: str, own_name: str, own_dtype: str, own_shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this dtype and shape takes the saved one, and note a cast."""
        dtype, shape = self.names.saved.tensors[name]
        if dtype == own_dtype and shape == own_shape:
            return True
        if not self._fits_shape(own_name, shape, own_shape):
            return False
        if not self.cast:
            self.misfits.append(f"{own_name}: saved as {dtype}, here {own_dtype} (cast=True converts)")
            self.castable = True
            return False
        self.casts[own_name] = (dtype, own_dtype)
        return True

    def _read(self, batch: Batch, name: str, entries: Iterable[Entry]) -> None:
        stored, record = self.names.stored(name)
        for entry in entries:
            for view in entry.views:
                batch.wanted.append(Wanted(stored, record, view.box, view.tensor))
                batch.spreads.append(entry.spread)

    def constant(self, name: str, tensor: torch.Tensor) -> None:
        """An entry of a module's state dict that nothing takes back: the saved one has to be what is there."""
        if name not in self.names.saved.tensors or not self.names.saved.asked(name):
            return
        self.claimed.add(name)
        if not same_as_saved(self.names.checkpoint, self.names.sources[name], tensor):
            self.misfits.append(
                f"{name}: saved with another value than it has here, and nothing takes it back: the module adds it to "
                "its state dict, but has neither a _load_from_state_dict nor a load hook that loads it"
            )

    def target(self, target: Target) -> None:
        """Match an object or a value that is handed what was saved at its path."""
        saved = self.names.saved
        self.missing += [name for name in target.needs if saved.asked(name) and not saved.has(name)]
        leaves = leaves_of(target, saved)
        if not leaves:
            if saved.asked(target.path) and not target.needs:
                self.missing.append(target.path)
            return
        batch = self.rest if target.undoing is None else self.early
        batch.targets.append(target)
        self.claimed.update(leaves)
        self.restored += [name for name in leaves if name in saved.values]
        if target.whole:
            for name in leaves:
                if name in saved.tensors:
                    self._make(batch, target, name)
        if target.check is not None:
            try:
                target.check(tree_of(target, saved, self.fresh, self.names.checkpoint.path))
            except Mismatch as error:
                self.misfits.append(str(error))

    def _make(self, batch: Batch, target: Target, name: str) -> None:
        """Memory for a tensor that an object takes whole."""
        dtype, shape = self.names.saved.tensors[name]
        own_dtype, own_shape = target.expects.get(name, (dtype, None))
        if not self._fits(name, name, own_dtype, shape if own_shape is None else own_shape):
            return
        self.names.checkpoint.prove([self.names.sources[name]])
        if target.maker is None:
            raise TypeError("a target that takes tensors has to make them")
        try:
            self.fresh[name], entries = target.maker.make(name, dtype, shape)
        except Mismatch as error:
            self.misfits.append(str(error))
            return
        self.restored.append(name)
        self._read(batch, name, entries)


def _shares_elements(view: View) -> bool:
    tensor = view.tensor
    return not tensor.is_contiguous() and any(
        n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


_PART = 16 << 20
"""Bytes of two tensors that are compared at a time."""


def same_saved(checkpoint: Checkpoint, one: str, other: str, boxes: Iterable[Box]) -> bool:
    """Whether two saved tensors are alike in these boxes."""
    first, second = checkpoint.records[one], checkpoint.records[other]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        same_bytes(_read(checkpoint, one, part), _read(checkpoint, other, part))
        for box in boxes
        for part in _parts(box, dtypes.itemsize(first.dtype))
    )


def same_as_saved(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is alike a present one."""
    return checkpoint.records[name].shape == tuple(tensor.shape) and same_bytes(checkpoint.read(name), tensor)


def _read(checkpoint: Checkpoint, name: str, box: Box) -> torch.Tensor:
    return checkpoint.read(name, list(zip(box.offsets, box.ends, strict=True)) or None)


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    if not box.lengths:
        yield box
        return
    step = max(1, _PART // max(box.size // max(box.lengths[0], 1) * itemsize, 1))
    for at in range(0, box.lengths[0], step):
        yield Box((box.offsets[0] + at, *box.offsets[1:]), (min(step, box.lengths[0] - at), *box.lengths[1:]))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes on this rank; a NaN is the same as itself."""
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    device = one.device if one.device == other.device else torch.device("cpu")
    first, second = (t.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)
