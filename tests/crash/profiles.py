"""What of a `Trace` may be on disk after a power cut: a rule for each kind of file system, and the states it allows.

`states` walks over all prefixes of a trace. Where a rule leaves few choices all of them are made, where it leaves many
the corners (nothing, everything, all but one, one alone, each prefix) and a seeded sample. docs/crash-safety.md says
where the rules come from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tests.crash.model import Disk, Enter, Mark, Op, Size, Sync, SyncFolder, Trace, Tree, resized, written

SECTOR, PAGE = 512, 4096

STALE = bytes(range(1, 256)) * 17
"""What a block held before a file got it, and what may be seen of it."""


@dataclass(frozen=True)
class Profile:
    """One kind of file system.

    ``names`` says in which order changes of names and sizes become durable. ``"journal"``: in the order they were made,
    and any sync takes all before it along. ``"log"``: the same order, but a sync takes along only what was made before
    the last change of its own file or folder. ``"tree"``: in order, but what was synced may overtake the rest.
    ``"any"``: any of them, but for those that a sync of their folder has made durable. ``"at once"``: each before its
    call returns.

    ``torn``: the unit in which unsynced bytes are lost. ``size``: how a file looks whose new end was not written.
    ``"written"``: it ends where the bytes that are there end; ``"holes"``: zeros for what is missing; ``"stale"``: what
    the disk held there before; ``"any"``: any of these.
    """

    name: str
    names: str
    torn: int
    size: str


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ext4-ordered", "journal", SECTOR, "written"),
        Profile("ext4-writeback", "journal", SECTOR, "stale"),
        Profile("xfs", "log", SECTOR, "holes"),
        Profile("btrfs", "tree", PAGE, "written"),
        Profile("nfs", "at once", PAGE, "holes"),
        Profile("weak", "any", SECTOR, "any"),
    )
}


class State(NamedTuple):
    """One state of the disk after a cut: the operations before it, the rule that allows it, what is there."""

    cut: int
    profile: str
    tree: Tree


@dataclass(frozen=True)
class Limits:
    """How many choices are made at one cut of one profile: of names, of the bytes of one file, and in all."""

    names: int = 64
    bytes: int = 24
    states: int = 96


def states(
    trace: Trace, profile: Profile, limits: Limits = Limits(), seed: int = 0, *, every: int = 1, since: int = 0
) -> Iterator[State]:
    """States after all, then of each ``every``-th prefix down to ``since``; the same one may come more than once."""
    history = History(trace)
    for cut in range(len(trace.ops), since - 1, -every):
        chance = random.Random(f"{seed}/{profile.name}/{cut}")
        for kept, contents in _choices(history, cut, profile, limits, chance):
            yield State(cut, profile.name, history.tree(cut, kept, contents))


Contents = dict[int, bytes]


def _choices(
    history: History, cut: int, profile: Profile, limits: Limits, chance: random.Random
) -> Iterator[tuple[frozenset[int], Contents]]:
    names = list(history.names_kept(cut, profile, limits, chance))
    open_files = history.unsynced(cut)
    pairs: list[tuple[frozenset[int], Contents]] = []
    room = max(limits.states // max(len(names), 1), 3)
    for kept in names:
        variants = [history.variants(file, cut, kept, profile, limits, chance) for file in open_files]
        pairs += [(kept, dict(zip(open_files, found, strict=True))) for found in _some(variants, room, chance)]
    yield from pairs


def _some(variants: Sequence[Sequence[bytes]], most: int, chance: random.Random) -> Iterator[tuple[bytes, ...]]:
    """All combinations if they are few; else all first ones, all last ones, each one varied alone, and a sample."""
    count = 1
    for found in variants:
        count *= len(found)
    if count <= most:
        yield from product(*variants)
        return
    yield tuple(found[0] for found in variants)
    yield tuple(found[-1] for found in variants)
    for _ in range(most - 2):
        kind = chance.random()
        base = [found[0] if kind < 0.3 else found[-1] if kind < 0.6 else chance.choice(found) for found in variants]
        at = chance.randrange(len(variants))
        base[at] = chance.choice(variants[at])
        yield tuple(base)


class History:
    """A trace, looked up by file and folder."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._of_file: dict[int, list[int]] = {}
        self._entering: dict[int, list[int]] = {}  # by what is entered: a file or a folder
        for index, op in enumerate(trace.ops):
            if isinstance(op, (Size, Sync)) or (not isinstance(op, (Enter, SyncFolder, Mark))):
                self._of_file.setdefault(op.file, []).append(index)
            elif isinstance(op, Enter):
                for _, _, target in op.changes:
                    if target is not None:
                        self._entering.setdefault(target, []).append(index)
        self._full = lru_cache(maxsize=None)(self._content_at)

    # Names and sizes

    def names_kept(self, cut: int, profile: Profile, limits: Limits, chance: random.Random) -> Iterator[frozenset[int]]:
        """Sets of changes of names and sizes before the cut that may be durable."""
        ops = self.trace.ops
        changes = [i for i in range(cut) if isinstance(ops[i], (Enter, Size))]
        if profile.names == "at once":
            yield frozenset(changes)
            return
        if profile.names == "any":
            forced = {i for i in changes if self._forced(i, cut)}
            loose = [i for i in changes if i not in forced]
            for some in _subsets(loose, limits.names, chance):
                yield frozenset(forced | set(some))
            return
        least, forced = self._least(cut, profile)
        for length in range(least, cut + 1):
            if length == least or (isinstance(ops[length - 1], (Enter, Size))):
                yield frozenset(i for i in changes if i < length or i in forced)

    def _least(self, cut: int, profile: Profile) -> tuple[int, set[int]]:
        """Of a file system that keeps order: how long a prefix is durable at least, and what else is."""
        ops, least, forced = self.trace.ops, 0, set()
        for index in range(cut):
            op = ops[index]
            if not isinstance(op, (Sync, SyncFolder)):
                continue
            if profile.names == "journal":
                least = index + 1
            elif profile.names == "log":
                least = max(least, 1 + max((i for i in range(index) if _touches(ops[i], op)), default=-1))
            else:
                forced |= {i for i in range(index) if _touches(ops[i], op)} | self._ways(op, index)
        return least, forced

    def _ways(self, op: Sync | SyncFolder, before: int) -> set[int]:
        """What made the folders that lead to something that is synced: a new folder is logged with what is in it."""
        ops, found = self.trace.ops, set()
        at = [op.file if isinstance(op, Sync) else op.folder]
        while at:
            number = at.pop()
            for index in self._entering.get(number, ()):
                if index < before and index not in found:
                    found.add(index)
                    at += [folder for folder, _, target in ops[index].changes if target == number]
        return found

    def _forced(self, index: int, cut: int) -> bool:
        """Whether a change is durable because its own folder (or, if it is a size, its file) was synced after it."""
        op = self.trace.ops[index]
        for later in range(index + 1, cut):
            sync = self.trace.ops[later]
            if isinstance(op, Size):
                if isinstance(sync, Sync) and sync.file == op.file:
                    return True
            elif isinstance(sync, SyncFolder) and any(folder == sync.folder for folder, _, _ in op.changes):
                return True
        return False

    # Bytes

    def unsynced(self, cut: int) -> list[int]:
        """Files with bytes or sizes that no sync before the cut has made durable."""
        return [file for file in self._of_file if self._pending(file, cut)]

    def _pending(self, file: int, cut: int) -> list[int]:
        found: list[int] = []
        for index in self._of_file[file]:
            if index >= cut:
                break
            found = [] if isinstance(self.trace.ops[index], Sync) else [*found, index]
        return found

    def _content_at(self, file: int, cut: int) -> bytes:
        data = self.trace.start.files.get(file, b"")
        for index in self._of_file.get(file, ()):
            if index >= cut:
                break
            data = _applied(data, self.trace.ops[index])
        return data

    def variants(
        self, file: int, cut: int, kept: frozenset[int], profile: Profile, limits: Limits, chance: random.Random
    ) -> list[bytes]:
        """What a file may hold: nothing of what is not synced first, all of it last."""
        pending = self._pending(file, cut)
        base = self._full(file, pending[0])
        ops = self.trace.ops
        writes = [i for i in pending if not isinstance(ops[i], Size)]
        found: dict[bytes, None] = {}
        for there in _tears(writes, ops, profile.torn, limits.bytes, chance):
            for how in ("written", "holes", "stale") if profile.size == "any" else (profile.size,):
                found[_torn(base, pending, ops, there, kept, profile.torn, how)] = None
        return list(found)

    # The whole

    def tree(self, cut: int, kept: frozenset[int], contents: Contents) -> Tree:
        start = self.trace.start
        disk = Disk({n: dict(names) for n, names in start.folders.items()}, {})
        for number in self.trace.made_folders:
            disk.folders.setdefault(number, {})
        for index in sorted(kept):
            op = self.trace.ops[index]
            if isinstance(op, Enter):
                disk.apply(op)
        disk.files = _Files(lambda file: contents[file] if file in contents else self._full(file, cut))
        return disk.tree()


class _Files(dict[int, bytes]):
    """Contents that are worked out when they are asked for."""

    def __init__(self, content: Callable[[int], bytes]) -> None:
        super().__init__()
        self._content = content

    def __missing__(self, file: int) -> bytes:
        return self._content(file)


def _applied(data: bytes, op: Op) -> bytes:
    if isinstance(op, Size):
        return resized(data, op)
    if isinstance(op, (Sync, Enter, SyncFolder, Mark)):
        return data
    return written(data, op.offset, op.data)


def _touches(op: Op, sync: Sync | SyncFolder) -> bool:
    if isinstance(op, Size):
        return isinstance(sync, Sync) and sync.file == op.file
    if not isinstance(op, Enter):
        return False
    if isinstance(sync, Sync):
        return any(target == sync.file for _, _, target in op.changes)
    return any(sync.folder in (folder, target) for folder, _, target in op.changes)


def _subsets(items: Sequence[int], most: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    count = len(items)
    if 2**count <= most:
        for bits in product((False, True), repeat=count):
            yield tuple(item for item, bit in zip(items, bits, strict=True) if bit)
        return
    made: dict[tuple[int, ...], None] = {(): None, tuple(items): None}
    for at in range(count):
        made[tuple(items[:at])] = None
        made[tuple(items[at:])] = None
        made[(items[at],)] = None
        made[(*items[:at], *items[at + 1 :])] = None
    corners = list(made)
    if len(corners) > most:
        yield from [*corners[:2], *chance.sample(corners[2:], most - 2)]
        return
    for _ in range(most - len(corners)):
        likely = chance.choice((0.2, 0.5, 0.8))
        made[tuple(item for item in items if chance.random() < likely)] = None
    yield from made


There = dict[int, frozenset[int] | None]
"""By write, which of its units are there; None: all. A write that is not in it is lost."""


def _tears(writes: Sequence[int], ops: Sequence[Op], unit: int, most: int, chance: random.Random) -> Iterator[There]:
    """Nothing first, all last; in between whole writes lost, then writes torn."""
    yield {}
    for some in _subsets(writes, max(most // 2, 4), chance):
        if 0 < len(some) < len(writes):
            yield dict.fromkeys(some)
    torn = [(write, units) for write in writes if len(units := _units(ops[write], unit)) > 1]
    for write, units in torn:
        half = len(units) // 2
        cuts = [units[:half], units[half:], units[1:], units[:-1], units[::2]]
        cuts += [[u for u in units if chance.random() < 0.5] for _ in range(max(most // 4, 1))]
        for part in cuts:
            others: There = dict.fromkeys(w for w in writes if w != write)
            yield {**others, write: frozenset(part)}
            if others:
                yield {write: frozenset(part)}
    yield dict.fromkeys(writes)


def _units(op: Op, unit: int) -> list[int]:
    return list(range(op.offset // unit, -(-(op.offset + len(op.data)) // unit)))


def _torn(
    base: bytes, pending: Sequence[int], ops: Sequence[Op], there: There, kept: frozenset[int], unit: int, how: str
) -> bytes:
    """A file of which some writes, or units of them, are there."""
    data, full, covered = base, len(base), set(range(-(-len(base) // unit)))
    for index in pending:
        op = ops[index]
        if isinstance(op, Size):
            if index in kept:
                data = resized(data, op)
                full = max(full, len(data)) if op.grows else len(data)
                covered |= set(range(-(-len(data) // unit)))
            continue
        full = max(full, op.offset + len(op.data))
        if index not in there:
            continue
        some = there[index]
        for at in _units(op, unit):
            if some is None or at in some:
                begin, end = max(at * unit, op.offset), min((at + 1) * unit, op.offset + len(op.data))
                data = written(data, begin, op.data[begin - op.offset : end - op.offset])
                covered.add(at)
    if how == "written":  # the end is moved only when all before it is there
        run = 0
        while run in covered:
            run += 1
        return data[: min(len(data), run * unit)]
    if how == "stale":
        data = data.ljust(full, b"\0")
        for at in range(-(-full // unit)):
            if at not in covered:
                end = min((at + 1) * unit, full)
                data = written(data, at * unit, (STALE * (unit // len(STALE) + 1))[: end - at * unit])
        return data
    return data
