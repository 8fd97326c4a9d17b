"""manifest.json: the commit record of a checkpoint.

`save` encodes one, `open` decodes one, foreign formats make one. Never reads or writes a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.ondisk import blocks, dtypes, spans, values
from holdfast.ondisk.cells import TensorRecord, frozen, record_fault
from holdfast.ondisk.containers import Note, fault_of
from holdfast.ondisk.datafile import MAX_HEADER
from holdfast.ondisk.spans import expand as expand
from holdfast.ondisk.spans import ranges as ranges

FILE_NAME = "manifest.json"
FORMAT, VERSION = "holdfast", 1

VERSIONS = (VERSION, 2)
"""Those that are read. What version 1 can say is written as version 1; `versioned` knows what needs version 2."""

NOTES = "holdfast-manager.json"
"""The attachment in which a manager keeps the metric of a step."""

MAX_RANKS = 1 << 24
"""More than ever saved together; a greater number would only make a reader count to it."""

MAX_DEPTH = 200
"""Keys in a name: containers within containers, which are walked one within the other."""

_ROW = [str, int, int, str, str]
_PLAIN_PATH = re.compile(r"[^./\\\0][^/\\\0]*(?:/[^./\\\0][^/\\\0]*)*")  # no part of it begins with a dot
_ID = re.compile(r"[0-9a-f]{16}")
_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\s*$')


class FileRecord(NamedTuple):
    """A data file: path relative to the checkpoint, its size, and what proves its header.

    ``save`` is the id of another save that wrote it, if the piece is reused; else None and not in the file.
    """

    path: str
    bytes: int
    header_bytes: int
    header_digest: str
    save: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of a save joined; field order is the order in the file. ``digest`` is not a field: it is the seal."""

    format: str = FORMAT
    version: int = VERSION
    save: str
    run: str
    step: int | None
    created: str
    producer: dict[str, str]
    world_size: int
    files: list[list[str | int]]
    tensors: dict[str, TensorRecord]
    values: dict[str, Any]
    containers: dict[str, Note]
    aliases: dict[str, str]
    per_rank: dict[str, str]
    attachments: list[tuple[str, int, str]]

    @property
    def data_files(self) -> list[FileRecord]:
        return [FileRecord(*f) for f in self.files]  # type: ignore[arg-type]


class _Head(msgspec.Struct):
    format: str
    version: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)
_head_decoder = msgspec.json.Decoder(_Head)


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, sealed by a digest of all that stands before it.

    Raises ValueError for what `decode` would refuse: nothing is committed that cannot be opened again.
    """
    manifest = versioned(manifest)
    _check(manifest)
    return seal(_encoder.encode(manifest))


def versioned(manifest: Manifest, least: int = VERSION) -> Manifest:
    """The same with the version that it needs, or ``least``: that of the values of ranks, which it does not hold."""
    version = max(manifest.version, least, _version_needed(manifest))
    return manifest if version == manifest.version else msgspec.structs.replace(manifest, version=version)


def _version_needed(manifest: Manifest) -> int:
    notes = 1 if all(type(note) is str for note in manifest.containers.values()) else 2
    return max(map(values.version_of, manifest.values.values()), default=notes) if notes == 1 else notes


def seal(text: bytes) -> bytes:
    """A JSON object with one more key at its end: the digest of all that stands before it."""
    body = text[:-1]
    return body + b',"digest":"' + blocks.digest(body).encode() + b'"}'


def is_sealed(data: bytes) -> bool:
    """Whether the digest at the end of ``data`` is the one of what stands before it."""
    tail = _TAIL.search(data)
    return tail is not None and blocks.digest(data[: tail.start()]).encode() == tail[1]


def decode(data: bytes, where: str) -> Manifest:
    """Read manifest.json. ``where`` is named in errors.

    Raises NotACheckpoint if it is another program's file, Unsupported for a version from the future or a dtype that
    this torch lacks, Damaged if it is truncated, altered or contradicts itself.
    """
    try:
        head = _head_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        if data.lstrip()[:1] == b"{" and b'"holdfast"' not in data[:64] and isinstance(error, msgspec.ValidationError):
            raise NotACheckpoint(f"{where} was not written by holdfast: {error}") from None
        raise Damaged(f"{where} is truncated or altered ({error}); restore an earlier step") from None
    if head.format != FORMAT:
        raise NotACheckpoint(f"{where} has format {head.format!r}, not {FORMAT!r}")
    if head.version not in VERSIONS:
        raise Unsupported(
            f"{where} has format version {head.version}, this holdfast reads versions {VERSIONS[0]} to "
            f"{VERSIONS[-1]}: install a newer one"
        )
    if not is_sealed(data):
        raise Damaged(f"{where} is altered or truncated: its digest does not match; restore an earlier step")
    try:
        manifest = _decoder.decode(data)
        _check(manifest)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise Damaged(f"{where} contradicts itself: {error}") from None
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from None
    return manifest


def _check(manifest: Manifest) -> None:
    for raw in manifest.files:
        check_file(raw)
    claimed = check_said(manifest)
    # Each tensor has bytes of its own: what they take together is known before memory for any is asked for.
    there = sum(int(raw[1]) - int(raw[2]) for raw in manifest.files)
    if claimed > there:
        raise ValueError(f"its tensors take {claimed} bytes, its files have {there}")


def check_said(manifest: Manifest) -> int:
    """Raise ValueError for what cannot be, but for sizes of files, which a draft lacks. Returns bytes of tensors."""
    if len({raw[0] for raw in manifest.files}) < len(manifest.files):
        raise ValueError("a file is listed twice")
    for identity in (manifest.save, manifest.run):
        if not _ID.fullmatch(identity):  # names of files are made of it
            raise ValueError(f"a save or a run is called {identity[:40]!r}, not by 16 hex digits")
    if not 1 <= manifest.world_size <= MAX_RANKS:
        raise ValueError(f"{manifest.world_size} ranks cannot have saved it")
    _check_names(manifest)
    for path, size, _ in manifest.attachments:
        check_attachment(path, size)
    sound: dict[tuple[object, ...], int] = {}
    claimed = 0
    for name, record in manifest.tensors.items():
        key = (record.dtype, record.shape, frozen(record.cells), record.files)
        if key in sound:  # thousands of tensors are alike in all that is looked at here
            claimed += sound[key]
            continue
        if not dtypes.known(record.dtype):
            raise Unsupported(f"tensor {name!r} is of dtype {record.dtype!r}, which this torch does not have")
        try:
            fault = record_fault(record, len(manifest.files))
        except ValueError as error:
            fault = str(error)
        if fault:
            raise ValueError(f"tensor {name!r}: {fault}")
        sound[key] = record.nbytes
        claimed += sound[key]
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors:
            raise ValueError(f"alias {alias!r} names {name!r}, which is no tensor")
        if alias in manifest.tensors:
            raise ValueError(f"{alias!r} is an alias and a tensor")
    for path, note in manifest.containers.items():
        if fault := fault_of(note):
            raise ValueError(f"container {path!r} {fault}")
    if _version_needed(manifest) > manifest.version:
        raise ValueError(f"it says version {manifest.version}, and holds what only a later one has")
    for path, files in manifest.per_rank.items():
        numbers = spans.read(files)
        if numbers.count != manifest.world_size or numbers.largest >= len(manifest.files):
            raise ValueError(f"value {path!r} of each rank names files {files!r}")
    return claimed


def _check_names(manifest: Manifest) -> None:
    kinds: tuple[Mapping[str, Any], ...] = (manifest.tensors, manifest.aliases, manifest.values, manifest.per_rank)
    above = {path.rpartition("/")[0] for kind in (*kinds, manifest.containers) for path in kind}
    seen: set[str] = set()
    for path in above:  # a few, of thousands of leaves
        if path.count("/") >= MAX_DEPTH - 1:
            raise ValueError(f"{path[:40]!r}… is nested more than {MAX_DEPTH} deep")
        while path and path not in seen:
            seen.add(path)
            path = path.rpartition("/")[0]
    for path in seen:
        if any(path in kind for kind in kinds):
            raise ValueError(f"{path[:200]!r} is a leaf, and there are others below it")
    if len(manifest.values) + len(manifest.per_rank) + len(manifest.tensors) > len(
        {*manifest.values, *manifest.per_rank, *manifest.tensors}
    ):
        raise ValueError("one name is that of two leaves")


def check_attachment(path: str, size: int) -> None:
    """Raise ValueError for an attachment that cannot be, or that lies anywhere but among the attachments."""
    _check_path(path, reused=False)
    if not path.startswith("attachments/") or size < 0:
        raise ValueError(f"attachment {path!r} of {size} bytes cannot be")


def check_file(raw: Sequence[str | int]) -> None:
    """Raise ValueError for a row of ``files`` that cannot be, or whose path leads anywhere but to a data file."""
    if len(raw) not in (4, 5) or [type(x) for x in raw] != _ROW[: len(raw)]:
        raise ValueError(f"file {raw} is not [path, bytes, header_bytes, header_digest]")
    _check_path(str(raw[0]), reused=len(raw) == 5)
    if not 8 <= raw[2] <= min(raw[1], MAX_HEADER + 8):  # type: ignore[operator]
        raise ValueError(f"file {raw} of {raw[1]} bytes cannot have a header of {raw[2]}")


def _check_path(path: str, *, reused: bool) -> None:
    if _PLAIN_PATH.fullmatch(path):
        return
    parts = path.split("/")
    if reused and parts[0] == ".." and len(parts) > 2:
        parts = parts[1:]
    if "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"path {path!r} leaves the checkpoint")


def file_row(file: FileRecord) -> list[str | int]:
    """A record as it stands in the file: four items, five if it is reused."""
    return [x for x in file if x is not None]


def is_reused(path: str) -> bool:
    """Whether a path of a manifest leads to a sibling."""
    return path.startswith("../")


def sibling_of(path: str) -> tuple[str, str]:
    """The folder that such a path leads to, and the path there: (``step-5``, ``model/x``) for ``../step-5/model/x``."""
    _, name, below = path.split("/", 2)
    return name, below


def own_path(path: str) -> str:
    """Where a file lies in a checkpoint that reuses none: ``../step-5/model/x`` is ``model/x``."""
    return sibling_of(path)[1] if is_reused(path) else path


def origin_of(file: FileRecord, folder: str) -> str:
    """What an error about a file adds for the checkpoint in ``folder``: nothing, or whose file it reuses."""
    if not is_reused(file.path):
        return ""
    return f" (a file of {sibling_of(file.path)[0]}, written by save {file.save}, which {folder} reuses)"
