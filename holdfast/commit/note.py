"""What one rank tells the first one when its files are durable, and what follows from the notes of all ranks.

`settle` makes and joins them. Pure. Notes hold no paths: these follow from section, rank and volume.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.commit.draft import Share
from holdfast.ondisk.datafile import file_name
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import Cite
from holdfast.ondisk.signature import SignedFile
from holdfast.write.datafiles import DataFile, Written

_DIGEST = 16  # bytes of an XXH3-128


class Note(msgspec.Struct, array_like=True):
    """What one rank has done: its durable files, its plan, and what it reuses.

    A file is its section, volume, bytes, bytes of its header, and the header's digest, followed by the header's SHA-256
    if the save is signed.
    """

    files: list[tuple[str, int, int, int, bytes]]
    plan: str
    reused: list[Cite] = []


def note_of(files: Sequence[DataFile], written: Sequence[Written], plan: str, reused: list[Cite]) -> Note:
    """The note about files whose headers are known."""
    rows = [
        (file.section, file.volume, w.bytes, w.header_bytes, bytes.fromhex(w.header_digest + w.header_sha256))
        for file, w in zip(files, written, strict=True)
    ]
    return Note(rows, plan, reused)


def shares_of(notes: Sequence[Note], save: str) -> list[Share]:
    """What each rank has done, its files with their paths."""
    return [Share(_records(rank, len(notes), note, save), note.reused) for rank, note in enumerate(notes)]


def signed_files(record: Manifest, notes: Sequence[Note], save: str) -> list[SignedFile]:
    """What is signed of the data files of a manifest."""
    sha256 = {
        file.path: row[-1][_DIGEST:].hex()
        for rank, note in enumerate(notes)
        for file, row in zip(_records(rank, len(notes), note, save), note.files, strict=True)
    }
    return [SignedFile(sha256[file.path]) for file in record.data_files]


def _records(rank: int, size: int, note: Note, save: str) -> list[FileRecord]:
    return [
        FileRecord(file_name(section, rank, size, save, volume), nbytes, header, sums[:_DIGEST].hex())
        for section, volume, nbytes, header, sums in note.files
    ]
