"""Repairs a checkpoint with checked bytes of other checkpoints that hold the same. A manifest is never changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from time import monotonic

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.commit.transfer import home
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk import blocks
from holdfast.ondisk.datafile import Header
from holdfast.ondisk.manifest import Manifest
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.damage import Damage, Fault, Findings, damages, tensors_hit
from holdfast.read.examine import examine
from holdfast.read.files import DataFiles
from holdfast.read.source import ReadStats
from holdfast.repair.donors import Donor, Donors
from holdfast.repair.mend import Mended, Mending, mend_file
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

Source = str | os.PathLike[str] | Place


@dataclass(frozen=True)
class Repaired:
    """What `repair` did, or with ``dry_run`` could do.

    ``damages`` were there before, ``mended`` are the bytes that were put right and the files they came from, ``left``
    is still wrong, and ``tensors`` are the names that are still hit.
    """

    path: str
    dry_run: bool
    damages: tuple[Damage, ...]
    mended: tuple[Mended, ...]
    left: tuple[Damage, ...]
    tensors: tuple[str, ...]
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is whole now, or with ``dry_run`` would be."""
        return not self.left

    @property
    def nbytes(self) -> int:
        """Bytes that were put right."""
        return sum(mended.nbytes for mended in self.mended)


def repair(
    path: str | os.PathLike[str] | Place, *, sources: Iterable[Source] = (), dry_run: bool = False,
    deadline: float = DEADLINE,
) -> Repaired:  # fmt: skip
    """Put right what is damaged in a checkpoint of holdfast, with bytes of other checkpoints.

    Every byte is checked first. Good bytes are searched in ``path`` itself and then in ``sources``, checked by the sum
    of their block, written, made durable and read again. Blocks and headers are written in place, so other steps that
    share the file are mended too. A file that is missing or too short comes back whole or not at all. Objects in a
    store are written again as a whole. One process calls it, while nobody saves to ``path``. If it is killed, nothing
    is worse, and the same call goes on.

    Args:
        path: The checkpoint, a path, a URL or a place in a store.
        sources: Checkpoints, or folders of checkpoints: copies of the same one, and other steps with equal blocks.
        dry_run: Search, and write nothing.
        deadline: Seconds to wait for any one answer of a store.

    Returns:
        What was mended, and in ``left`` what no source has. No error is raised for that.

    Raises:
        NotACheckpoint: There is no manifest; see `rescue`.
        Damaged: The manifest cannot be read; see `rescue`.
        StorageError: Something cannot be read or written.

    Example:
        >>> holdfast.tools.repair("/ckpt/step-7", sources=["/ckpt/step-8"]).whole
        True
    """
    began, checkpoint = monotonic(), Checkpoint(with_deadline(location(path), deadline))
    _refuse_without_manifest(checkpoint)
    return mended_of(checkpoint, checkpoint.reader.examine(), sources, dry_run=dry_run, began=began)


def mended_of(
    checkpoint: Checkpoint, findings: Findings, sources: Iterable[Source], *, dry_run: bool, began: float
) -> Repaired:  # fmt: skip
    """`repair` with the findings of an examination."""
    target, record = checkpoint.path, checkpoint.manifest
    files = DataFiles(target, record.data_files)
    hurt = (*findings.others, *damages(record, findings.faults, files.folder))
    mended: list[Mended] = []
    left: list[Damage] = []
    if hurt:
        itself = Donor(target, record, files)
        donors = Donors([itself, *_donors(sources, target, record)])
        with events.task("repair", str(target)) as task:
            mended, faults = _mend_files(checkpoint, findings.faults, donors, task, dry_run=dry_run)
            more, left = _mend_attachments(checkpoint, findings.others, donors, dry_run=dry_run)
        mended += more
        left += damages(record, faults, files.folder)
    for damage in left:
        events.log.warning("%s: could not be repaired: %s", damage, damage.what)
    hit = tensors_hit(left, record)
    done = Repaired(str(target), dry_run, hurt, tuple(mended), tuple(left), hit, monotonic() - began)
    if mended:
        events.log.info("%s: %s %d bytes", target, "could mend" if dry_run else "mended", done.nbytes)
    return done


def _refuse_without_manifest(checkpoint: Checkpoint) -> None:
    try:
        checkpoint.manifest  # noqa: B018 - reading it is the check
    except NotACheckpoint as error:
        raise NotACheckpoint(
            f"{error}. holdfast.tools.repair mends checkpoints of our own format; holdfast.tools.rescue brings a "
            "manifest back"
        ) from None
    except Damaged as error:
        raise Damaged(f"{error}; holdfast.tools.rescue may make its manifest again, then it can be repaired") from None


def _donors(sources: Iterable[Source], target: Place, record: Manifest) -> list[Donor]:
    donors: list[Donor] = []
    for source in sources:
        place = with_deadline(location(source), DEADLINE)
        kin = [one for one in _checkpoints(place) if str(home(one[0])) != str(home(target))]
        kin.sort(key=lambda one: (one[1].save != record.save, abs((one[1].step or 0) - (record.step or 0))))
        donors += [Donor(where, theirs, DataFiles(where, theirs.data_files)) for where, theirs in kin]
    return donors


def _checkpoints(place: Place) -> list[tuple[Place, Manifest]]:
    """The checkpoint at a place, or those in a folder. Raises NotACheckpoint if there is none."""
    try:
        return [(place, read_manifest(place))]
    except NotACheckpoint as error:
        missing = error
    except (Damaged, Unsupported) as error:
        events.log.warning("%s is no source: %s", place, error)
        return []
    checkpoints: list[tuple[Place, Manifest]] = []
    for name in place.folder_names():
        with suppress(NotACheckpoint, Damaged, Unsupported):  # what cannot be read can give nothing
            checkpoints.append((place / name, read_manifest(place / name)))
    if not checkpoints:
        raise NotACheckpoint(f"the source {place} is no checkpoint, and no folder of checkpoints: {missing}")
    return checkpoints


def _mend_files(
    checkpoint: Checkpoint, faults: Sequence[Fault], donors: Donors, task: events.Task, *, dry_run: bool
) -> tuple[list[Mended], list[Fault]]:
    """What was mended in data files, and what is wrong then. The ``task`` counts what is read again of mended files."""
    target, record = checkpoint.path, checkpoint.manifest
    task.total = 0 if dry_run else sum(record.data_files[index].bytes for index in {fault.file for fault in faults})
    mended: list[Mended] = []
    left: list[Fault] = []
    for index, some in groupby(sorted(faults), key=lambda fault: fault.file):
        file = record.data_files[index]
        path = target / file.path
        done = mend_file(
            home(target) / file.path, path, index, file, _header(checkpoint, index), list(some), donors, dry_run=dry_run
        )
        mended += done.mended
        left += done.left if dry_run else _still_wrong(checkpoint, index, done, task)
    return mended, left


def _header(checkpoint: Checkpoint, index: int) -> Header | None:
    files = checkpoint.files
    try:
        return files.header(index) if isinstance(files, DataFiles) else None
    except HoldfastError:  # it is one of the faults
        return None


def _still_wrong(checkpoint: Checkpoint, index: int, done: Mending, task: events.Task) -> list[Fault]:
    """The file looked at once more, every byte, as it lies in storage now."""
    files = DataFiles(checkpoint.path, checkpoint.manifest.data_files)
    faults = examine(files, checkpoint.manifest, ReadStats(), only={index}, progress=task.advance)
    known = {(fault.begin, fault.key): fault for fault in done.left}
    return [known.get((fault.begin, fault.key), fault) for fault in faults]


def _mend_attachments(
    checkpoint: Checkpoint, hurt: Sequence[Damage], donors: Donors, *, dry_run: bool
) -> tuple[list[Mended], list[Damage]]:
    mended: list[Mended] = []
    left = list(hurt)
    for path, nbytes, digest in checkpoint.manifest.attachments:
        target = checkpoint.path / path
        of = next((damage for damage in left if damage.file == str(target)), None)
        gift = donors.attachment(nbytes, digest) if of is not None else None
        if of is None or gift is None:
            continue
        if not dry_run:
            target.parent.make_folder()
            target.write_small(gift.data)
        if dry_run or blocks.digest(target.read_small()) == digest:
            left.remove(of)
            mended.append(Mended(str(target), 0, nbytes, gift.source))
    return mended, left
