"""Reads a run back from disk and says what does not hold: every committed step, every file beside it.

The loop calls `read_back` when all processes of an episode are gone, and `litter` once a manager has swept. Never
changes a file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

import holdfast
from holdfast.commit.sections import dropped_of
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests.soak.content import Mark, shapes, whole
from tests.soak.model import Model
from tests.soak.plan import Run
from tests.soak.world import Violation


@dataclass
class Spoiled:
    """Files that were altered on purpose. Each stays open, so that no other file gets its number."""

    gone: set[str] = field(default_factory=set)
    altered: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, path: Path, *, deleted: bool = False) -> None:
        """Before ``path`` is altered, and with it all links to that file; or before this one link is deleted."""
        if deleted:
            self.gone.add(str(path))
            return
        fd = os.open(path, os.O_RDONLY)
        told = os.fstat(fd)
        if (told.st_dev, told.st_ino) in self.altered:
            os.close(fd)
        else:
            self.altered[told.st_dev, told.st_ino] = fd

    def __contains__(self, path: Path) -> bool:
        try:
            told = path.stat()
        except FileNotFoundError:
            return str(path) in self.gone
        return (told.st_dev, told.st_ino) in self.altered

    def close(self) -> None:
        for fd in self.altered.values():
            os.close(fd)
        self.altered.clear()
        self.gone.clear()


@dataclass
class Found:
    """What a run has on disk: marks of the whole steps, those that are spoiled, those that lost their optimizer, and
    uncommitted ones of which some rank has left a part.
    """

    good: dict[int, Mark] = field(default_factory=dict)
    spoiled: dict[int, list[Path]] = field(default_factory=dict)
    thin: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    verified: int = 0
    nbytes: int = 0

    @property
    def complete(self) -> dict[int, Mark]:
        return {step: mark for step, mark in self.good.items() if step not in self.thin}


def folders(root: Path) -> dict[int, Path]:
    if not root.exists():
        return {}
    return {int(f.name[5:]): f for f in sorted(root.iterdir()) if f.name.startswith("step-")}


def interrupted(root: Path) -> bool:
    """Whether a save is under way there: files that no manifest names. Looks once, beside whoever writes."""
    for folder in folders(root).values():
        try:
            text = (folder / "manifest.json").read_text()
            if any(path.name not in text for path in folder.glob("*/*.safetensors")):
                return True
        except OSError:
            return True
    return False


def read_back(root: Path, run: Run, spoiled: Spoiled, *, place: StorePlace | None = None) -> Found:
    """Every committed step, read and compared with what was saved. Raises Violation."""
    found = Found()
    for step, folder in folders(root).items():
        if not (folder / "manifest.json").exists():
            if (folder / "parts").is_dir():
                found.parts.add(step)
            continue
        hit = [path for path in named(folder) if path in spoiled]
        if hit:
            found.spoiled[step] = hit
            _told(folder, hit)
            continue
        opened = holdfast.open(folder if place is None else place / folder.name)
        try:
            opened.verify()
            found.good[step] = _compared(opened, run, step)
        except holdfast.HoldfastError as error:
            raise Violation(f"{folder} is committed and not whole: {error}") from error
        if dropped_of(opened.manifest):
            found.thin.add(step)
        found.verified += 1
        found.nbytes += opened.nbytes
    return found


def named(folder: Path) -> list[Path]:
    """The manifest and what it names; a manifest that was altered may name anything."""
    manifest = folder / "manifest.json"
    try:
        opened = holdfast.open(folder)
        records = opened.manifest
    except holdfast.HoldfastError:
        return [manifest]
    names = [*(file.path for file in records.data_files), *(path for path, _, _ in records.attachments)]
    return [manifest, *(Path(os.path.normpath(folder / name)) for name in names)]


def _told(folder: Path, hit: list[Path]) -> None:
    """`verify` names each file that was altered."""
    try:
        holdfast.open(folder).verify()
    except holdfast.HoldfastError as error:
        untold = [path for path in hit if path.name not in str(error)]
        if untold:
            raise Violation(f"verify of {folder} does not name {untold}: {error}") from error
    else:
        raise Violation(f"verify of {folder} finds nothing, although {hit} was altered")


def _compared(opened: holdfast.Checkpoint, run: Run, step: int) -> Mark:
    """The mark of a checkpoint, all of which is of one save."""
    state = opened.state_dict()
    mark: Mark = (state["episode"], state["step"])
    if opened.step != step or mark[1] != step:
        raise Violation(f"{opened.path} says that it is step {opened.step}, and its state {mark[1]}")
    expected, dropped = shapes(run), dropped_of(opened.manifest)
    expected = {name: what for name, what in expected.items() if name.partition("/")[0] not in dropped}
    if odd := set(opened.tensors).symmetric_difference(expected):
        raise Violation(f"{opened.path} lacks or has too much: {sorted(odd)[:5]}")
    for name, (shape, dtype) in expected.items():
        if not torch.equal(opened.read(name), whole(run, name, shape, dtype, mark)):
            raise Violation(f"{opened.path} is mixed or wrong: {name} is not as it was at {mark}")
    for rank in range(opened.world_size):
        if opened.per_rank("mine", rank) != [*mark, rank]:
            raise Violation(f"{opened.path}: rank {rank} had {opened.per_rank('mine', rank)}, not {[*mark, rank]}")
    return mark


def held(found: Found, model: Model) -> None:
    """What is there, is there rightly, and nothing is missing. Raises Violation."""
    for step, mark in found.good.items():
        if not model.knows(mark):
            raise Violation(f"step {step} is of {mark}: nobody has saved that")
        if mark in model.never:
            raise Violation(f"step {step} of {mark} is committed, although every rank was told that it is not")
    for step, mark in model.must.items():
        if step in found.spoiled:
            continue
        if step not in found.good:
            raise Violation(f"step {step} of {mark} was acknowledged and is lost; there are {sorted(found.good)}")
        if found.good[step] not in (mark, *model.may.get(step, ())):  # a spoiled step may have been made again
            raise Violation(f"step {step} is of {found.good[step]}, but {mark} was acknowledged")
    if found.good and not found.spoiled and max(found.good) in found.thin:
        raise Violation(f"the newest step, {max(found.good)}, has lost its optimizer")


def litter(root: Path, spoiled: Spoiled) -> list[str]:
    """Files and folders that belong to no committed step."""
    found = []
    for folder in folders(root).values():
        if not (folder / "manifest.json").exists():
            found.append(f"{folder.name} without a manifest: {sorted(os.listdir(folder))}")
            continue
        own = named(folder)
        if len(own) == 1 or own[0] in spoiled:
            return []  # an altered manifest: nobody may delete what it could have named
        names = {str(path) for path in own}
        # What another step cites stays as long as that one does.
        names |= {str(path) for other in folders(root).values() for path in _cited(other)}
        found += [str(f.relative_to(root)) for f in folder.rglob("*") if f.is_file() and str(f) not in names]
    return found


def _cited(folder: Path) -> list[Path]:
    return [path for path in named(folder) if path.parts[: len(folder.parts)] != folder.parts]


def store_of(base: Path) -> StorePlace:
    return StorePlace(Local(base / "store"), "run")
