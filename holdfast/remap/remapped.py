"""A checkpoint as a map makes it: a `Reader` over another one, with other names and shapes, and the same bytes.

`open` with ``remap=`` makes one. It reads what the wanted boxes come from and nothing else; it never holds a tensor
that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch

from holdfast.errors import Mismatch
from holdfast.formats.reader import Reader
from holdfast.ondisk import dtypes, spans
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.box import Box, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.read.damage import Findings, Verified, verdict
from holdfast.read.files import Files
from holdfast.read.ranges import Verify
from holdfast.read.read import read_boxes
from holdfast.read.source import Descriptors, ReadStats
from holdfast.read.wanted import Wanted
from holdfast.remap.boxes import Part, factors_of, merged_boxes, parts_of
from holdfast.remap.nodes import Node, Reshaped, Saved, saved_in, walk
from holdfast.remap.proof import Proof, proof_of
from holdfast.remap.remap import Remap
from holdfast.remap.sections import Mapped, mapped
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

_MADE = "remap:"
"""Begins the stored name of a tensor that no file holds as it is."""


class Remapped:
    """A `Reader` of the checkpoint that ``reader`` reads, as ``remap`` makes it."""

    def __init__(self, reader: Reader, remap: Remap) -> None:
        self._reader, self.remap = reader, remap

    @property
    def path(self) -> Place:
        return self._reader.path

    @cached_property
    def _mapped(self) -> Mapped:
        return mapped(self._reader.manifest, self.remap, self.path, self._difference)

    def _difference(self, alike: Sequence[tuple[str, ...]]) -> str | None:
        """Why small tensors cannot become one: they are read, all at once, and two of them are not equal."""
        several = [names for names in alike if len(names) > 1]
        records = {name: self._reader.manifest.tensors[name] for names in several for name in names}
        values = {
            name: torch.empty(record.shape, dtype=dtypes.torch_dtype(record.dtype), device="cpu")
            for name, record in records.items()
        }
        wanted = [Wanted(name, record, whole(record.shape), values[name]) for name, record in records.items()]
        if wanted:
            read_boxes(self._reader.files, wanted)
        for first, *others in several:
            for other in others:
                if not values[other].equal(values[first]):
                    return f"{first} and {other} would become one, but they are not equal"
        return None

    @cached_property
    def _stored(self) -> dict[str, str]:
        """The stored name of each tensor: that of the saved one that it is, or one of its own."""
        stored: dict[str, str] = {}
        by_node: dict[Node, str] = {}
        for name, node in self._mapped.tensors.items():
            if isinstance(node, Saved):
                stored[name] = node.name
            else:
                stored[name] = by_node.setdefault(node, f"{_MADE}{digest(repr(node).encode())}:{name}")
        return stored

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest with what the map makes. A tensor that it only renames keeps its record."""
        old, made = self._reader.manifest, self._mapped
        tensors: dict[str, TensorRecord] = {}
        aliases: dict[str, str] = {}
        first_of: dict[str, str] = {}
        for name, node in made.tensors.items():
            if first_of.setdefault(self._stored[name], name) != name:
                aliases[name] = first_of[self._stored[name]]
            elif isinstance(node, Saved):
                tensors[name] = old.tensors[node.name]
            else:
                files = next((text for saved in saved_in(node) if (text := old.tensors[saved.name].files)), "0")
                first = str(spans.read(files).at(0)) if 0 not in node.shape else ""
                tensors[name] = TensorRecord(node.dtype, node.shape, None, first)
        return msgspec.structs.replace(old, tensors=tensors, aliases=aliases, values=made.values)

    def proof(self) -> Proof:
        """What the map leaves over, repeats, makes up and casts, but for steps of parameters that become one."""
        steps = {name for names in self._mapped.alike for name in names}
        made = {name: node for name, node in self._mapped.tensors.items() if getattr(node, "name", "") not in steps}
        return proof_of(made, {n: record for n, record in self._reader.manifest.tensors.items() if n not in steps})

    def stored_name(self, name: str) -> str:
        """The name that reads go by; equal for tensors that are one."""
        return self._stored.get(name, name)

    @cached_property
    def files(self) -> RemappedFiles:
        nodes = {self._stored[name]: node for name, node in self._mapped.tensors.items()}
        made = {stored: node for stored, node in nodes.items() if not isinstance(node, Saved)}
        return RemappedFiles(self._reader.files, self._reader.manifest, made)

    @property
    def format(self) -> str:
        return self._reader.format

    @property
    def reading(self) -> str:
        return self._reader.reading

    @property
    def left_out(self) -> Mapping[str, str]:
        return {**self._reader.left_out, **self._mapped.left_out}

    def check_mapped(self, asked: Callable[[str], bool]) -> None:
        """Raise Mismatch for an optimizer that is asked for and cannot follow the map."""
        for path, why in self._mapped.left_out.items():
            if asked(f"{path}/state"):
                raise Mismatch(f'{self.path}: {why}. Leave the optimizer out, as in only="model"')

    @property
    def signed_by(self) -> str | None:
        return self._reader.signed_by

    @property
    def attachments(self) -> Mapping[str, int]:
        return self._reader.attachments

    def attachment(self, name: str) -> bytes:
        return self._reader.attachment(name)

    def per_rank(self, path: str, rank: int) -> Any:
        return self._reader.per_rank(path, rank)

    def verifying(self, verify: Verify) -> Verify:
        return self._reader.verifying(verify)

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        return self._reader.examine(deep=deep, share=share)

    def verdict(self, findings: Findings, *, deep: bool, began: float, raises: bool) -> Verified:
        """What findings mean: damages of the tensors that are saved, and all tensors of the map that these hit."""
        saved = verdict(self.path, self._reader.manifest, findings, deep=deep, began=began, raises=raises)
        stored = {self._reader.stored_name(name) for name in saved.tensors}
        hit = (name for name, node in self._mapped.tensors.items() if any(one.name in stored for one in saved_in(node)))
        return saved if saved.whole else replace(saved, tensors=tuple(hit))


class Factored(NamedTuple):
    """A saved tensor, by its name, and its record with more axes."""

    name: str
    record: TensorRecord


def _factored_name(name: str, shape: Sequence[int]) -> str:
    return f"{_MADE}{'x'.join(map(str, shape))}:{name}"


class RemappedFiles:
    """`Files` in which some tensors are ``made`` of others: a box of one becomes boxes of tensors of ``manifest``."""

    def __init__(self, files: Files, manifest: Manifest, made: Mapping[str, Node]) -> None:
        self._files, self._manifest, self._made = files, manifest, made
        self._records = manifest.tensors

    def stored(self, manifest: Manifest) -> Manifest:
        """The manifest before the map, with the tensors that are read in factors of their axes."""
        factored = {name: one.record for name, one in self.factored.items()}
        return msgspec.structs.replace(self._manifest, tensors={**self._records, **factored})

    @cached_property
    def factored(self) -> dict[str, Factored]:
        """Tensors that were saved whole and are read in factors of their axes, by a name that says so.

        They are the same on every rank, so that ranks can share the reading of them.
        """
        factored = {}
        for node in (inner for made in self._made.values() for inner in walk(made)):
            if isinstance(node, Reshaped) and isinstance(node.of, Saved) and self._records[node.of.name].cells is None:
                record, shape = self._records[node.of.name], factors_of(node)
                if shape != record.shape:
                    one = TensorRecord(record.dtype, shape, None, record.files)
                    factored[_factored_name(node.of.name, shape)] = Factored(node.of.name, one)
        return factored

    def is_made(self, name: str) -> bool:
        return name in self._made

    def origins(self, name: str, record: TensorRecord) -> Sequence[tuple[str, TensorRecord]]:
        node = self._made.get(name)
        if node is None:
            return ((name, record),)
        return [(one, self._records[one]) for one in dict.fromkeys(saved.name for saved in saved_in(node))]

    def expanded(self, wanted: Iterable[Wanted]) -> Iterator[Wanted]:
        for want in wanted:
            node = self._made.get(want.name)
            if node is None or want.fill is not None:  # what an expansion before this one made
                yield want
                continue
            for part in parts_of(node, want.box, want.view):
                if isinstance(part, Part):
                    yield from self._wanted(part)
                else:
                    shape = tuple(part.view.shape)
                    yield Wanted(
                        want.name, TensorRecord(node.dtype, shape, None, ""), whole(shape), part.view, fill=part.value
                    )

    def _wanted(self, part: Part) -> Iterator[Wanted]:
        """What to read for a part: one box, however its axes are cut, if the tensor was saved whole."""
        name, record = part.saved.name, self._records[part.saved.name]
        if part.shape == record.shape:
            yield Wanted(name, record, part.box, part.view)
        elif record.cells is None:
            longer = _factored_name(name, part.shape)
            yield Wanted(longer, self.factored[longer].record, part.box, part.view)
        else:
            for box, view in merged_boxes(part):
                yield Wanted(name, record, box, view)

    def path(self, index: int) -> Place:
        return self._files.path(index)

    def plain(self, index: int) -> Place | None:
        return self._files.plain(index)

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        self._files.prepare(indices, stats)

    def prove(self, indices: Iterable[int]) -> None:
        self._files.prove(indices)

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[int, Piece, Sequence[str]]:
        factored = self.factored.get(name)
        if factored is not None:
            name, record = factored.name, self._records[factored.name]
            cell = whole(record.shape)
        return self._files.piece(index, name, cell, record, stats)

    def opened(self, index: int) -> AbstractContextManager[Descriptors | StorePlace]:
        return self._files.opened(index)
