"""A part: what one rank leaves beside its durable files, so that its save can be committed even if it dies.

Written by background saves, joined by `commit/commit.py`. Pure: parts come and go as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from holdfast.errors import Damaged
from holdfast.ondisk.manifest import MAX_RANKS, VERSIONS, FileRecord, Manifest, check_file, check_said, is_sealed, seal
from holdfast.ondisk.manifest import VERSION as FIRST

FORMAT = "holdfast-part"
VERSION, REUSING, LATER = 1, 2, 3
"""A part that reuses has a version of its own, and so has one whose manifest is of a later version than the first: a
reader that does not know these must not take the rest for the whole."""

_ID = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"parts/(?P<rank>\d{5,})\.(?P<save>[0-9a-f]{16})\.json")


class ReusedFile(msgspec.Struct, array_like=True, frozen=True):
    """A data file of an earlier save that holds what one rank would have written of these tensors.

    ``file`` is its record, save id included. ``tensors`` are positions in the manifest's ``tensors``, as ranges; all
    are of the section of the file, and of one ``volume`` of it in this save.

    We rejected names. All ranks follow one plan, so positions are enough, and a rank with thousands of tensors reports
    what it reuses in some hundred bytes.
    """

    file: tuple[str, int, int, str, str]
    tensors: str
    volume: int = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(*self.file)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's files of one save, and what it reuses instead of writing it.

    The first rank's part also holds the manifest, all but sizes and digests, as if every rank wrote all it owns.
    """

    format: str = FORMAT
    version: int = VERSION
    save: str
    rank: int
    world_size: int
    files: list[tuple[str, int, int, str]]
    reused: list[ReusedFile] = msgspec.field(name="cites", default_factory=list)
    manifest: Manifest | None = None

    @property
    def records(self) -> list[FileRecord]:
        return [FileRecord(*file) for file in self.files]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Part)


def version_for(reused: Sequence[ReusedFile], manifest: Manifest | None) -> int:
    """The version of a part that says this."""
    if manifest is not None and manifest.version > FIRST:
        return LATER
    return REUSING if reused else VERSION


def file_name(rank: int, save: str) -> str:
    """``parts/00003.7c1e09ab52d3f410.json``: relative to the checkpoint."""
    return f"parts/{rank:05d}.{save}.json"


def save_of(path: str) -> str | None:
    """The save id in a part's relative path, or None if this is no part."""
    match = _NAME.fullmatch(path)
    return match["save"] if match else None


def encode(part: Part) -> bytes:
    """The bytes of a part, sealed as a manifest is."""
    return seal(_encoder.encode(part))


def decode(data: bytes, where: str) -> Part:
    """Read a part; ``where`` is named in errors.

    Raises Damaged if it is truncated, altered or of another version, or names a file outside of its checkpoint.
    """
    try:
        part = _decoder.decode(data) if is_sealed(data) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Damaged(f"{where} is no part of a save: {error}") from None
    if part is None or (part.format, part.version) != (FORMAT, version_for(part.reused, part.manifest)):
        raise Damaged(f"{where} is truncated, altered or of another version")
    fault = _fault(part)
    if fault:
        raise Damaged(f"{where} is no part of a save: {fault}")
    return part


def _fault(part: Part) -> str | None:
    """What it says that cannot be. It is used before there is a manifest that is proved as a whole."""
    if not _ID.fullmatch(part.save) or not 0 <= part.rank < part.world_size <= MAX_RANKS:
        return f"rank {part.rank} of {part.world_size} of save {part.save[:40]!r} cannot be"
    manifest = part.manifest
    if manifest is not None and (manifest.save, manifest.world_size) != (part.save, part.world_size):
        return "its manifest is that of another save"
    if manifest is not None and manifest.version not in VERSIONS:
        return f"its manifest has version {manifest.version}, which this holdfast does not read"
    try:
        for file in part.files:
            check_file(file)
        for reuse in part.reused:
            check_file(reuse.file)
        if manifest is not None:
            check_said(manifest)
    except ValueError as error:
        return str(error)
    return None
