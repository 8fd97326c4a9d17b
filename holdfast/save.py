"""The story of a save: collect, exchange layouts, plan, write what this rank owns, settle, commit.

Users and the manager call `save`. Never leaves a moment without a whole checkpoint, and never commits half of one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import torch.distributed as dist

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.engine import storage
from holdfast.engine.commit import Attached, Identity, build, check_attachment, commit, write_attachments
from holdfast.engine.folder import prepare, withdraw
from holdfast.engine.images import images_of
from holdfast.engine.layout import (
    Layout,
    OwnedJoin,
    OwnedValues,
    digest_of,
    join_owned,
    join_values,
    layout_of,
    owned_digest,
    owned_values,
)
from holdfast.engine.memory import no_collection
from holdfast.engine.plan import Plan, make_plan
from holdfast.engine.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.engine.replicas import join_sums, sums_of
from holdfast.engine.state import Collected, collect
from holdfast.engine.write import OpenFiles, write_images
from holdfast.errors import HoldfastError, RankLost, Unsupported
from holdfast.ondisk import manifest
from holdfast.ondisk.manifest import FileRecord

_RUN = secrets.token_hex(8)
_REMEMBERED = 8  # saves whose layouts and plans are kept for later ones of the same state


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False, step: int | None = None,
    files: Attached | None = None, group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE, run: str | None = None,
) -> Checkpoint:  # fmt: skip
    """Save ``state`` to the folder ``path`` and return once it is committed and durable.

    Called by every rank of ``group`` (default: the default process group; without one, this process alone) with
    the same ``path``. ``state`` is a nested dict of tensors, values and objects with ``state_dict()``. ``step``
    defaults to ``state["step"]`` if that is an int. ``files`` are kept beside the state, by name, from a path or
    from bytes. Each phase may take ``deadline`` seconds. ``run`` (16 hex digits) marks which run made it.

    Host memory beyond the state stays below 128 MiB a rank, whatever its size. Raises SaveFailed, the same on every
    rank and also the built-in error of its cause (OSError, TypeError, ValueError, TimeoutError); then nothing was
    committed, training may go on, and an older checkpoint at ``path`` is as it was.
    """
    folder = local_folder(path)
    if step is None and isinstance(state, dict) and type(state.get("step")) is int:
        step = state["step"]
    ranks = ranks_of(group)
    began = monotonic()
    label = f"save {folder} (step {step})"
    with no_collection(), ranks.call(label, deadline=deadline, saving=True) as call:
        work = _Save(call, state, folder, step, dict(files or {}), overwrite, run or _RUN)
        work.run()
    return Checkpoint(folder, monotonic() - began)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a local folder. Raises Unsupported for a URL."""
    text = os.fspath(path)
    if "://" in text:
        raise Unsupported(f"{text} is a URL; this version saves to local folders only")
    return Path(os.path.abspath(os.path.expanduser(text)))


class _PlanNote(msgspec.Struct, array_like=True):
    layout: str
    values: str
    owned: str
    plain: str


class _Decision(msgspec.Struct, array_like=True):
    """What the first rank decides before anything is planned, and what it still has to be told."""

    save: str
    layouts: list[str]
    layout_of: list[int]
    tell_layout: list[int]
    tell_values: list[int]
    tell_owned: list[int]
    tell_plain: list[int]

    @property
    def tells(self) -> bool:
        """Whether anybody has to tell anything."""
        return bool(self.tell_layout or self.tell_values or self.tell_owned or self.tell_plain)


class _Told(msgspec.Struct, array_like=True):
    layout: Layout | None = None
    values: dict[str, Any] | None = None
    owned: OwnedValues | None = None
    plain: dict[str, str] | None = None


class _Part(msgspec.Struct, array_like=True):
    """What one rank did: its durable files, and the plan that it followed."""

    files: list[tuple[str, int, int, str]]
    plan: str


@dataclass
class _Memory:
    """Layouts and plans of earlier saves of one group; every rank has seen the same ones in the same order."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    recent: list[tuple[str, list[str]]] = field(default_factory=list)

    def keep(self, plan: str, layouts: list[str]) -> None:
        """Note what a save uses, and forget what none of the last few used; alike on every rank."""
        self.recent = [*self.recent, (plan, layouts)][-_REMEMBERED:]
        used = {digest for _, digests in self.recent for digest in digests}
        self.layouts = {digest: layout for digest, layout in self.layouts.items() if digest in used}
        self.plans = {key: made for key, made in self.plans.items() if any(key == k for k, _ in self.recent)}


def _memory_of(ranks: Ranks) -> _Memory:
    memory: _Memory = ranks.remembered.setdefault("save", _Memory())
    return memory


@dataclass
class _Save:
    """One save under way on one rank."""

    call: Call
    state: Mapping[str, Any]
    folder: Path
    step: int | None
    attachments: Attached
    overwrite: bool
    run_id: str
    collected: Collected = field(default_factory=Collected)
    plan: Plan | None = None
    joined: OwnedJoin | None = None
    layout: Layout | None = None
    plain: dict[str, str] = field(default_factory=dict)
    save_id: str = ""
    plan_key: str = ""
    reported: bool = False

    def run(self) -> None:
        ranks, memory = self.call.ranks, _memory_of(self.call.ranks)
        opened = OpenFiles()
        leave = False
        try:
            with events.task("save", str(self.folder), ranks.rank) as task:
                decision = self.call.exchange("plan", self._describe, self._decide, _Decision)
                self.save_id = decision.save
                if decision.tells:
                    told = self.call.exchange(
                        "layout", lambda: self._tell(decision), lambda notes: self._join(decision, notes), list[Layout]
                    )
                    memory.layouts.update((digest_of(layout), layout) for layout in told)
                self.plan_key = digest_of([decision.layouts, decision.layout_of])
                memory.keep(self.plan_key, decision.layouts)
                leave = self._settle(decision, opened, task)
        finally:
            # Before the decision the folder may be somebody else's: then nothing in it is ours to take away.
            if self.save_id and not leave and not self._is_committed():
                withdraw(opened.paths, self.folder)
            opened.close()

    def _settle(self, decision: _Decision, opened: OpenFiles, task: events.Task) -> bool:
        """Write, report, commit. True if this rank's files are to stay where they are."""
        try:
            self.call.settle(
                "write", lambda: self._write(decision, opened, task), lambda parts: self._commit(decision, parts), str
            )
        except RankLost as lost:
            if lost.settled:
                raise
            # The first rank may have died after the commit and before it could tell, or may still be at it: the
            # manifest is the truth, and files that it may name are left to a later sweep.
            opened.paths.clear()
            if not self._is_committed():
                raise
            events.log.warning("%s is committed, although the ranks could not settle it: %s", self.folder, lost.cause)
        except HoldfastError:
            raise
        except BaseException:
            # Interrupted while it waited for the verdict: what it has reported may be committed any moment.
            if self.reported:
                opened.paths.clear()
            raise
        return True

    def _is_committed(self) -> bool:
        """Whether the manifest that stands in the folder is this save's."""
        try:
            found = manifest.decode(storage.read_small(self.folder / manifest.FILE_NAME), str(self.folder))
        except (HoldfastError, OSError):
            return False
        return found.save == self.save_id

    # What every rank does before the plan.

    def _describe(self) -> _PlanNote:
        self.collected = collect(self.state, self.call.ranks)
        self.layout = layout_of(self.collected)
        for name in self.attachments:
            check_attachment(name)
        self.plain = sums_of(self.collected) if self.call.ranks.size > 1 else {}
        return _PlanNote(
            digest_of(self.layout),
            digest_of(self.collected.values),
            owned_digest(self.collected),
            digest_of(self.plain),
        )

    def _tell(self, decision: _Decision) -> _Told:
        rank = self.call.ranks.rank
        return _Told(
            self.layout if rank in decision.tell_layout else None,
            self.collected.values if rank in decision.tell_values else None,
            owned_values(self.collected) if rank in decision.tell_owned else None,
            self.plain if rank in decision.tell_plain else None,
        )

    # What the first rank decides.

    def _decide(self, notes: list[_PlanNote]) -> _Decision:
        prepare(self.folder, overwrite=self.overwrite)
        known = _memory_of(self.call.ranks).layouts
        layouts = list(dict.fromkeys(n.layout for n in notes))
        index = {digest: i for i, digest in enumerate(layouts)}
        return _Decision(
            secrets.token_hex(8),
            layouts,
            [index[n.layout] for n in notes],
            [rank for digest, rank in _first_with(n.layout for n in notes).items() if digest not in known],
            _unless_one(_first_with(n.values for n in notes)),
            _unless_one(_first_with(n.owned for n in notes)),
            _unless_one(_first_with(n.plain for n in notes)),
        )

    def _join(self, decision: _Decision, notes: list[_Told]) -> list[Layout]:
        told_values = [(rank, note.values) for rank, note in enumerate(notes) if note.values is not None]
        if told_values:
            join_values(told_values)
        join_sums([(rank, note.plain) for rank, note in enumerate(notes) if note.plain is not None])
        told = [note.layout for note in notes if note.layout is not None]
        known = {**_memory_of(self.call.ranks).layouts, **{digest_of(layout): layout for layout in told}}
        if decision.tell_owned:
            owned = [(r, decision.layout_of[r], n.owned) for r, n in enumerate(notes) if n.owned is not None]
            self.joined = join_owned([known[d] for d in decision.layouts], owned)
        return told

    # What every rank writes.

    def _write(self, decision: _Decision, opened: OpenFiles, task: events.Task) -> _Part:
        ranks, memory = self.call.ranks, _memory_of(self.call.ranks)
        if self.plan_key not in memory.plans:
            told = [memory.layouts[digest] for digest in decision.layouts]
            memory.plans[self.plan_key] = make_plan(told, decision.layout_of)
        self.plan = memory.plans[self.plan_key]
        images = images_of(self.collected, self.plan, ranks, decision.save)
        task.total = sum(p.nbytes for image in images for p in image.pieces)
        for image in images:
            storage.make_folder(self.folder / image.section)
        written = write_images(
            images, self.folder, save=decision.save, rank=ranks.rank, files=opened, progress=task.advance
        )
        for image in images:
            storage.sync_folder(self.folder / image.section)
        self.reported = True
        return _Part([(w.path, w.bytes, w.header_bytes, w.header_digest) for w in written], self.plan_key)

    # The commit, on the first rank.

    def _commit(self, decision: _Decision, parts: list[_Part]) -> str:
        if self.plan is None or self.layout is None or len({part.plan for part in parts}) > 1:
            raise HoldfastError("the ranks followed different plans; this is a fault of holdfast, please report it")
        if self.joined is None:
            self.joined = join_owned([self.layout], [(0, 0, owned_values(self.collected))])
        replaces = self.overwrite and (self.folder / manifest.FILE_NAME).exists()
        attached = write_attachments(self.attachments, self.folder, decision.save, fresh=not replaces)
        identity = Identity(decision.save, self.run_id, self.step, len(parts))
        files = [FileRecord(*file) for part in parts for file in part.files]
        record = build(identity, self.plan, files, self.collected, self.joined, attached)
        commit(self.folder, record, replaces=replaces)
        return decision.save


def _first_with(keys: Any) -> dict[Any, int]:
    """Each distinct key with the first rank that has it."""
    found: dict[Any, int] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, rank)
    return found


def _unless_one(found: dict[Any, int]) -> list[int]:
    """The ranks to ask, or none if all have the same."""
    return list(found.values()) if len(found) > 1 else []
