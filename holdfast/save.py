"""The story of a save that training waits for: gather, agree, lay out, write, commit.

Users and the manager call `save`. Never leaves a moment without a whole checkpoint, and never commits half of one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from operator import index
from time import monotonic
from typing import Any, Literal

import torch.distributed as dist

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.checkpoint import Checkpoint
from holdfast.commit.agree import agree
from holdfast.commit.gather import Attached, Gathered, gather
from holdfast.commit.job import Base, Failed, Job, attempt, value_of
from holdfast.commit.outgoing import Outgoing, lay_out
from holdfast.commit.settle import settle
from holdfast.errors import HoldfastError, Unsupported
from holdfast.ondisk.arguments import PATH, SECONDS, STEP, check, or_none
from holdfast.ondisk.manifest import FORMAT
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.points import Policies
from holdfast.policies.replicas.compare import compared_by
from holdfast.policies.signing.keys import Key, signing
from holdfast.ranks.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline
from holdfast.write.pool import Ring

RUN = secrets.token_hex(8)
"""Marks what this process saves as one run's."""

Based = str | os.PathLike[str] | Place | Checkpoint | Base
"""What a save may reuse files of: the path of a checkpoint, or the checkpoint."""


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str] | Place, *, overwrite: bool = False,
    step: int | None = None, base: Based | None = None,
    files: Attached | None = None, group: dist.ProcessGroup | Ranks | None = None,
    deadline: float = DEADLINE, run: str | None = None, label: str | None = None, degraded: bool = False,
    check_replicas: bool | Patterns = False, sign: Key | Literal[True] | None = None,
) -> Checkpoint:  # fmt: skip
    """Save ``state`` to ``path``, and return once it is committed and durable.

    Every rank of ``group`` calls it with the same ``path``. Host memory beyond the state stays below 128 MiB a rank.

    Args:
        state: A nested dict of tensors, values, modules, optimizers and other objects with a ``state_dict``.
        path: A folder, a URL, or a place from `holdfast.storage.at`.
        overwrite: Replace a checkpoint that is there, once the new one is committed.
        step: The training step to note; by default ``state["step"]``, if that is an int.
        base: An earlier checkpoint beside ``path``. Only what differs from it is written; see docs/incremental.md.
        files: Files to keep beside the state, by name, from a path or from bytes.
        group: The ranks that save; by default the default process group, or this process alone without one.
        deadline: Seconds that each phase may take without progress before a rank is given up.
        run: The id of the run, 16 hex digits, to note.
        label: What errors call the save. Ranks whose paths differ, as disks of nodes do, give the same one.
        degraded: Commit although ranks are lost while they write, if others hold all that those were to write; see
            docs/crash-safety.md. The first rank's word counts.
        check_replicas: Compare the sums of tensors that several ranks hold before the commit: True for all of them, or
            patterns over names. The save fails if a rank holds other bytes, and names it.
        sign: A private Ed25519 key to sign the checkpoint with; see docs/security.md. Only the first rank needs the
            key, the others may pass True.

    Returns:
        The checkpoint, opened.

    Raises:
        SaveFailed: The same on every rank, and also the built-in error of its cause (OSError, TypeError, ValueError,
            TimeoutError). Nothing was committed, an older checkpoint at ``path`` is as it was, and training may go on.

    Example:
        >>> holdfast.save({"model": model, "step": 7}, "/ckpt/new").step
        7
    """
    check({"path": PATH, "deadline": SECONDS}, {"path": path, "deadline": deadline})
    folder = with_deadline(location(path), deadline)
    label, step = label or label_of(folder, step), step_of(state, step)
    ranks, began = ranks_of(group), monotonic()
    job = Job(
        ranks, folder, step, run or RUN, overwrite=overwrite, base=base_of(base, deadline), degraded=degraded,
        compared=compared_by(check_replicas), sign=signing(sign),
    )  # fmt: skip
    with no_collection(), ranks.call(label, deadline=deadline, saving=True) as call:
        save_in(call, job, state, files or {})
    return Checkpoint(folder, monotonic() - began)


def save_in(call: Call, job: Job, state: Mapping[str, Any], files: Attached) -> str:
    """All of a save, within a call of the ranks that is under way. Returns the save's id."""
    with events.span("save", job.place, job.ranks.rank, whole=True, step=job.step) as whole:
        saved = commit_gathered(call, job, attempt(gather, job, state, files))
        whole.nbytes = saved.nbytes
    return saved.agreed.save


def commit_gathered(call: Call, job: Job, gathered: Gathered | Failed) -> Outgoing:
    """Agree, lay out, write and commit what the ranks have gathered. Raises what every rank raises: SaveFailed."""
    policies = Policies(job)
    with Ring(remote=job.place.is_remote) as memory:
        agreed = agree(call, job, gathered)
        if agreed is None:
            raise HoldfastError("a save was skipped that no rank may skip; this is a fault of holdfast")
        outgoing = attempt(lay_out, job, agreed, value_of(gathered), memory, policies)
        settle(call, job, agreed, outgoing, policies)
        return value_of(outgoing)


def base_of(base: Based | None, deadline: float) -> Base | None:
    """What a save may reuse, from what its caller named; a checkpoint that cannot be a base fails the save."""
    if base is None or isinstance(base, Base):
        return base
    path = base.path if isinstance(base, Checkpoint) else with_deadline(location(base), deadline)

    def choose() -> Place:
        if isinstance(base, Checkpoint) and base.format != FORMAT:
            raise Unsupported(f"{path} is of the format {base.format}: only a checkpoint of holdfast can be a base")
        return path

    return Base(choose, required=True)


def step_of(state: Mapping[str, Any], step: int | None) -> int | None:
    """The step of a save: as given, by NumPy or torch perhaps, or as the state says. Raises TypeError or ValueError."""
    or_none(STEP).check("step", step)
    if step is None and isinstance(state, dict) and type(state.get("step")) is int:
        return int(state["step"])
    return None if step is None else index(step)


def label_of(folder: Place, step: int | None) -> str:
    """What a save is called in errors; all ranks of it say the same, so ``step`` is the one that the caller gave."""
    return f"save {folder}" if step is None else f"save {folder} (step {step})"
