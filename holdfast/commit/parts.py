"""Saves that nobody committed although every rank had finished: found by their parts, proved, committed late.

The manager calls `commit_late` before it restores, `holdfast.recover` for a single folder. Never commits a save of
which a file, a header or a part is missing, and never one that a living process still writes.
"""

from __future__ import annotations

import time

from holdfast.commit.commit import commit
from holdfast.commit.draft import Share, joined
from holdfast.errors import Damaged, HoldfastError, StorageError
from holdfast.events import log
from holdfast.ondisk import blocks, datafile, manifest, part
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.part import Part
from holdfast.storage import storage
from holdfast.storage.links import LinkCheck
from holdfast.storage.place import Place


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
        for path, nbytes, header_bytes, digest, *_ in [*one.records, *(cite.record for cite in one.cites)]:
            _prove_file(home.path(path), nbytes, header_bytes, digest)
    for path, nbytes, digest in first.manifest.attachments:
        data = home.path(path).read_small()
        if len(data) != nbytes or blocks.digest(data) != digest:
            raise Damaged(f"{folder / path} is not what was attached")
    return joined(first.manifest, [Share(parts[rank].records, parts[rank].cites) for rank in sorted(parts)])


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
