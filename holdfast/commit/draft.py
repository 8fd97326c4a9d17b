"""The manifest of a save: drafted from the plan, completed by what the ranks have written and what they reuse.

The first rank drafts and joins it when it commits a save; `commit_late` joins it later. Pure: opens
no file and asks no rank; each rank has proved that the files it reuses are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from platform import python_version
from typing import Any, NamedTuple

import msgspec
import torch

from holdfast.errors import HoldfastError
from holdfast.ondisk import datafile, manifest, names, spans, values
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.containers import Note
from holdfast.ondisk.datafile import file_name
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import ReusedFile
from holdfast.ondisk.signature import SignedFile
from holdfast.ondisk.version import __version__
from holdfast.plan.layout import OwnedJoin
from holdfast.plan.owners import Owned, PlannedTensor
from holdfast.plan.plan import Plan, file_of
from holdfast.state.layers import KEY, encode_kinds
from holdfast.write.datafiles import DataFile, Written


@dataclass(frozen=True)
class Identity:
    """What a save is called: its own id, its run's, its step, how many ranks make it, and which of them were lost."""

    save: str
    run: str
    step: int | None
    world_size: int
    lost: tuple[int, ...] = ()


def draft(
    identity: Identity, plan: Plan, plain: Mapping[str, Any], layers: Mapping[str, str], owned: OwnedJoin,
    attachments: list[tuple[str, int, str]],
) -> Manifest:  # fmt: skip
    """The manifest of a save, all but the sizes and digests of its files, which only their writers know."""
    kind_of = {
        name: (tensor, pieces, (names.section_of(name), plan.volumes.get(name, 0)))
        for name, tensor, pieces in plan.owned()
    }
    kinds = dict.fromkeys(kind_of.values())  # a handful, which thousands of tensors share
    index = _files_of(kinds, plan, identity.world_size)
    records = {kind: _record(kind[0], kind[1], index[kind[2]]) for kind in kinds}
    leaves, containers = _leaves(plain, owned)
    drafted = Manifest(
        save=identity.save,
        run=identity.run,
        step=identity.step,
        created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        producer=_producer(layers, identity.lost),
        world_size=identity.world_size,
        files=[
            [file_of(section, writer, identity.world_size, identity.save, volume, plan.volumes), 0, 0, ""]
            for (section, volume), writers in index.items()
            for writer in writers
        ],
        tensors={name: records[kind] for name, kind in kind_of.items()},
        values=leaves,
        containers={**plan.containers, **containers},
        aliases=plan.aliases,
        per_rank={path: manifest.ranges(index[names.section_of(path), 0].values()) for path in plan.per_rank},
        attachments=attachments,
    )
    return manifest.versioned(drafted, least=plan.version)


def _producer(kinds: Mapping[str, str], lost: tuple[int, ...]) -> dict[str, str]:
    """What made it, without which ranks; and what kind of layer each module was, as far as the first rank has them."""
    producer = {"holdfast": __version__, "torch": str(torch.__version__), "python": python_version()}
    if lost:
        producer["lost"] = manifest.ranges(lost)
    if text := encode_kinds(kinds):
        producer[KEY] = text
    return producer


def complete(drafted: Manifest, files: Sequence[FileRecord]) -> Manifest:
    """The manifest with what the ranks wrote. Raises HoldfastError if that is not what was planned."""
    written = {file.path: file for file in files}
    planned = [str(row[0]) for row in drafted.files]
    odd = set(written).symmetric_difference(planned)
    if odd:
        raise HoldfastError(f"{min(odd)} was planned and not written, or the other way round; a fault of holdfast")
    return msgspec.structs.replace(drafted, files=[manifest.file_row(written[path]) for path in planned])


class Share(NamedTuple):
    """What one rank has written of a save, and what it reuses."""

    files: Sequence[FileRecord]
    reused: Sequence[ReusedFile]


def joined(drafted: Manifest, shares: Sequence[Share]) -> Manifest:
    """The manifest of a save: its draft with the share of each rank, in order of the ranks.

    Raises HoldfastError if that is not what was planned.
    """
    written = [file for share in shares for file in share.files]
    if not any(share.reused for share in shares):
        return complete(drafted, written)
    reused = {one.file[0]: one.record for share in shares for one in share.reused}
    folded = fold(drafted, {file.path for file in written}, [share.reused for share in shares])
    return complete(folded, [*written, *reused.values()])


def fold(drafted: Manifest, written: set[str], reuses: Sequence[Sequence[ReusedFile]]) -> Manifest:
    """The draft with reused tensors in the files that are reused, and without the files that nobody had to write.

    ``reuses[r]`` are those of rank r, ``written`` the paths of all files that were written. Reused files come after
    those, by the save that wrote them and then by rank, so that the files of a tensor stay a few ranges.
    """
    planned = {str(row[0]): index for index, row in enumerate(drafted.files)}
    reused: list[tuple[str, int, ReusedFile]] = []  # (save, planned file that it stands in for, reuse)
    for rank, own in enumerate(reuses):
        for reuse in own:
            section = reuse.file[0].split("/")[-2]
            path = datafile.file_name(section, rank, drafted.world_size, drafted.save, reuse.volume)
            if path not in planned:
                raise HoldfastError(f"{reuse.file[0]} is reused for {path}, which nobody planned; a fault of holdfast")
            reused.append((reuse.file[4], planned[path], reuse))
    reused.sort(key=lambda row: (row[0], row[1], row[2].file[0]))
    own_files = [index for path, index in planned.items() if path in written]
    number = {index: at for at, index in enumerate(own_files)}
    rows = [drafted.files[index] for index in own_files]
    listed: dict[str, int] = {}
    # For each set of tensors that is reused as one: in place of which planned file which file comes.
    stands: dict[str, dict[int, int]] = {}
    for _, index, reuse in reused:
        at = listed.setdefault(reuse.file[0], len(own_files) + len(listed))
        if at == len(rows):
            rows.append(manifest.file_row(reuse.record))
        if stands.setdefault(reuse.tensors, {}).setdefault(index, at) != at:
            raise HoldfastError(
                f"{reuse.file[0]} and another file are reused for the same tensors; a fault of holdfast"
            )
    sets_of: dict[int, list[str]] = {}
    for text in stands:
        positions = spans.read(text)
        if positions.count > len(drafted.tensors) or positions.largest >= len(drafted.tensors):
            raise HoldfastError(f"tensors {text[:40]!r} are reused, of {len(drafted.tensors)}; a fault of holdfast")
        for tensor in positions:
            sets_of.setdefault(tensor, []).append(text)
    # Thousands of tensors lie alike and are reused alike: each such kind is worked out once.
    known: dict[tuple[str, tuple[str, ...]], str] = {}
    tensors = {}
    for position, (name, record) in enumerate(drafted.tensors.items()):
        key = (record.files, tuple(sets_of.get(position, ())))
        if key not in known:
            known[key] = _renumbered(name, record.files, [stands[text] for text in key[1]], number)
        tensors[name] = TensorRecord(record.dtype, record.shape, record.cells, known[key])
    per_rank = {path: _renumbered(path, files, [], number) for path, files in drafted.per_rank.items()}
    return msgspec.structs.replace(drafted, files=rows, tensors=tensors, per_rank=per_rank)


def _renumbered(name: str, files: str, stands: list[dict[int, int]], number: dict[int, int]) -> str:
    """The files of one tensor: where a rank reuses it the reused one, else the one that the rank wrote."""
    numbers = []
    for index in manifest.expand(files):
        at = [stand[index] for stand in stands if index in stand]
        if not at and index in number:
            at = [number[index]]
        if len(at) != 1:
            what = "reused twice" if at else "neither written nor reused"
            raise HoldfastError(f"{name} was {what}; this is a fault of holdfast, please report it")
        numbers.append(at[0])
    return manifest.ranges(numbers)


_Kind = tuple[PlannedTensor, Owned, tuple[str, int]]
"""What tensors share whose records are alike; the last is their section and volume."""


def _files_of(kinds: Iterable[_Kind], plan: Plan, world_size: int) -> dict[tuple[str, int], dict[int, int]]:
    """Section and volume to writing rank to its file, by rank: so that the ranks of a tensor are few ranges.

    A section with a PerRank value has a file of every rank.
    """
    writers: dict[tuple[str, int], set[int]] = {}
    for _, pieces, part in kinds:
        writers.setdefault(part, set()).update(pieces.owners)
    for path in plan.per_rank:
        writers.setdefault((names.section_of(path), 0), set()).update(range(world_size))
    numbers = count()
    return {part: dict(zip(sorted(ranks), numbers)) for part, ranks in writers.items()}  # noqa: B905


def _record(tensor: PlannedTensor, pieces: Owned, files: Mapping[int, int]) -> TensorRecord:
    if 0 in tensor.shape:
        return TensorRecord(tensor.dtype, tensor.shape, None, "")
    return TensorRecord(tensor.dtype, tensor.shape, pieces.cells, manifest.ranges(files[r] for r in pieces.owners))


def _leaves(plain: Mapping[str, Any], joined: OwnedJoin) -> tuple[dict[str, Any], dict[str, Note]]:
    """Leaf values and containers as the manifest has them, parameter groups spelled out."""
    leaves = {**plain, **joined.values}
    containers: dict[str, Note] = {}
    for path, groups in joined.groups.items():
        tree = [
            {**{k: values.decode_tree(v, _no_tensor) for k, v in settings.items()}, "params": params}
            for settings, params in zip(groups.settings, groups.params, strict=True)
        ]
        _flatten(names.child(path, "param_groups"), tree, leaves, containers)
    return leaves, containers


def _no_tensor(reference: str) -> torch.Tensor:
    raise HoldfastError(f"a parameter group refers to tensor {reference}; a fault of holdfast")


def _flatten(path: str, node: Any, leaves: dict[str, Any], containers: dict[str, Note]) -> None:
    if type(node) in (list, tuple) or (type(node) is dict and all(type(key) is str for key in node)):
        if type(node) is not dict or not node:
            containers[path] = type(node).__name__
        for key, value in node.items() if type(node) is dict else enumerate(node):
            _flatten(names.child(path, str(key)), value, leaves, containers)
    else:  # containers of other kinds are one value
        leaves[path] = values.encode_tree(node, None)


_DIGEST = 16  # bytes of an XXH3-128


class RankNote(msgspec.Struct, array_like=True):
    """What one rank has done: its durable files, its plan, and what it reuses.

    A file is its section, volume, bytes, bytes of its header, and the header's digest, followed by the header's SHA-256
    if the save is signed.
    """

    files: list[tuple[str, int, int, int, bytes]]
    plan: str
    reused: list[ReusedFile] = []


def note_of(files: Sequence[DataFile], written: Sequence[Written], plan: str, reused: list[ReusedFile]) -> RankNote:
    """The note about files whose headers are known."""
    rows = [
        (file.section, file.volume, w.bytes, w.header_bytes, bytes.fromhex(w.header_digest + w.header_sha256))
        for file, w in zip(files, written, strict=True)
    ]
    return RankNote(rows, plan, reused)


def shares_of(notes: Sequence[RankNote], save: str) -> list[Share]:
    """What each rank has done, its files with their paths."""
    return [Share(_rows_as_records(rank, len(notes), note, save), note.reused) for rank, note in enumerate(notes)]


def signed_files(record: Manifest, notes: Sequence[RankNote], save: str) -> list[SignedFile]:
    sha256 = {
        file.path: row[-1][_DIGEST:].hex()
        for rank, note in enumerate(notes)
        for file, row in zip(_rows_as_records(rank, len(notes), note, save), note.files, strict=True)
    }
    return [SignedFile(sha256[file.path]) for file in record.data_files]


def _rows_as_records(rank: int, size: int, note: RankNote, save: str) -> list[FileRecord]:
    return [
        FileRecord(file_name(section, rank, size, save, volume), nbytes, header, sums[:_DIGEST].hex())
        for section, volume, nbytes, header, sums in note.files
    ]
