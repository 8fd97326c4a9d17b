"""The story of a drop: a checkpoint loses sections, its optimizer say, and no byte of the rest is written again.

Users call `drop`, the manager's steps `drop_from` for what `Keep` says. Never leaves a moment without a checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.checkpoint import read_known
from holdfast.commit import sections as parts
from holdfast.commit.citations import Cited
from holdfast.errors import Mismatch
from holdfast.events import log
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns, matcher, patterns_in, quoted, unfit
from holdfast.policies.signing.keys import Key, found_signature, read_signature, signer
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline


@dataclass(frozen=True)
class Dropped:
    """What `drop` took away: the ``sections``, and of the checkpoint's data files so many with so many bytes.

    Files that another checkpoint shares go with the last one that names them.
    """

    path: str
    sections: tuple[str, ...]
    files: int
    nbytes: int


def drop(
    path: str | os.PathLike[str] | Place, sections: Patterns, *, dry_run: bool = False, deadline: float = DEADLINE,
    sign: Key | None = None,
) -> Dropped:  # fmt: skip
    """Take ``sections`` of the checkpoint at ``path`` away for good: ``holdfast.drop(path, "optimizer")``.

    ``sections``: names or patterns of first keys of the state (``"optim*"``); each must fit one that is there, or was.
    What stays is the same save, and loads with ``only=`` (or into a state without them). A data file holds one section,
    so whole files go and none is written; a new manifest replaces the old one in one step, and a crash leaves the
    checkpoint with the sections or without.
    Sections that are gone already are passed over. ``dry_run=True`` only tells what would go. Called by one process,
    while nobody saves to ``path``. ``deadline``: seconds to wait for any one answer of a store.

    What was signed is not what is left: the signature goes, with a warning, unless ``sign`` is the private key that
    made it and signs anew. Untrusted is raised, and nothing dropped, if it did not make it.

    Whoever has the checkpoint open and reads what is gone is told so: Damaged. Raises Mismatch if a name or pattern
    fits no section, ValueError if no tensor would be left, Unsupported if what stays shares bytes with what goes,
    NotACheckpoint, Damaged, StorageError.
    """
    folder, patterns = with_deadline(location(path), deadline), patterns_in(sections, "sections=")
    record = read_known(folder)
    there, lost = parts.sections_of(record), parts.dropped_of(record)
    if odd := unfit(patterns, [*there, *lost]):
        raise Mismatch(f"{path} has no section {quoted(odd, there)}; it has {', '.join(there) or 'none'}")
    return _drop(folder, record, patterns, None, sign, dry_run=dry_run)


def drop_from(
    folder: Place, sections: Patterns, *, dry_run: bool = False, cited: Cited | None = None,
    sign: Key | None = None,
) -> Dropped | list[str]:  # fmt: skip
    """`drop`; where no section fits, nor has ever, the names of those that there are.

    ``cited``: what the other checkpoints cite, if the caller knows.
    """
    record = read_known(folder)
    there, lost = parts.sections_of(record), parts.dropped_of(record)
    if not any(map(matcher(sections), [*there, *lost])):
        return there
    return _drop(folder, record, sections, cited, sign, dry_run=dry_run)


def _drop(
    folder: Place, record: Manifest, sections: Patterns, cited: Cited | None, sign: Key | None, *, dry_run: bool
) -> Dropped:  # fmt: skip
    gone = list(filter(matcher(sections), parts.sections_of(record)))
    if not gone:  # they went before
        return Dropped(str(folder), (), 0, 0)
    rest = parts.without(record, gone)
    if not rest.tensors:
        raise ValueError(f"{folder} would have no tensor left without {', '.join(gone)}: delete it instead")
    files = parts.lost_files(record, rest)
    dropped = Dropped(str(folder), tuple(gone), len(files), sum(nbytes for _, nbytes in files))
    if not dry_run:
        parts.replace(folder, record, rest, cited, signed=_signed(folder, record, rest, sign))
        log.info("%s: dropped %s, %d bytes", folder, ", ".join(gone), dropped.nbytes)
    return dropped


def _signed(folder: Place, record: Manifest, rest: Manifest, sign: Key | None) -> bytes | None:
    """The signature of what stays, made from sums that were signed before: nothing is believed that lies there."""
    key = signer(sign)
    if key is None:
        if found_signature(folder, record) is not None:
            log.warning("%s is not signed any more: pass sign= to drop, or sign what is left (holdfast.sign)", folder)
        return None
    before = read_signature(folder, record, bytes.fromhex(key.public))
    files = {file.path: signed for file, signed in zip(record.data_files, before.files, strict=True)}
    return key(rest, [files[file.path] for file in rest.data_files], before.attachments)
