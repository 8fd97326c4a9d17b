"""The story of a load: open, match names, read what intersects, hand values back.

Users and the manager call `load`. Never changes the target before every rank knows that everything fits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeVar

import msgspec
import torch.distributed as dist

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.stable import wait_for_copies
from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.errors import Damaged, Mismatch, StorageError
from holdfast.matching.compare import Matched, compare
from holdfast.matching.differences import Loaded
from holdfast.matching.hand_back import Filled, hand_back, hand_over_early
from holdfast.matching.names import asked_of, names_of, own_names, with_named_ids
from holdfast.matching.verdict import RankNote, Verdict, judge
from holdfast.ondisk.arguments import PATH, PATTERNS, SECONDS, STATE, VERIFY, check, one_of
from holdfast.ondisk.manifest import FORMAT
from holdfast.ondisk.patterns import Patterns, Rename, check_rename, names_in, renamer, unfit_in_load
from holdfast.policies.signing.keys import Keys
from holdfast.ranks.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.read.ranges import Verify
from holdfast.read.shared import share as sharing
from holdfast.read.shared.demand import Demand, demand_of
from holdfast.read.source import ReadStats
from holdfast.remap.remap import Remap
from holdfast.remap.remapped import Remapped
from holdfast.state import collect
from holdfast.state.fresh import plain_tensors
from holdfast.state.layers import decode_kinds, unlike
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_cache, with_deadline, with_hedging

__all__ = ["Loaded", "Options", "load", "load_from", "load_opened", "restore"]

PARTLY_FILLED = "; the state may be filled in part: load again before you use it"
"""How the text of an error ends that is raised while bytes go into the target."""

Value = TypeVar("Value")
Note = TypeVar("Note")
Answer = TypeVar("Answer")


def load(
    path: str | os.PathLike[str] | Place, into: dict[str, Any], *, only: Patterns = "*", rename: Rename | None = None,
    cast: bool = False, missing: Literal["error", "keep"] = "error", verify: Verify = True,
    cache: str | os.PathLike[str] | None = None, share: sharing.How = "auto", group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE, require: Keys | None = None,
    run: str | None = None, other_model: bool = False, remap: Remap | None = None,
) -> Loaded:  # fmt: skip
    """Load the checkpoint at ``path`` into the objects and tensors of ``into``, in place, on any mesh or none.

    Every rank of ``group`` calls it. Each reads only the bytes that its own shards need, and ranks that need the same
    bytes read them once. Loading is strict: every name of ``into`` has to be in the checkpoint and the other way round,
    with equal shapes and dtypes. Of a checkpoint of another library (docs/formats.md), what lies under first keys that
    ``into`` lacks is skipped, and optimizer state under integer ids goes by the order of the live parameters.

    Args:
        path: A folder, a file, a URL, or a place from `holdfast.storage.at`.
        into: A nested dict of modules, optimizers, tensors and values, as for `save`.
        only: What to load, by the names in the checkpoint: a name, a path above names, a pattern, or several, such as
            ``["model", "optimizer/state/*"]``. The rest is left alone on both sides.
        rename: Names of the checkpoint to names of ``into``: a dict of names or leading paths, or a function.
        cast: Convert tensors whose dtypes differ.
        missing: ``"keep"`` leaves what the checkpoint lacks as it is; ``"error"`` raises Mismatch.
        verify: True checks the sums of all blocks that are read whole. ``"blocks"`` reads blocks whole to check all of
            them. False checks none.
        cache: For a path in a store, a folder on the node's disk in which its ranks share what they have fetched.
        share: ``"off"`` lets every rank read all that it needs by itself; see docs/loading.md.
        group: The ranks that load; by default the default process group, or this process alone without one.
        deadline: Seconds to wait for a rank or a store that makes no progress.
        require: Public keys, one of which must have signed the checkpoint; see docs/security.md.
        run: The run that the checkpoint has to be of (`Checkpoint.run`).
        other_model: Load into layers of another kind too, if their tensors have the same names and shapes.
        remap: A map from the checkpoint's layout to that of ``into`` (`holdfast.remap`). Each rank still reads only
            what its own shards are made of. ``only`` and ``rename`` go by the names that it makes.

    Returns:
        What was loaded, what was left out, and how many bytes were read.

    Raises:
        Mismatch: Names, shapes or dtypes do not fit; it lists all of them. Nothing was changed.
        NotACheckpoint: There is no checkpoint; it says what is there instead.
        Damaged: Bytes are not what was written; it names the file and the tensor, and says so if ``into`` may be filled
            in part.
        Untrusted: The checkpoint is not signed as ``require`` says.
        Unsupported: The format version or a dtype is not known here.
        StorageError: The disk or the store refused; it says so if ``into`` may be filled in part.
        RankLost: A rank did not come.

    Example:
        >>> loaded = holdfast.load("/ckpt/step-7", {"model": model}, only="model")
        >>> loaded.step
        7
    """
    check({"path": PATH, "into": STATE, "deadline": SECONDS}, {"path": path, "into": into, "deadline": deadline})
    if require is not None and verify is False:
        raise ValueError("require= has every byte checked that is used: leave out verify=False, or require=")
    options = Options(only, rename, cast, missing, verify, share, run, other_model)
    return load_from(path, into, options, cache=cache, group=group, deadline=deadline, require=require, remap=remap)


def load_from(
    path: str | os.PathLike[str] | Place, into: dict[str, Any], options: Options, *,
    cache: str | os.PathLike[str] | None = None, group: dist.ProcessGroup | None = None, deadline: float = DEADLINE,
    require: Keys | None = None, remap: Remap | None = None,
) -> Loaded:  # fmt: skip
    """`load` with options that were checked."""
    source = with_deadline(with_hedging(location(path)), deadline)
    label = f"load {source}"
    if cache is not None:
        source = with_cache(source, cache)
    ranks = ranks_of(group)

    def opening() -> Checkpoint:
        events.reached("open", source, ranks.rank)
        return open_checkpoint(source, require=require, remap=remap)

    return load_opened(opening, into, label, ranks, options, deadline=deadline)


_TAKES = {
    "only": PATTERNS, "missing": one_of("error", "keep"), "verify": VERIFY, "share": one_of("auto", "off"),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What is asked of a load; see `load`. ``advice``: what its caller adds to a Mismatch that names such options."""

    only: Patterns = "*"
    rename: Rename | None = None
    cast: bool = False
    missing: Literal["error", "keep"] = "error"
    verify: Verify = True
    share: sharing.How = "auto"
    run: str | None = None
    other_model: bool = False
    advice: str = ""

    def __post_init__(self) -> None:
        check(_TAKES, vars(self))


def load_opened(
    opening: Callable[[], Checkpoint], into: dict[str, Any], label: str, ranks: Ranks, options: Options, *,
    deadline: float = DEADLINE,
) -> Loaded:  # fmt: skip
    """`load` of what ``opening`` opens on each rank; all ranks give it the same ``label``.

    `open_and_match` opens a Checkpoint and makes a Matched of it, `restore` a Filled and a Loaded. Each is a meeting of
    all ranks: what fails on one is raised on every one.
    """
    began, where = monotonic(), label.removeprefix("load ")
    with (
        events.span("load", where, ranks.rank, whole=True) as whole, no_collection(), plain_tensors(),
        ranks.call(label, deadline=deadline) as call,
    ):  # fmt: skip
        loaded = _load_in(call, opening, into, where, options)  # its boxes are gone before the collector looks again
        whole.nbytes = loaded.bytes_read + loaded.bytes_received
    events.reached("loaded", loaded.checkpoint.path, ranks.rank)
    return replace(loaded, seconds=monotonic() - began)


def _load_in(
    call: Call, opening: Callable[[], Checkpoint], into: dict[str, Any], where: str, options: Options
) -> Loaded:  # fmt: skip
    with events.span("match", where, call.ranks.rank):
        work = partial(open_and_match, opening, into, options, call.ranks, where)
        (matched, demand), verdict = keeping(call, "match", work, partial(judge, advice=options.advice), Verdict)
        shared = sharing.agree(call, demand, verdict.choice)
    with closing(shared):
        with events.span("copy wait", where, call.ranks.rank):
            wait_for_copies()  # a save in the background still reads what would change here
        early = _hand_over_early(call, matched, options.verify) if verdict.early else ReadStats()
        return restore(call, matched, shared, where, verify=options.verify, early=early)


def open_and_match(
    opening: Callable[[], Checkpoint], into: dict[str, Any], options: Options, ranks: Ranks, where: str
) -> tuple[tuple[Matched, Demand], RankNote]:
    """Open the checkpoint and compare it with the target; nothing is changed. With a note for the other ranks."""
    with events.span("open", where, ranks.rank):
        checkpoint = opening()
    if options.run is not None and checkpoint.run != options.run:
        raise Mismatch(
            f"{checkpoint.path} is of run {checkpoint.run or 'none'}, not of {options.run}; nothing was changed. Leave "
            "out run= to load it all the same"
        )
    known = names_in(checkpoint.manifest)
    check_rename(options.rename, known, checkpoint.path)
    called, values = with_named_ids(checkpoint, renamer(options.rename, known), into)
    renamed = {} if options.only == "*" else {name: called(name) for name in known}
    asked = asked_of(checkpoint, options.only, options.rename, renamed, into)
    if isinstance(checkpoint.reader, Remapped):
        checkpoint.reader.check_mapped(asked)
    names = names_of(checkpoint, called, values, asked)
    state, keep = collect(into, ranks, names.saved), options.missing == "keep"
    matched, differences = compare(names, state, cast=options.cast, keep=keep, world_size=ranks.size)
    note = RankNote(differences, early=bool(matched.early.targets), commit=checkpoint.path.commit)
    if options.only != "*":
        note.unfit, note.awaited = unfit_in_load(options.only, options.rename, renamed, own_names(state, into))
    as_saved = options.rename is None and checkpoint.remap is None
    if as_saved and checkpoint.format == FORMAT and not options.other_model:
        differences.misfits.extend(unlike(decode_kinds(checkpoint.manifest.producer), state.kinds, asked))
    demand = demand_of(
        matched.rest.wanted, matched.rest.spreads, checkpoint.manifest, ranks.rank,
        shares=options.share == "auto" and ranks.size > 1, files=None if checkpoint.remap is None else checkpoint.files,
    )  # fmt: skip
    note.offer = sharing.offer(demand, ranks, checkpoint.files)
    events.reached("match", checkpoint.path, ranks.rank)
    return (matched, demand), note


def restore(
    call: Call, matched: Matched, shared: sharing.Sharing, where: object, *, verify: Verify,
    early: ReadStats | None = None,
) -> Loaded:  # fmt: skip
    """Read what was matched and hand it back, on every rank, and raise what every rank raises; spans name ``where``."""
    rank, settling = call.ranks.rank, events.Opened()

    def read_and_hand_back() -> tuple[Loaded, _End]:
        nonlocal settling
        with events.span("read", where, rank) as reading:
            filled = _read(matched, shared, verify, rank, early or ReadStats())
            reading.nbytes = filled.report.bytes_read + filled.report.bytes_received
        loaded = filled.report
        if not filled.stopped:
            with events.span("fill", where, rank):
                loaded = hand_back(filled, call.ranks)
        settling = events.begin("settle", where, rank)
        return loaded, _End(filled.stopped, filled.why)

    try:
        return keeping(call, "read", read_and_hand_back, _all_ended, bool)[0]
    except (Damaged, StorageError) as error:  # the ranks have met: it is the same on every one, and so is what is added
        error.args = (f"{error}{PARTLY_FILLED}",)
        raise
    finally:
        settling.end()


def _read(matched: Matched, shared: sharing.Sharing, verify: Verify, rank: int, early: ReadStats) -> Filled:
    """Read every wanted byte, unless another rank fails meanwhile."""
    checkpoint = matched.checkpoint
    events.reached("read", checkpoint.path, rank)
    with events.task("load", str(checkpoint.path), rank, part=True) as task:
        task.total = shared.demand.nbytes
        outcome = shared.read(checkpoint.files, checkpoint.reader.verifying(verify), task.advance)
    stats = outcome.stats
    if outcome.stopped or outcome.lost:
        stats = ReadStats()
    elif stats.unverified and verify is True:
        events.log.debug("%d bytes of blocks read in part were not verified", stats.unverified)
    report = replace(
        matched.report, bytes_needed=early.needed + stats.needed, bytes_read=early.read + stats.read,
        bytes_received=outcome.received, bytes_unverified=early.unverified + stats.unverified,
    )  # fmt: skip
    return Filled(matched, report, outcome.stopped or bool(outcome.lost), outcome.lost)


def _hand_over_early(call: Call, matched: Matched, verify: Verify) -> ReadStats:
    """Let objects take their state by methods of their own, on every rank. If one refuses it all get theirs back."""
    undo: list[Callable[[], None]] = []
    try:
        return keeping(call, "objects", lambda: (hand_over_early(matched, verify, undo), True), all, bool)[0]
    except BaseException:
        for back in reversed(undo):
            try:
                back()
            except Exception as error:  # noqa: BLE001 - an object that refuses its own state as well
                events.log.warning("an object could not be given back the state that it had: %s", error)
        raise


def keeping(
    call: Call, phase: str, work: Callable[[], tuple[Value, Note]], decide: Callable[[list[Note]], Answer],
    answer: type[Answer],
) -> tuple[Value, Answer]:  # fmt: skip
    """`Call.exchange` of work that makes a value beside its note: the value, which stays here, and the answer."""
    values: list[Value] = []

    def noted() -> Note:
        value, note = work()
        values.append(value)
        return note

    verdict = call.exchange(phase, noted, decide, answer)
    return values[0], verdict


class _End(msgspec.Struct, array_like=True):
    """How reading ended on a rank that did not fail: whether another one stopped it, and why."""

    stopped: bool
    why: str = ""


def _all_ended(ends: list[_End]) -> bool:
    """On the first rank, if none failed: raise StorageError unless all have all."""
    for rank, end in enumerate(ends):
        if end.stopped:
            raise StorageError(
                f"rank {rank} lost the ranks that it shared reading with ({end.why or 'one of them stopped'}): "
                'load again, or with share="off"'
            )
    return True
