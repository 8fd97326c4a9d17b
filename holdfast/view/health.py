"""What is known of a checkpoint's health without reading it: a quick look at its files, and whether it is signed.

The page of a checkpoint asks. Never calls anything whole that it has not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.checkpoint import Checkpoint
from holdfast.engine.stores.place import Place
from holdfast.errors import HoldfastError, Untrusted
from holdfast.keys import found_signature
from holdfast.ondisk import signature

ASKED = 256
"""Files of a checkpoint in a store whose headers are asked for without being told to; of a local one all are."""

TOLD = 100


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
        look = not isinstance(checkpoint.path, Place) or files <= ASKED
    if not look:
        return Health("", "not checked", f"{files} headers were not asked for")
    found = checkpoint.verify(deep=False, raises=False)
    if found.whole:
        return Health("good", "whole", "by sizes and headers")
    told = tuple(f"{damage}: {damage.what}" for damage in found.damages[:TOLD])
    return Health("bad", "damaged", f"{len(found.tensors)} tensors are hit", told, found.tensors)


def signature_of(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """(kind, words, note): whether there is a signature, and whether somebody who is trusted made it."""
    if checkpoint.signed_by is not None:
        return "good", "signed", f"by the required key {checkpoint.signed_by[:16]}…"
    if checkpoint.format != "holdfast":
        return "", "not signed", "only checkpoints of holdfast can be"
    for key in _keys(checkpoint):
        return "warn", "signed, not checked", f"by {key[:16]}…; --require KEY checks it"
    return "", "not signed", ""


def _keys(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        data = found_signature(checkpoint.path, checkpoint.manifest)
        if data is not None:
            yield signature.decode(data, str(checkpoint.path))[0].key
    except (Untrusted, HoldfastError):  # what cannot be read signs nothing
        return
