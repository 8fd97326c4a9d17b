"""Copies a checkpoint of holdfast to another place: every block is checked on the way, the manifest comes last.

Users call `copy`. It never commits bytes that it has not checked, and never changes the source.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

import msgspec

from holdfast import events
from holdfast.commit.commit import commit, place_signature
from holdfast.commit.folder import copy_hint, goes_along, is_orphan, taken
from holdfast.commit.transfer import CopyStats, copy_files, home, self_contained
from holdfast.errors import Damaged, NotACheckpoint, StorageError, Unsupported
from holdfast.export.to_store import check_free, grown_at, upload
from holdfast.formats.own import read_known, read_manifest
from holdfast.ondisk import datafile, manifest
from holdfast.ondisk.manifest import Manifest
from holdfast.policies.signing.keys import found_signature
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline
from holdfast.storage.wrappers.throttled import Throttled

How = Literal["create", "replace", "keep"]


@dataclass
class Copied:
    """What `copy` did: files and bytes copied, and those that were at the target already.

    ``committed`` is False if the target was this checkpoint before. Of a folder of checkpoints the numbers are sums,
    and ``steps`` holds what was done for each by its name.
    """

    source: str
    target: str
    stats: CopyStats = field(default_factory=CopyStats)
    committed: bool = False
    seconds: float = 0.0
    steps: dict[str, Copied] = field(default_factory=dict)


def copy(
    source: str | os.PathLike[str] | Place, target: str | os.PathLike[str] | Place, *, overwrite: bool = False,
    bandwidth: float | None = None, deadline: float = DEADLINE,
) -> Copied:  # fmt: skip
    """Copy a checkpoint of holdfast, or all steps of a run, to another place.

    One process calls it. Every block is checked while it passes, and the manifest is written last. A copy that is
    killed or fails has committed nothing, and the same call goes on from the files that are there. Files that a
    checkpoint reuses from its siblings are copied into it. Host memory stays below 256 MiB.

    Args:
        source: A checkpoint, or a folder of checkpoints: a path, a URL, or a place in a store.
        target: Where the copy goes. A run is copied step by step, the newest last.
        overwrite: Replace another checkpoint at ``target``, once all new files are there. The same one stays in any
            case, and gets the files that it lacks.
        bandwidth: Bytes a second at most.
        deadline: Seconds to wait for any one answer of a store.

    Returns:
        What was copied, and what was there already.

    Raises:
        NotACheckpoint: There is no checkpoint at ``source``.
        Damaged: Bytes of the source are not what was written; it names the file and the bytes.
        Unsupported: ``source`` is of another format: convert it.
        StorageError: ``target`` holds another checkpoint, or the disk or store refused.
        ValueError: ``target`` lies in ``source``.

    Example:
        >>> holdfast.copy("/ckpt/step-7", "/archive/step-7").committed
        True
    """
    began = monotonic()
    ours, theirs = location(source), location(target)
    if f"{home(theirs)}/".startswith(f"{home(ours)}/"):
        raise ValueError(f"the target {theirs} is the source {ours}, or lies in it")
    place, theirs = home(with_deadline(ours, deadline)), with_deadline(theirs, deadline)
    if bandwidth is not None:
        place = StorePlace(Throttled(place.store, bandwidth), place.key)
    copied = (_pushed if theirs.takes_pushes else _copy)(place, theirs, overwrite)
    copied.seconds = monotonic() - began
    return copied


def _copy(source: StorePlace, target: Place, overwrite: bool) -> Copied:
    try:
        record = read_known(source)
    except NotACheckpoint as error:
        try:
            steps = _steps(source)
        except StorageError as refusal:
            if refusal.errno != errno.ENOTSUP:
                raise
            steps = []  # a web server, which lists nothing
        if not steps:
            raise NotACheckpoint(
                f"{error}. holdfast.copy copies checkpoints of our own format, holdfast.convert reads others"
            ) from None
        return _copy_steps(source, target, steps, overwrite)
    return _copy_one(source, target, record, overwrite)


def _pushed(source: StorePlace, target: Place, overwrite: bool) -> Copied:
    """A copy to a repository: to local disk, where a repeated call goes on, and from there in one commit."""
    place, grown = as_store(target), grown_at(target)
    with suppress(NotACheckpoint, StorageError):
        if read_known(place).save == read_known(source).save:
            return Copied(str(source), str(target))
    if (source / manifest.FILE_NAME).is_file() or _steps(source):  # if not, the copy says what is there instead
        check_free(place, overwrite=overwrite)
    copied = _copy(source, grown, overwrite=True)
    upload(grown, place)
    grown.parent.delete_if_empty()
    copied.target, copied.committed = str(target), True
    return copied


def _steps(root: StorePlace) -> list[tuple[str, Manifest]]:
    steps = []
    for name in root.folder_names():
        try:
            steps.append((name, read_known(root / name)))
        except NotACheckpoint:
            events.log.debug("%s is no checkpoint, and not copied", root / name)
    return sorted(steps, key=lambda step: (step[1].step is not None, step[1].step or 0, step[0]))


def _copy_steps(source: StorePlace, target: Place, steps: list[tuple[str, Manifest]], overwrite: bool) -> Copied:
    whole = Copied(str(source), str(target))
    for name, record in steps:
        try:
            copied = _copy_one(source / name, target / name, record, overwrite)
        except NotACheckpoint as error:  # the run goes on, and keeps only so many
            events.log.warning("%s", error)
            continue
        whole.steps[name] = copied
        whole.committed |= copied.committed
        whole.stats.add(copied.stats)
    return whole


def _copy_one(source: StorePlace, target: Place, record: Manifest, overwrite: bool) -> Copied:
    into, how = _received(target, record, overwrite)
    copied = Copied(str(source), str(target), committed=how != "keep")
    total = sum(file.bytes for file in into.data_files) + sum(nbytes for _, nbytes, _ in into.attachments)
    with events.task("copy", str(target), total=total) as task, _Guard(target) as guard:
        try:
            copied.stats = copy_files(source, target, record, into=into, progress=task.advance, landed=guard.landed)
        except Damaged:
            if not (source / manifest.FILE_NAME).is_file():
                raise NotACheckpoint(f"{source} was deleted while it was copied") from None
            raise
        signed = found_signature(source, record)
        if how != "keep":
            _refuse_losses(target, into)
            target.make_home()
            commit(target, into, replaces=how == "replace", signed=signed)
            copy_hint(source, target, into.save)
        elif signed is not None and found_signature(target, into) is None:
            place_signature(target, into, signed)
    if target.has_folders:
        _tidy(target, into)
    events.log.info(
        "%s: %s; %d files copied (%d bytes), %d were there", target,
        "copied" if copied.committed else "the same checkpoint was there", copied.stats.files, copied.stats.nbytes,
        copied.stats.skipped,
    )  # fmt: skip
    return copied


def _received(target: Place, record: Manifest, overwrite: bool) -> tuple[Manifest, How]:
    """The manifest for the target, and what to do with it there. Raises StorageError (EEXIST)."""
    place, own = home(target), self_contained(record)
    if target.has_folders and target.exists() and not target.is_dir():
        raise taken(f"{target} is a file")
    sizes = place.sizes_below()
    if manifest.FILE_NAME not in sizes:
        _refuse_others(target, own, list(sizes))
        return own, "create"
    try:
        existing = read_manifest(place)
    except (Damaged, Unsupported, NotACheckpoint) as error:
        if not overwrite:
            raise taken(f"{target} holds a manifest that cannot be read ({error})") from error
        return _with_own_attachments(own, sizes), "replace"
    if existing.save == record.save:
        if _proofs(existing) != _proofs(own):
            if not overwrite:
                raise taken(f"{target} holds a checkpoint of the same save ({existing.save}) and other files")
            return _with_own_attachments(own, sizes), "replace"
        return existing, "keep"
    if not overwrite:
        raise taken(f"{target} already holds another checkpoint (save {existing.save})")
    return _with_own_attachments(own, sizes), "replace"


def _proofs(record: Manifest) -> list[tuple[int, str]]:
    return [
        *((file.bytes, file.header_digest) for file in record.data_files),
        *((nbytes, digest) for _, nbytes, digest in record.attachments),
    ]


def _refuse_others(target: Place, own: Manifest, paths: list[str]) -> None:
    """Orphans of dead saves may stay beside the copy, to be swept later; other files are refused."""
    named = {file.path for file in own.data_files} | {path for path, _, _ in own.attachments}
    strays = [path for path in paths if path not in named]
    orphans = [path for path in strays if is_orphan(path)]
    foreign = [path for path in strays if not is_orphan(path) and not (orphans and goes_along(target, path))]
    if foreign:
        raise taken(f"{target} holds other files ({foreign[0]}{' and more' if len(foreign) > 1 else ''})")
    if target.has_locks and target.living(orphans):
        raise taken(f"another save is writing to {target} right now")


def _with_own_attachments(own: Manifest, existing: Mapping[str, int]) -> Manifest:
    """Names of attachments hold no save id: those that the checkpoint to be replaced has too move to a folder."""
    below = f"attachments/{own.save}/"
    moved = [
        (below + path.removeprefix("attachments/") if path in existing and not path.startswith(below) else path, *proof)
        for path, *proof in own.attachments
    ]
    return msgspec.structs.replace(own, attachments=moved)


def _refuse_losses(target: Place, into: Manifest) -> None:
    """Raise StorageError if files are gone: a sweep may have taken them, as no manifest named them yet."""
    sizes = home(target).sizes_below()
    for path, nbytes in [*((f.path, f.bytes) for f in into.data_files), *((p, n) for p, n, _ in into.attachments)]:
        if sizes.get(path) != nbytes:
            error = StorageError(
                f"{target / path} was deleted while the other files were copied, and nothing was committed; "
                "find out what cleans up there, and run the same copy again"
            )
            error.errno, error.file = errno.ENOENT, str(target / path)
            raise error


def _tidy(target: Place, into: Manifest) -> None:
    # Deleting any name makes a local store sweep the folder, also of the half files of copies that were killed.
    folders = {path.rpartition("/")[0] for path in [*(f.path for f in into.data_files), manifest.FILE_NAME]}
    place = home(target)
    try:
        place.store.delete([(place / folder / ".copied").key for folder in sorted(folders)])
    except StorageError as error:
        events.log.warning("%s is copied, but orphans of other copies may stay: %s", target, error)


class _Guard:
    """Holds a lock on a data file of the target until its manifest is there: sweeps spare such a folder.

    In a store, which has no locks, they spare young files.
    """

    def __init__(self, target: Place) -> None:
        self._target, self._held = target, threading.Lock()
        self._fd: int | None = None

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def landed(self, path: str) -> None:
        if not self._target.has_locks or datafile.save_of(path) is None:
            return
        with self._held:
            if self._fd is None:
                self._fd = (self._target / path).open_locked()
