"""The story of a load: open, match names, read what intersects, hand values back, settle.

Users and the manager call `load`. Never changes the target before every rank knows that everything fits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.still import wait_for_copies
from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.errors import Mismatch, StorageError
from holdfast.matching.loaded import Loaded
from holdfast.matching.match import Came, Fit, Match, named_ids, saved_names
from holdfast.ondisk import names
from holdfast.ondisk.manifest import FORMAT
from holdfast.ondisk.patterns import (
    Patterns,
    Rename,
    asked_in_target,
    check_rename,
    names_in,
    near,
    renamer,
    unfit_in_load,
)
from holdfast.policies.signing.keys import Keys
from holdfast.ranks.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.read.ranges import Verify
from holdfast.read.shared.share import Choice, How, Sharing, who_shares
from holdfast.state import Collected, collect
from holdfast.state.fresh import plain_tensors
from holdfast.state.layers import heard, unlike
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.around import cached, hedged, patiently

__all__ = ["Loaded", "load", "load_opened", "of_run", "restore"]

_SHOWN = 200


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

    ``only``: what to load, by the names that the checkpoint has: a name, a path above names, a pattern, or several
    (``"model"``, ``"model/*.weight"``); the rest is left alone on both sides. Each must fit a name of the checkpoint,
    or one that ``into`` has and the checkpoint lacks. ``rename``: names of the checkpoint to names of ``into``: a
    mapping of names or leading paths, each of which must be there, or a function.
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

    with (
        span("load", whole=True) as all_of_it, no_collection(), plain_tensors(),
        ranks.call(label, deadline=deadline) as call,
    ):  # fmt: skip
        match: list[Match] = []

        def compare() -> Fit:
            with span("open"):
                checkpoint = opening()
            of_run(checkpoint, run)
            known = names_in(checkpoint.manifest)
            check_rename(rename, known, checkpoint.path)
            target, values = named_ids(checkpoint, renamer(rename), into)
            renamed = {} if only == "*" else {name: target(name) for name in known}
            asked = _asked(checkpoint, only, rename, renamed, into)
            saved = saved_names(checkpoint, target, values, asked)
            found = Match(checkpoint, target, saved, asked, cast, collect(into, ranks, saved))
            match.append(found)
            fit = found.compare(keep=missing == "keep", world_size=ranks.size)
            if only != "*":
                fit.unfit, fit.awaited = unfit_in_load(only, rename, renamed, _own_names(found.state, into))
            if rename is None and checkpoint.format == FORMAT and not other_model:
                fit.misfits += unlike(heard(checkpoint.manifest.producer), found.state.kinds, asked)
            if share == "auto":
                fit.offer = found.sharing(ranks).offer(found.spreads)
            events.reached("match", checkpoint.path, ranks.rank)
            return fit

        with span("match"):
            verdict = call.exchange("match", compare, _judge, _Verdict)
            work = match[0]
            sharing = work.sharing(ranks)
            sharing.agree(call, verdict.choice)
        with span("copy wait"):
            wait_for_copies()  # a save in the background still reads what would change here
        if verdict.early:
            _hand_over_early(call, work, verify)
        restore(call, work, sharing, where, verify=verify)
        all_of_it.nbytes = work.loaded.bytes_read + work.loaded.bytes_received
    events.reached("loaded", work.checkpoint.path, ranks.rank)
    work.loaded.seconds = monotonic() - began
    return work.loaded


def _hand_over_early(call: Call, match: Match, verify: Verify) -> None:
    """Let objects take their state by methods of their own, on every rank. If one refuses it all get theirs back."""
    undo: list[Callable[[], None]] = []

    def hand_over() -> bool:
        undo.extend(match.hand_over_early(verify))
        return True

    try:
        call.settle("objects", hand_over, lambda notes: True, bool)
    except BaseException:
        for back in reversed(undo):
            try:
                back()
            except Exception as error:  # noqa: BLE001 - an object that refuses its own state as well
                events.log.warning("an object could not be given back the state that it had: %s", error)
        raise


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


def came(notes: list[Came]) -> bool:
    """On the first rank, if none failed: raise StorageError unless all have all."""
    for rank, note in enumerate(notes):
        if not note.whole:
            raise StorageError(
                f"rank {rank} lost the ranks that it shared reading with ({note.why or 'one of them stopped'}): "
                'load again, or with share="off"'
            )
    return True


class _Verdict(msgspec.Struct, array_like=True):
    """What the first rank makes of all fits: who shares reading, and whether objects of any rank are told early."""

    choice: Choice
    early: bool


def _judge(fits: list[Fit]) -> _Verdict:
    """On the first rank: raise Mismatch with every name of every rank, unless all fits; else who may share reading."""
    joint = fits[0].unclaimed
    for fit in fits[1:]:
        # A name is left over only if no rank asked for it: a pipeline stage asks for its own layers alone.
        joint = bytes(a & b for a, b in zip(joint, fit.unclaimed, strict=True))
    extra = [name for i, name in enumerate(fits[0].names) if joint[i // 8] >> (i % 8) & 1]
    missing = list(dict.fromkeys(name for fit in fits for name in fit.missing))
    misfits = list(dict.fromkeys(text for fit in fits for text in fit.misfits))
    awaited = {pattern for fit in fits for pattern in fit.awaited}
    unfit = {pattern: text for fit in fits for pattern, text in fit.unfit.items() if pattern not in awaited}
    if not (unfit or extra or missing or misfits):
        return _Verdict(who_shares([fit.offer for fit in fits]), any(fit.early for fit in fits))
    text = [f"{fits[0].where} does not fit what it is loaded into; nothing was changed."]
    if unfit:
        text.append(
            "only= fits nothing in the checkpoint (holdfast show lists its names):" + _listed(list(unfit.values()))
        )
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


def _own_names(state: Collected, into: Mapping[str, Any]) -> set[str]:
    """The names of all that the target has, and of places that may be empty: its first keys, optimizers' states."""
    paths = (target.path for target in state.handback.targets)
    keys = (names.escape(key) for key in into if isinstance(key, str))
    states = (names.child(path, "state") for path in state.groups)
    return {*state.entries, *state.values, *state.owned, *state.per_rank, *paths, *keys, *states}


def _asked(
    checkpoint: Checkpoint, only: Patterns, rename: Rename | None, renamed: Mapping[str, str], into: Mapping[str, Any]
) -> Callable[[str], bool]:
    """Whether a name, as the target calls it, is to be loaded."""
    if checkpoint.format == FORMAT or only != "*":
        return asked_in_target(only, rename, renamed)
    # Other trainers keep much that no object here could take (their timers, their arguments): of a foreign
    # checkpoint what the target has no section for is skipped, and listed as skipped.
    sections = {names.escape(key) for key in into if isinstance(key, str)}
    return lambda name: name.partition("/")[0] in sections
