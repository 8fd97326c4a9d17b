"""The story of a save that training waits for: collect, plan, write what this rank owns, settle, commit.

Users and the manager call `save`. Never leaves a moment without a whole checkpoint, and never commits half of one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from operator import index
from time import monotonic
from typing import Any, Literal

import torch.distributed as dist

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.checkpoint import Checkpoint
from holdfast.commit.commit import Attached
from holdfast.commit.order import Order
from holdfast.commit.save_work import SaveWork
from holdfast.errors import Unsupported
from holdfast.ondisk.manifest import FORMAT, Manifest
from holdfast.ondisk.patterns import Patterns, matcher
from holdfast.policies.incremental.borrow import Previous
from holdfast.policies.signing.keys import Key, Signer, signer
from holdfast.ranks.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline
from holdfast.write.ring import Ring

RUN = secrets.token_hex(8)
"""Marks what this process saves as one run's."""

Base = str | os.PathLike[str] | Place | Checkpoint
"""What a save may cite: the path of a checkpoint, or the checkpoint."""


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str] | Place, *, overwrite: bool = False,
    step: int | None = None, base: Base | Previous | None = None,
    files: Attached | None = None, group: dist.ProcessGroup | Ranks | None = None,
    deadline: float = DEADLINE, run: str | None = None, label: str | None = None, degraded: bool = False,
    check_replicas: bool | Patterns = False, sign: Key | Literal[True] | None = None,
) -> Checkpoint:  # fmt: skip
    """Save ``state`` to ``path``, a folder or a URL, and return once it is committed and durable.

    Called by every rank of ``group`` (default: the default process group; without one, this process alone) with
    the same ``path``. ``state`` is a nested dict of tensors, values and objects with ``state_dict()``. ``step``
    defaults to ``state["step"]`` if that is an int. ``files`` are kept beside the state, by name, from a path or
    from bytes. Each phase may take ``deadline`` seconds. ``run`` (16 hex digits) marks which run made it.
    ``label`` is what errors call the save; ranks whose paths differ by node, as their disks do, give the same one.

    With ``base``, an earlier checkpoint beside ``path``, only what differs from it is written: a piece whose bytes are
    equal stays in the file that has it, which is hard-linked, or, in a store, cited. See docs/incremental.md.

    With ``degraded`` the save commits although ranks are lost while they write, if others hold all that those were to
    write: they write it too. The first rank's word counts. See docs/degraded.md.

    With ``check_replicas``, tensors that several ranks hold are summed by each of them and compared before the commit:
    True for all, or patterns over names, those with a ``!`` left out. The save fails if a rank holds other bytes, and
    names it. See docs/replicas.md.

    With ``sign``, a private Ed25519 key (see docs/signing.md), the checkpoint is signed before it is committed. The
    first rank alone needs the key, the others may pass True.

    Host memory beyond the state stays below 128 MiB a rank, whatever its size. Raises SaveFailed, the same on every
    rank and also the built-in error of its cause (OSError, TypeError, ValueError, TimeoutError); then nothing was
    committed, training may go on, and an older checkpoint at ``path`` is as it was.
    """
    folder = with_deadline(location(path), deadline)
    label, step = label or label_of(folder, step), step_of(state, step)
    ranks, began = ranks_of(group), monotonic()
    with no_collection(), ranks.call(label, deadline=deadline, saving=True) as call:
        save_in(
            call, state, folder, step=step, files=files or {}, overwrite=overwrite, run=run or RUN,
            previous=previous_of(base, deadline), degraded=degraded, compared=compared_by(check_replicas),
            sign=signing(sign),
        )  # fmt: skip
    return Checkpoint(folder, monotonic() - began)


def save_in(
    call: Call, state: Mapping[str, Any], folder: Place, *, step: int | None, files: Attached, overwrite: bool,
    run: str, previous: Previous | None = None, degraded: bool = False,
    compared: Callable[[str], bool] | None = None, sign: Callable[[], Signer] | None = None,
    committed: Callable[[Place, Manifest], None] | None = None,
) -> str:  # fmt: skip
    """All of a save, within a call of the ranks that is under way. Returns the save's id."""
    rank = call.ranks.rank
    with (
        events.span("save", folder, rank, whole=True, step=step) as whole,
        Ring(remote=folder.is_remote) as ring,
    ):
        order = Order(
            call.ranks, folder, step, overwrite, run, ring, still=True, previous=previous, degraded=degraded,
            compared=compared, sign=sign, committed=committed,
        )  # fmt: skip
        work = SaveWork(order)
        work.gather(state, files)
        work.plan(call)
        work.settle(call)
        whole.nbytes = work.nbytes
        return work.save_id


def compared_by(check_replicas: bool | Patterns) -> Callable[[str], bool] | None:
    """Which names to compare over the ranks that hold them; None if none is."""
    if isinstance(check_replicas, bool):
        return (lambda name: True) if check_replicas else None
    patterns = (check_replicas,) if isinstance(check_replicas, str) else tuple(check_replicas)
    out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    fits, is_out = matcher(wanted, "check_replicas="), matcher(out, "check_replicas=!") if out else lambda name: False
    return lambda name: fits(name) and not is_out(name)


def signing(sign: Key | Literal[True] | None) -> Callable[[], Signer] | None:
    """What gives the first rank its signer, once it asks: a key that cannot be read fails the save on all ranks."""
    if sign is None:
        return None

    @cache
    def made() -> Signer:
        found = None if sign is True else signer(sign)
        if found is None:
            raise ValueError("sign=True says that the first rank has the key, but this is the first rank")
        return found

    return made


def previous_of(base: Base | Previous | None, deadline: float) -> Previous | None:
    """What a save may cite, from what its caller named; a checkpoint that cannot be a base fails the save."""
    if base is None or isinstance(base, Previous):
        return base
    found = base.path if isinstance(base, Checkpoint) else with_deadline(location(base), deadline)

    def choose() -> Place:
        if isinstance(base, Checkpoint) and base.format != FORMAT:
            raise Unsupported(f"{found} is of the format {base.format}: only a checkpoint of holdfast can be a base")
        return found

    return Previous(choose, required=True)


def step_of(state: Mapping[str, Any], step: int | None) -> int | None:
    """The step of a save: as given, by NumPy or torch perhaps, or as the state says. Raises TypeError for a float."""
    if step is None and isinstance(state, dict) and type(state.get("step")) is int:
        return int(state["step"])
    return None if step is None else index(step)


def label_of(folder: Place, step: int | None) -> str:
    """What a save is called in errors; all ranks of it say the same, so ``step`` is the one that the caller gave."""
    return f"save {folder}" if step is None else f"save {folder} (step {step})"
