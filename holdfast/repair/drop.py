"""Deletes sections of a checkpoint, such as the optimizer, without writing the rest again."""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.commit import sections as parts
from holdfast.commit.reused import ReusedPaths
from holdfast.errors import Mismatch
from holdfast.events import log
from holdfast.formats.own import read_known
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns, matcher, patterns_in, quoted
from holdfast.policies.signing.keys import Key, found_signature, read_signature, signer
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline


@dataclass(frozen=True)
class Dropped:
    """What `drop` deleted: the ``sections``, and how many data files with how many bytes.

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
    """Take sections of a checkpoint away for good, such as the optimizer.

    What stays is the same save, and loads with ``only=``. Whole files are deleted and none is written: a new manifest
    replaces the old one in one step, and a crash leaves the checkpoint with the sections or without. One process calls
    it, while nobody saves to ``path``.

    Args:
        path: The checkpoint, a path, a URL or a place in a store.
        sections: Names or patterns of first keys of the state, such as ``"optim*"``.
        dry_run: Delete nothing, and return what would go.
        deadline: Seconds to wait for any one answer of a store.
        sign: The private key that signed the checkpoint, to sign what is left. Without it, a signature is deleted with
            a warning.

    Returns:
        What was deleted. Files that another checkpoint shares go with the last one that names them.

    Raises:
        Mismatch: A name or pattern fits no section.
        ValueError: No tensor would be left.
        Unsupported: What stays shares bytes with what goes.
        Untrusted: ``sign`` is another key than the one that signed it. Nothing is dropped.
        NotACheckpoint: There is no checkpoint.
        Damaged: The manifest cannot be read.
        StorageError: The disk or store refused.
    """
    folder, patterns = with_deadline(location(path), deadline), patterns_in(sections, "sections=")
    record = read_known(folder)
    sections_there, lost = parts.sections_of(record), parts.dropped_of(record)
    if odd := [text for text in patterns if not any(map(matcher(text), [*sections_there, *lost]))]:
        names = ", ".join(sections_there) or "none"
        raise Mismatch(f"{path} has no section {quoted(odd, sections_there)}; it has {names}")
    return _drop(folder, record, patterns, None, sign, dry_run=dry_run)


def drop_from(
    folder: Place, sections: Patterns, *, dry_run: bool = False, cited: ReusedPaths | None = None,
    sign: Key | None = None,
) -> Dropped | list[str]:  # fmt: skip
    """`drop`; if no section fits, nor one that was dropped before, the names of the sections.

    ``cited``: the files that other checkpoints reuse, if the caller knows.
    """
    record = read_known(folder)
    there, lost = parts.sections_of(record), parts.dropped_of(record)
    if not any(map(matcher(sections), [*there, *lost])):
        return there
    return _drop(folder, record, sections, cited, sign, dry_run=dry_run)


def _drop(
    folder: Place, record: Manifest, sections: Patterns, cited: ReusedPaths | None, sign: Key | None, *, dry_run: bool
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
    """The signature of what stays, made from the sums of the old signature; no file is trusted."""
    key = signer(sign)
    if key is None:
        if found_signature(folder, record) is not None:
            log.warning(
                "%s is not signed any more: pass sign= to drop, or sign what is left (holdfast.tools.sign)", folder
            )
        return None
    before = read_signature(folder, record, bytes.fromhex(key.public))
    files = {file.path: signed for file, signed in zip(record.data_files, before.files, strict=True)}
    return key(rest, [files[file.path] for file in rest.data_files], before.attachments)
