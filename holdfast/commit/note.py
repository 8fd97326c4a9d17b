"""What one rank tells the first once its files are durable, and what follows of all such notes.

`SaveWork` makes and joins them. Pure. Paths are not told: they follow from section, rank and volume.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.commit.citing import Did
from holdfast.ondisk.datafile import file_name
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Cite
from holdfast.ondisk.signature import SignedFile
from holdfast.write.image import Image, Written

_DIGEST = 16  # bytes of an XXH3-128


class Note(msgspec.Struct, array_like=True):
    """What one rank did: its durable files, its plan, and what it cites.

    A file is its section, volume, bytes, bytes of its header, and the header's digest, followed by the header's SHA-256
    if the save is signed.
    """

    files: list[tuple[str, int, int, int, bytes]]
    plan: str
    cites: list[Cite] = []


def note_of(images: Sequence[Image], written: Sequence[Written], plan: str, cites: list[Cite]) -> Note:
    """Of files whose headers are known."""
    files = [
        (image.section, image.volume, w.bytes, w.header_bytes, bytes.fromhex(w.header_digest + w.header_sha256))
        for image, w in zip(images, written, strict=True)
    ]
    return Note(files, plan, cites)


def did_of(notes: Sequence[Note], save: str) -> list[Did]:
    """What each rank did, its files with their paths."""
    return [Did(_records(rank, len(notes), note, save), note.cites) for rank, note in enumerate(notes)]


def signed_files(record: Manifest, notes: Sequence[Note], save: str) -> list[SignedFile]:
    """What is signed of the data files of a manifest."""
    sha256 = {
        file.path: told[-1][_DIGEST:].hex()
        for rank, note in enumerate(notes)
        for file, told in zip(_records(rank, len(notes), note, save), note.files, strict=True)
    }
    return [SignedFile(sha256[file.path]) for file in record.data_files]


def _records(rank: int, size: int, note: Note, save: str) -> list[FileRecord]:
    return [
        FileRecord(file_name(section, rank, size, save, volume), nbytes, header, sums[:_DIGEST].hex())
        for section, volume, nbytes, header, sums in note.files
    ]
