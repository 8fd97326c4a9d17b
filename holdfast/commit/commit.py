"""The commit: all parts joined into one manifest, created last, whole or not at all; in time, or late from the parts.

The first rank calls `commit` while it settles a save. The manager calls `commit_late` before it restores, for a save
that all ranks had finished. Never replaces a manifest unless it was asked to, nor commits a save that lacks a file.
"""

from __future__ import annotations

import secrets
import time

from holdfast import events
from holdfast.commit.draft import Share, joined
from holdfast.commit.folder import delete_hint, taken
from holdfast.commit.reused import ReusedPaths, let_go, reused_beside, reused_by, root_of
from holdfast.errors import Damaged, HoldfastError, StorageError, Unsupported
from holdfast.events import log
from holdfast.ondisk import blocks, datafile, manifest, part, signature
from holdfast.ondisk.manifest import Manifest, is_reused
from holdfast.ondisk.part import Part
from holdfast.storage import storage
from holdfast.storage.cloud.conditions import STALE
from holdfast.storage.place import Place
from holdfast.storage.storage import LinkCheck, without_links_out
from holdfast.storage.wrappers.retrying import is_transient


def commit(folder: Place, record: Manifest, *, replaces: bool, signed: bytes | None = None) -> None:
    """Create the manifest, or replace the one that is there; what only the replaced one named is deleted after.

    ``signed`` is the signature, which is there before the manifest is.

    Raises StorageError if another save has committed to the folder in the meantime; one that is not ``settled`` if a
    store has not answered, and may have the manifest all the same, or a disk has it, but perhaps not for good.
    """
    try:
        if signed is not None:
            place_signature(folder, record, signed)
        _commit(folder, record, replaces)
    except StorageError as error:
        if is_transient(error) or is_transient(error.__cause__) or standing(folder, record.save):
            error.settled = False
        raise


def standing(folder: Place, save: str) -> Manifest | None:
    """The manifest in a folder if it is that of this save; None also if it cannot be read."""
    target = folder / manifest.FILE_NAME
    try:
        record = manifest.decode(target.read_small(), str(target))
    except (HoldfastError, OSError):  # then there is none of ours, as far as anybody can tell
        return None
    return record if record.save == save else None


def place_signature(folder: Place, record: Manifest, signed: bytes) -> None:
    """Put a signature beside the manifest that it is of, or that is to come; whole or not at all, and durable."""
    name = signature.file_name(record)
    (folder / name).replace_small(signed, f".{name}.{secrets.token_hex(4)}.tmp")


def _commit(folder: Place, record: Manifest, replaces: bool) -> None:
    target, data = folder / manifest.FILE_NAME, manifest.encode(record)
    # Two processes may commit one save late, at once: each has a name of its own for the moments before.
    temporary = f".manifest.{record.save}.{secrets.token_hex(4)}.tmp"
    if replaces:
        previous = _previous(target)
        target.replace_small(data, temporary)
        if previous is not None:
            remove_old_files(folder, previous, record)
    elif not target.create_small(data, temporary):
        try:
            winner = manifest.decode(target.read_small(), str(target))
        except FileNotFoundError:
            raise taken(f"another save has claimed {target} before this one (if it died, for {STALE:.0f} s)") from None
        if winner.save != record.save:  # else our own answer was lost
            raise taken(f"{folder} was committed by another save ({winner.save}) in the meantime")


def _previous(target: Place) -> Manifest | None:
    """The checkpoint to be replaced, or None if it can no longer be read: what it named is then left to a sweep."""
    try:
        return manifest.decode(target.read_small(), str(target))
    except (Damaged, Unsupported) as error:
        events.log.warning("overwriting a checkpoint that cannot be read: %s", error)
        return None


def remove_old_files(folder: Place, old: Manifest, new: Manifest, reused: ReusedPaths | None = None) -> bool:
    """Delete what only the replaced checkpoint needed: its files, and those that it reused elsewhere.

    What other checkpoints reuse stays: ``reused`` if the caller knows it, else they are all asked. The new one is
    committed, so a failure here loses space alone: False then.
    """
    kept = {f.path for f in new.data_files} | {path for path, _, _ in new.attachments}
    own = [*(f.path for f in old.data_files if not is_reused(f.path)), *(path for path, _, _ in old.attachments)]
    try:
        root, name = root_of(folder)
        reused = reused_beside(folder) if reused is None else reused
        gone = without_links_out(
            folder, [path for path in own if path not in kept and path not in reused.get(name, set())]
        )
        signed = {signature.file_name(old)} - {signature.file_name(new)}
        storage.delete(*gone, *(folder / path for path in signed))
        if new.save != old.save:
            delete_hint(folder)  # holdfast.dcp writes its own again after the commit
        for above in {path.parent for path in gone}:
            above.delete_if_empty()
        now = reused_by(new)
        let_go(root, {at: paths - now.get(at, set()) for at, paths in reused_by(old).items()}, reused)
    except (StorageError, Unsupported) as error:
        events.log.warning("the checkpoint is committed, but older files stay: %s", error)
        return False
    return True


def commit_late(folder: Place, *, patience: float = 0.0, strict: bool = False) -> Manifest | None:
    """Commit what lies finished in ``folder``; None if nothing does.

    Writer processes may outlive their trainers for a while: waits up to ``patience`` seconds for them to end. A disk
    that keeps a finished save from being committed is logged; with ``strict`` its StorageError is raised.
    """
    if (folder / manifest.FILE_NAME).is_file():
        return None
    until = time.monotonic() + patience
    while _is_written_to(folder):
        if time.monotonic() > until:
            return None
        time.sleep(0.05)
    refused: StorageError | None = None
    for save in sorted({name for path in folder.files_below() if (name := part.save_of(path))}):
        try:
            record = _prove(folder, save)
            if record is not None:
                commit(folder, record, replaces=False)
                log.info("%s: committed save %s, which all its ranks had finished", folder, save)
                take_away(folder, save)
                return record
        except (HoldfastError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # The latter of parts that contradict each other in a way that only joining them shows.
            log.warning("%s: save %s is finished but cannot be committed: %s", folder, save, error)
            refused = error if isinstance(error, StorageError) else refused
    if strict and refused is not None:
        raise refused
    return None


def finished(folder: Place) -> str | None:
    """The save in ``folder`` that all its ranks had finished, and that `commit_late` would commit; None if none is.

    Raises StorageError.
    """
    if (folder / manifest.FILE_NAME).is_file():
        return None
    for save in sorted({name for path in folder.files_below() if (name := part.save_of(path))}):
        try:
            if _prove(folder, save) is not None:
                return save
        except StorageError:
            raise
        except (HoldfastError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            log.debug("%s: save %s is no whole one: %s", folder, save, error)  # as `commit_late` finds
    return None


def sizes_of_save(folder: Place) -> dict[str, int]:
    """`sizes_below` of a folder with files of a save of ours; empty for one without, which on disk is not walked.

    A data set beside a run may be millions of files. Raises StorageError.
    """
    if not folder.is_remote:
        near = folder.files_near(levels=2)
        if not any(datafile.save_of(path) or part.save_of(path) for path in near):
            return {}
    return folder.sizes_below()


def _is_written_to(folder: Place) -> bool:
    if not folder.has_locks:
        return False  # a store shows whole files alone; a later look finds the parts that are missing now
    return bool(folder.living([path for path in folder.files_below() if path.endswith(".safetensors")]))


def _prove(folder: Place, save: str) -> Manifest | None:
    """The whole manifest of a save, if every part is there and every file is what its part says."""
    parts: dict[int, Part] = {}
    for path in folder.files_below():
        if part.save_of(path) == save:
            one = part.decode((folder / path).read_small(), str(folder / path))
            parts[one.rank] = one
    first = parts.get(0)
    if first is None or first.manifest is None or sorted(parts) != [*range(len(parts))]:
        return None
    if len(parts) != first.world_size:
        return None
    if any(one.save != save or one.world_size != first.world_size for one in parts.values()):
        raise Damaged(f"the parts of save {save} contradict each other")
    home = LinkCheck(folder)
    for one in parts.values():
        for path, nbytes, header_bytes, digest, *_ in [*one.records, *(reuse.record for reuse in one.reused)]:
            _prove_file(home.path(path), nbytes, header_bytes, digest)
    for path, nbytes, digest in first.manifest.attachments:
        data = home.path(path).read_small()
        if len(data) != nbytes or blocks.digest(data) != digest:
            raise Damaged(f"{folder / path} is not what was attached")
    return joined(first.manifest, [Share(parts[rank].records, parts[rank].reused) for rank in sorted(parts)])


def _prove_file(path: Place, nbytes: int, header_bytes: int, digest: str) -> None:
    # As much as a commit in time would know: the sums in the header prove every block when it is read.
    header, size = path.read_start(header_bytes)
    if size != nbytes or blocks.digest(header) != digest:
        raise Damaged(f"{path} is not what its rank wrote")


def take_away(folder: Place, save: str, rank: int | None = None) -> None:
    """Delete the parts of a save, or that of one rank, once it is committed or given up."""
    below = folder / "parts"
    try:
        if rank is not None:
            (folder / part.file_name(rank, save)).delete()
        else:
            storage.delete(*(below / path for path in below.files_below() if part.save_of(f"parts/{path}") == save))
        below.delete_if_empty()
    except StorageError as error:
        log.warning("a part of a save stays behind, to be swept later: %s", error)
