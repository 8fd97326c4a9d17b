"""The health of a checkpoint without reading it all: a quick check of its files, and whether it is signed.

The page of a checkpoint calls it. Never calls a checkpoint whole that it has not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError, Untrusted
from holdfast.ondisk import signature
from holdfast.policies.signing.keys import found_signature
from holdfast.read.damage import Verified

ASKED = 256
"""Files of a checkpoint in a store whose headers are read by default; of a local one all are."""

TOLD, FEW = 100, 3
"""Faults that a page lists, and what each of them hits that is named."""


@dataclass(frozen=True)
class Health:
    """``kind``: "good", "bad" or "" (not looked at). ``told``: damages, or why nothing was looked at."""

    kind: str
    words: str
    note: str
    told: tuple[str, ...] = ()
    hit: tuple[str, ...] = ()


def health_of(checkpoint: Checkpoint, *, look: bool | None = None) -> Health:
    """Headers, sizes and attachments, looked at; ``look=None``: unless that would be many requests to a store."""
    if checkpoint.format != "holdfast":
        return Health("", "not checked", "the format keeps no sums")
    files = len(checkpoint.manifest.files)
    if look is None:
        look = not checkpoint.path.is_remote or files <= ASKED
    if not look:
        return Health("", "not checked", f"{files} headers were not asked for")
    verified = checkpoint.verify(deep=False, raises=False)
    if verified.whole:
        return Health("good", "whole", "by sizes and headers")
    hit = len(verified.tensors)
    return Health(
        "bad", "damaged", f"{hit} tensor{'s are' if hit != 1 else ' is'} hit", _faults(verified), verified.tensors
    )


def _faults(verified: Verified) -> tuple[str, ...]:
    """Each fault once, with what it hits: a file that is cut hits thousands of tensors in one and the same way."""
    faults: dict[tuple[str, str], list[str]] = {}
    for damage in verified.damages:
        faults.setdefault((damage.file, damage.what), []).append(str(damage))
    return tuple(
        f"{', '.join(hit[:FEW])}{f' and {len(hit) - FEW} more' if len(hit) > FEW else ''}: {what}"
        for (_, what), hit in [*faults.items()][:TOLD]
    )


def signature_of(checkpoint: Checkpoint) -> tuple[str, str, str, str]:
    """(kind, words, note, key): whether there is a signature, and whether somebody who is trusted made it."""
    if checkpoint.signed_by is not None:
        return "good", "signed", f"by the key {checkpoint.signed_by[:8]}…", checkpoint.signed_by
    if checkpoint.format != "holdfast":
        return "", "not signed", "this format has none", ""
    for key in _keys(checkpoint):
        return "warn", "signed, not checked", "--require KEY checks it", key
    return "", "not signed", "", ""


def _keys(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        data = found_signature(checkpoint.path, checkpoint.manifest)
        if data is not None:
            yield signature.decode(data, str(checkpoint.path))[0].key
    except (Untrusted, HoldfastError):  # what cannot be read signs nothing
        return
