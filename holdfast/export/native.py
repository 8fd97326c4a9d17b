"""Our own format: whole tensors in few data files, summed by blocks, and a manifest.

Ids and times come from the source, so that converting it again gives the same bytes on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from platform import python_version
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Unsupported
from holdfast.export.copying import sum_of
from holdfast.export.draft import Draft, Fixed, Span, packed
from holdfast.export.selection import Leaf, Selection
from holdfast.export.torch_file import data_of
from holdfast.ondisk import blocks, datafile, dtypes, manifest, names, values
from holdfast.ondisk.box import whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.version import __version__
from holdfast.storage.local.disk import SECTOR


@dataclass(frozen=True)
class _File:
    """One data file: ``leaves`` are the tensors of ``pieces``, by key. The values of ranks have none."""

    section: str
    number: int
    count: int
    pieces: list[Piece]
    leaves: dict[str, Leaf]
    save: str

    @property
    def path(self) -> str:
        return datafile.file_name(self.section, self.number, self.count, self.save)

    def header(self, sums: str | None = None) -> bytes:
        shapes = {
            p.key: p.lengths for p in self.pieces if not p.lengths and datafile.stored_as_bytes(p.dtype)
        }  # a number of a type kept as bytes is stored as one row of bytes
        return datafile.build_header(
            self.pieces, save=self.save, rank=self.number, section=self.section, shapes=shapes,
            sums="0" * datafile.sums_length(self.pieces) if sums is None else sums,
        )  # fmt: skip


def draft(
    checkpoint: Checkpoint, selection: Selection, *, identity: str, step: int | None, max_file_bytes: int
) -> Draft:
    """The data files by section, each at most ``max_file_bytes`` long if its tensors let it; ``identity`` is hex."""
    save = identity[:16]
    files = list(_files(selection, max_file_bytes, save))
    spans = []
    for file in files:
        start = len(file.header())
        for piece in file.pieces:
            leaf = file.leaves[piece.key]
            spans.append(Span(leaf, whole(leaf.shape), file.path, start + piece.begin))

    def finish(sums: Sequence[str]) -> Iterator[Fixed]:
        at, records = 0, []
        for file in files:
            header = file.header(",".join(sums[at : at + len(file.pieces)]))
            at += len(file.pieces)
            nbytes = len(header) + sum(p.nbytes for p in file.pieces)
            records.append(FileRecord(file.path, nbytes, len(header), blocks.digest(header)))
            yield Fixed(file.path, 0, header)
        index = {leaf.name: i for i, file in enumerate(files) for leaf in file.leaves.values()}
        per_rank, version = {}, manifest.VERSION
        for section in dict.fromkeys(map(names.section_of, selection.per_rank)):
            paths = {p: s for p, s in selection.per_rank.items() if names.section_of(p) == section}
            per_rank.update(dict.fromkeys(paths, manifest.ranges([len(records)] * selection.world_size)))
            number = sum(file.section == section for file in files)
            record, needed = yield from _values_of_ranks(checkpoint, selection, paths, section, number, save)
            records.append(record)
            version = max(version, needed)
        attachments = []
        for name in checkpoint.attachments:
            data = checkpoint.attachment(name)
            attachments.append((f"attachments/{name}", len(data), blocks.digest(data)))
            yield Fixed(f"attachments/{name}", 0, data)
        commit = Manifest(
            save=save,
            run=checkpoint.manifest.run or save,
            step=checkpoint.step if step is None else step,
            created=checkpoint.manifest.created or _newest(checkpoint),
            producer={"holdfast": __version__, "torch": str(torch.__version__), "python": python_version()},
            world_size=selection.world_size,
            files=[manifest.file_row(file) for file in records],
            tensors={name: _record(leaf, index[name]) for name, leaf in selection.tensors.items()},
            values=selection.values,
            containers=selection.containers,
            aliases=selection.aliases,
            per_rank=per_rank,
            attachments=attachments,
        )
        yield Fixed(manifest.FILE_NAME, 0, manifest.encode(manifest.versioned(commit, least=version)))

    sizes = {file.path: len(file.header()) + sum(p.nbytes for p in file.pieces) for file in files}
    return Draft(sizes, spans, "blocks", finish)


def _record(leaf: Leaf, file: int) -> TensorRecord:
    return TensorRecord(leaf.dtype, leaf.shape, None, "" if 0 in leaf.shape else str(file))


def _files(selection: Selection, limit: int, save: str) -> Iterator[_File]:
    sections: dict[str, list[Leaf]] = {}
    for leaf in selection.tensors.values():
        sections.setdefault(names.section_of(leaf.name), []).append(leaf)
    with_values = {names.section_of(path) for path in selection.per_rank}
    for section, leaves_of_section in sections.items():
        groups = packed(leaves_of_section, limit)
        for number, group in enumerate(groups):
            leaves = {names.in_section(leaf.name): leaf for leaf in group}
            if len(leaves) < len(group):
                raise Unsupported(f"two tensors of section {section!r} have the same key: rename the one at the top")
            pieces = arranged(Piece(key, leaf.dtype, leaf.shape, leaf.nbytes) for key, leaf in leaves.items())
            count = len(groups) + (section in with_values)
            yield _File(section, number, count, pieces, leaves, save)


def arranged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in file order; of one width those that are whole sectors come first, so that most begin at one."""
    return datafile.arrange(sorted(pieces, key=lambda p: p.nbytes % SECTOR != 0))


def _values_of_ranks(
    checkpoint: Checkpoint, selection: Selection, paths: dict[str, str], section: str, number: int, save: str
) -> Generator[Fixed, None, tuple[FileRecord, int]]:
    """A data file of what differs by rank, in memory one value at a time; returns its record, and which version of the
    format its values need."""
    version = manifest.VERSION

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal version
        for path, source in paths.items():
            for rank in range(selection.world_size):
                tree, inner = _encoded(checkpoint.per_rank(source, rank))
                version = max(version, values.version_of_tree(tree))
                key = f"{names.in_section(path)}@{rank}"
                yield key, torch.frombuffer(bytearray(msgspec.json.encode(tree)), dtype=torch.uint8)
                yield from ((f"{key}/{number}", tensor) for number, tensor in enumerate(inner))

    unplaced = (Piece(key, dtypes.name_of(t.dtype), tuple(t.shape), t.nbytes) for key, t in parts())
    pieces = datafile.arrange(unplaced)
    file = _File(section, number, number + 1, pieces, {}, save)
    begins, start = {p.key: p.begin for p in pieces}, len(file.header())
    sums: dict[str, str] = {}
    for key, tensor in parts():
        data = data_of(tensor)
        sums[key] = sum_of(data, "blocks")
        yield Fixed(file.path, start + begins[key], data)
    header = file.header(",".join(sums[p.key] for p in pieces))
    yield Fixed(file.path, 0, header)
    return FileRecord(file.path, start + sum(p.nbytes for p in pieces), start, blocks.digest(header)), version


def _encoded(value: Any) -> tuple[values.JSON, list[torch.Tensor]]:
    """A value of one rank as JSON, and the tensors that the JSON refers to."""
    inner: list[torch.Tensor] = []

    def refer(tensor: torch.Tensor) -> str:
        inner.append(tensor)
        return str(len(inner) - 1)

    return values.encode_tree(value, refer), inner


def _newest(checkpoint: Checkpoint) -> str:
    """When the source was last changed: the time of a checkpoint whose format keeps none."""
    paths = {checkpoint.files.path(i) for i in range(len(checkpoint.manifest.files))}
    newest = max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
    return datetime.fromtimestamp(newest, timezone.utc).isoformat(timespec="milliseconds")
