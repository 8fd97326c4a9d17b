"""The commit: all parts joined into one manifest, created last, whole or not at all.

The first rank calls `draft`, `complete` and `commit` while it settles a save, `parts` long after. Never replaces a
manifest that it was not told to.
"""

from __future__ import annotations

import secrets

from holdfast import events
from holdfast.commit.citations import Cited, citations_of, cited_beside, let_go, root_of
from holdfast.commit.folder import delete_hint, taken
from holdfast.errors import Damaged, HoldfastError, StorageError, Unsupported
from holdfast.ondisk import manifest, signature
from holdfast.ondisk.cited import is_cited
from holdfast.ondisk.manifest import Manifest
from holdfast.storage import storage
from holdfast.storage.cloud.conditions import STALE
from holdfast.storage.links import without_links_out
from holdfast.storage.place import Place
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


def remove_old_files(folder: Place, old: Manifest, new: Manifest, cited: Cited | None = None) -> bool:
    """Delete what only the replaced checkpoint needed: its files, and those that it cited elsewhere.

    What other checkpoints cite stays: ``cited`` if the caller knows, else they are all asked. The new one is committed,
    so a failure here loses space alone: False then.
    """
    kept = {f.path for f in new.data_files} | {path for path, _, _ in new.attachments}
    own = [*(f.path for f in old.data_files if not is_cited(f.path)), *(path for path, _, _ in old.attachments)]
    try:
        root, name = root_of(folder)
        cited = cited_beside(folder) if cited is None else cited
        gone = without_links_out(
            folder, [path for path in own if path not in kept and path not in cited.get(name, set())]
        )
        signed = {signature.file_name(old)} - {signature.file_name(new)}
        storage.delete(*gone, *(folder / path for path in signed))
        if new.save != old.save:
            delete_hint(folder)  # what saves through holdfast.dcp leave is written anew after the commit
        for above in {path.parent for path in gone}:
            above.delete_if_empty()
        now = citations_of(new)
        let_go(root, {at: paths - now.get(at, set()) for at, paths in citations_of(old).items()}, cited)
    except (StorageError, Unsupported) as error:
        events.log.warning("the checkpoint is committed, but older files stay: %s", error)
        return False
    return True
