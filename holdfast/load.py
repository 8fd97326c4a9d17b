"""The story of a load: open, match names, read what intersects, hand values back, settle.

Users and the manager call `load`. Never changes the target before every rank knows that everything fits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import monotonic
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from holdfast import events
from holdfast.checkpoint import Checkpoint, Patterns, matches, near, open_checkpoint
from holdfast.engine.memory import no_collection
from holdfast.engine.ranges import Verify
from holdfast.engine.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.engine.read import Wanted
from holdfast.engine.sections import dropped_of, left_of
from holdfast.engine.share import Choice, How, Offer, Sharing, who_shares
from holdfast.engine.spread import WHOLE, Spread
from holdfast.engine.state import Collected, Entry, Saved, Slot, collect
from holdfast.engine.state.ids import names_for_ids, optimizers_of
from holdfast.engine.state.per_rank import choose, no_rule
from holdfast.engine.state.structure import heard, unlike
from holdfast.engine.still import wait_for_copies
from holdfast.engine.stores.around import cached, hedged, patiently
from holdfast.engine.stores.place import Place
from holdfast.engine.stores.urls import location
from holdfast.errors import Mismatch, StorageError
from holdfast.keys import Keys
from holdfast.nested import nest
from holdfast.ondisk import dtypes, names, values
from holdfast.ondisk.box import whole
from holdfast.ondisk.manifest import FORMAT, TensorRecord
from holdfast.ondisk.values import JSON

Rename = Mapping[str, str] | Callable[[str], str]
_SHOWN = 200


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


def load(
    path: str | os.PathLike[str] | Place, into: dict[str, Any], *, only: Patterns = "*", rename: Rename | None = None,
    cast: bool = False, missing: Literal["error", "keep"] = "error", verify: Verify = True,
    cache: str | os.PathLike[str] | None = None, share: How = "auto", group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE, require: Keys | None = None,
    run: str | None = None, other_model: bool = False,
) -> Loaded:  # fmt: skip
    """Load the checkpoint at ``path`` into the objects and tensors of ``into``, in place, on any mesh or none.

    Called by every rank of ``group``; each reads only the bytes that its own shards need, and ranks that need the same
    bytes read them once. Strict: every name of ``into`` must be in the checkpoint and the other way round, with equal
    shapes and dtypes.

    ``path`` may be a checkpoint of another library too (docs/formats.md): what it holds under first keys that
    ``into`` lacks is skipped, and optimizer state under integer ids goes by the order of the live parameters.

    ``only``: patterns over names (``"model"``, ``"model/*.weight"``); the rest is left alone on both sides.
    ``rename``: saved names to names of ``into``: a mapping of names or leading paths, or a function.
    ``cast``: convert where dtypes differ. ``missing="keep"``: what the checkpoint lacks stays as it is.
    ``verify``: True checks the sums of all blocks read whole; ``"blocks"`` reads blocks whole to check all;
    False checks none. ``cache``: for a path in a store, a folder on the node's own disk in which its ranks share what
    they have fetched, so that a node fetches each byte once and a second start fetches nothing (see docs/stores.md).
    ``share``: ``"off"`` lets every rank read all that it needs by itself (see docs/loading.md).
    ``require``: public keys, one of which must have signed the checkpoint: then every block that is wanted is read
    whole and proved to be what was signed (see docs/signing.md).

    ``run``: the run that the checkpoint has to be of (16 hex digits, `Checkpoint.run`). ``other_model``: load into
    layers of another kind too, whose tensors have the same names and shapes (see docs/never-mix.md).

    Raises on every rank the same: Mismatch listing every name that does not fit (nothing was changed),
    NotACheckpoint, Damaged (names file and tensor), Untrusted, Unsupported, StorageError, RankLost.
    """
    if require is not None and verify is False:
        raise ValueError("require= has every byte checked that is used: leave out verify=False, or require=")
    if missing not in ("error", "keep"):
        raise ValueError(f'missing is "error" or "keep", not {missing!r}')
    if share not in ("auto", "off"):
        raise ValueError(f'share is "auto" or "off", not {share!r}')
    source = patiently(hedged(location(path)), deadline)
    label = f"load {source}"
    if cache is not None:
        source = cached(source, cache)
    ranks = ranks_of(group)

    def opening() -> Checkpoint:
        events.reached("open", source, ranks.rank)
        return open_checkpoint(source, require=require)

    return load_opened(
        opening, into, label, ranks, only=only, rename=rename, cast=cast, missing=missing, verify=verify, share=share,
        deadline=deadline, run=run, other_model=other_model,
    )  # fmt: skip


def load_opened(
    opening: Callable[[], Checkpoint], into: dict[str, Any], label: str, ranks: Ranks, *, only: Patterns = "*",
    rename: Rename | None = None, cast: bool = False, missing: Literal["error", "keep"] = "error",
    verify: Verify = True, share: How = "auto", deadline: float = DEADLINE, run: str | None = None,
    other_model: bool = False,
) -> Loaded:  # fmt: skip
    """`load` of what ``opening`` opens on each rank; all ranks call it the same ``label``."""
    began, where = monotonic(), label.removeprefix("load ")

    def span(name: str, *, whole: bool = False) -> AbstractContextManager[events.Opened]:
        return events.span(name, where, ranks.rank, whole=whole)

    with span("load", whole=True) as all_of_it, no_collection(), ranks.call(label, deadline=deadline) as call:
        match: list[Match] = []

        def compare() -> _Fit:
            with span("open"):
                checkpoint = opening()
            of_run(checkpoint, run)
            asked = _asked(checkpoint, only, into)
            target, values = named_ids(checkpoint, _target_names(rename), into)
            saved = saved_names(checkpoint, target, values, asked)
            found = Match(checkpoint, target, saved, asked, cast, collect(into, ranks, saved))
            match.append(found)
            fit = found.compare(keep=missing == "keep", world_size=ranks.size)
            if rename is None and checkpoint.format == FORMAT and not other_model:
                fit.misfits += unlike(heard(checkpoint.manifest.producer), found.state.kinds, asked)
            if share == "auto":
                fit.offer = found.sharing(ranks).offer(found.spreads)
            events.reached("match", checkpoint.path, ranks.rank)
            return fit

        with span("match"):
            choice = call.exchange("match", compare, _judge, Choice)
            work = match[0]
            sharing = work.sharing(ranks)
            sharing.agree(call, choice)
        with span("copy wait"):
            wait_for_copies()  # a save in the background still reads what would change here
        restore(call, work, sharing, where, verify=verify)
        all_of_it.nbytes = work.loaded.bytes_read + work.loaded.bytes_received
    events.reached("loaded", work.checkpoint.path, ranks.rank)
    work.loaded.seconds = monotonic() - began
    return work.loaded


def restore(call: Call, match: Match, sharing: Sharing, where: object, *, verify: Verify) -> None:
    """Read what was matched and hand it back, on every rank; spans call it ``where``. Raises what every rank raises."""
    rank, settling = sharing.ranks.rank, events.Opened()

    def work() -> Came:
        nonlocal settling
        with events.span("read", where, rank) as reading:
            took = match.read(verify, sharing)
            reading.nbytes = match.loaded.bytes_read + match.loaded.bytes_received
        if took.whole:
            with events.span("fill", where, rank):
                match.fill(sharing)
        settling = events.begin("settle", where, rank)
        return took

    try:
        call.settle("read", work, came, bool)
    finally:
        settling.end()
        sharing.close()


def of_run(checkpoint: Checkpoint, run: str | None) -> None:
    """Raise Mismatch if a checkpoint is not of the run that it has to be of."""
    if run is not None and checkpoint.run != run:
        raise Mismatch(
            f"{checkpoint.path} is of run {checkpoint.run or 'none'}, not of {run}; nothing was changed. Leave out "
            "run= to load it all the same"
        )


class _Fit(msgspec.Struct, array_like=True):
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


def came(notes: list[Came]) -> bool:
    """On the first rank, if none failed: raise StorageError unless all have all."""
    for rank, note in enumerate(notes):
        if not note.whole:
            raise StorageError(
                f"rank {rank} lost the ranks that it shared reading with ({note.why or 'one of them stopped'}): "
                'load again, or with share="off"'
            )
    return True


def _judge(fits: list[_Fit]) -> Choice:
    """On the first rank: raise Mismatch with every name of every rank, unless all fits; else who may share reading."""
    joint = fits[0].unclaimed
    for fit in fits[1:]:
        # A name is left over only if no rank asked for it: a pipeline stage asks for its own layers alone.
        joint = bytes(a & b for a, b in zip(joint, fit.unclaimed, strict=True))
    extra = [name for i, name in enumerate(fits[0].names) if joint[i // 8] >> (i % 8) & 1]
    missing = list(dict.fromkeys(name for fit in fits for name in fit.missing))
    misfits = list(dict.fromkeys(text for fit in fits for text in fit.misfits))
    if not (extra or missing or misfits):
        return who_shares([fit.offer for fit in fits])
    text = [f"{fits[0].where} does not fit what it is loaded into; nothing was changed."]
    if misfits:
        text.append(f"{len(misfits)} differ:" + _listed(misfits))
    if missing:
        text.append(
            f'{len(missing)} missing from the checkpoint (missing="keep" leaves them as they are):'
            + _listed([name + near(name, extra or fits[0].names) for name in missing])
        )
    if extra:
        text.append(
            f"{len(extra)} in the checkpoint that nothing asks for (only= leaves them out, rename= maps them):"
            + _listed([name + near(name, missing) for name in extra])
        )
    raise Mismatch("\n".join(text))


def _listed(items: list[str]) -> str:
    shown = "".join(f"\n    {item}" for item in items[:_SHOWN])
    return shown + (f"\n    … and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _target_names(rename: Rename | None) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    table = sorted(rename.items(), key=lambda item: -len(item[0]))

    def renamed(name: str) -> str:
        for old, new in table:
            if names.under(name, old.rstrip("/")):
                return new.rstrip("/") + name[len(old.rstrip("/")) :]
        return name

    return renamed


def _asked(checkpoint: Checkpoint, only: Patterns, into: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a name, as the target calls it, is to be loaded."""
    if checkpoint.format == FORMAT or only != "*":
        return lambda name: matches(name, only)
    # Other trainers keep much that no object here could take (their timers, their arguments): of a foreign
    # checkpoint what the target has no section for is skipped, and listed as skipped.
    sections = {names.escape(key) for key in into if isinstance(key, str)}
    return lambda name: name.partition("/")[0] in sections


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

    def compare(self, *, keep: bool, world_size: int) -> _Fit:
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
        return _Fit(_where(self.checkpoint), everything, bytes(bits), missing, misfits)

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
                        tensor = torch.empty(record.shape, dtype=dtypes.torch_dtype(record.dtype))
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
