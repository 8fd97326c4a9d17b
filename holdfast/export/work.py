"""One conversion under way on one rank: open, select, lay out, copy this rank's share; the first rank ends it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args

import msgspec
import torch

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.checkpoint import Checkpoint, open_checkpoint, under_map
from holdfast.errors import HoldfastError, Mismatch
from holdfast.export import dcp, huggingface, native, torch_file
from holdfast.export.copying import Copied, copy_units, finish
from holdfast.export.draft import Atom, Draft, Fixed, Unit, joined, share_of, units_of
from holdfast.export.huggingface import Extras
from holdfast.export.partial import Journal, Partial, Row
from holdfast.export.selection import Selection, cast, check_names, renamed, select
from holdfast.matching.differences import counts_of
from holdfast.ondisk import manifest, names
from holdfast.ondisk.arguments import PATTERNS, VERIFY, check, whole
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.patterns import Patterns, Rename, check_rename, names_in, renamer, selector
from holdfast.ranks.ranks import Ranks
from holdfast.read.ranges import Verify
from holdfast.remap.remap import Remap
from holdfast.remap.remapped import Remapped
from holdfast.storage.place import Place

To = Literal["holdfast", "huggingface", "hf", "torch", "dcp"]

FORMATS = {name: "huggingface" if name == "hf" else name for name in get_args(To)}
"""What ``to=`` and ``--to`` take, each with the format that it means."""

_OF_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

Source = str | os.PathLike[str] | Place | Checkpoint

MAX_SHARD_BYTES = 5_000_000_000

_CUTS = 1
"""Counted up when units are cut in another way: then what an older version has begun is not resumed."""


@dataclass(repr=False)
class Converted:
    """What a conversion did.

    ``path``: the target; ``nbytes``: of all its files; ``tensors``: names that it has, tied ones counted once.
    ``renamed``: the source's name to the target's, where they differ; ``cast``: the target's name to (saved, new)
    dtype; ``tied``: names that share another tensor's bytes; ``skipped``: left out by ``only``; ``left_out``: asked
    for, but the target has no place for it; ``beside``: small files put beside a Hugging Face model, known to the first
    rank alone; ``not_summed``: of a merge, tensors that are as in its sources. Bytes are this rank's: ``bytes_read``
    from the source, ``bytes_unverified`` of those in blocks read only in part. ``bytes_resumed``: of the target, copied
    by an earlier call.
    """

    path: Place
    to: str
    nbytes: int = 0
    tensors: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    not_summed: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_unverified: int = 0
    bytes_resumed: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:  # how many names, and not all of them
        return f"Converted({str(self.path)!r}, {self.to!r}{counts_of(self)})"

    @property
    def lacks_config(self) -> bool:
        """Whether it is a Hugging Face folder which ``from_pretrained`` would refuse, as it has weights alone."""
        return self.to == "huggingface" and not any(name.endswith("config.json") for name in self.beside)


_TAKES = {"only": PATTERNS, "verify": VERIFY, "max_shard_bytes": whole(1, "a whole number of bytes")}

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype of torch, also from its name or a usual short one. Raises ValueError for another one."""
    found = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f'dtype={dtype!r}: give a floating dtype of torch, such as torch.bfloat16 or "bfloat16"')
    return found


def format_named(to: str) -> str:
    """The format that ``to`` means. Raises ValueError for another text."""
    if not isinstance(to, str) or to not in FORMATS:
        raise ValueError(f"to is one of {', '.join(map(repr, FORMATS))}, not {to!r}")
    return FORMATS[to]


@dataclass(frozen=True)
class Options:
    """The arguments that say what the target is to be."""

    to: str
    only: Patterns
    rename: Rename | None
    dtype: torch.dtype | None
    step: int | None
    max_shard_bytes: int
    extras: Extras | None
    overwrite: bool
    verify: Verify
    remap: Remap | None = None

    def check(self, target: object) -> None:
        check(_TAKES, vars(self))
        floating(self.dtype)
        if self.step is not None and self.to != "holdfast":
            raise ValueError('step goes with to="holdfast"; the other formats have no place for it')
        if self.extras is not None and self.to != "huggingface":
            raise ValueError('extras go with to="huggingface"')
        path, suffix = os.path.splitext(str(target).partition("?")[0])
        if self.to == "huggingface" and suffix in _OF_FILES:
            of_torch = "" if suffix == ".safetensors" else '. For one file give to="torch"'
            raise ValueError(
                f"{target} is called like a file, and a Hugging Face model is a folder: give {path}, and its weights "
                f"are in {path}/model.safetensors{of_torch}"
            )


class Note(msgspec.Struct, array_like=True):
    """What one rank copied: its units, or of a live state the bytes (path, offset) that the first rank is to write."""

    rows: list[Row]
    edges: list[tuple[str, int, bytes]] = []


class ConvertWork:
    """One conversion on one rank: `plan`, `begin` on the first rank, `copy`, `finish` on the first rank."""

    def __init__(self, source: Source, target: Place, options: Options, ranks: Ranks, partial: Partial) -> None:
        self.options, self.ranks, self.partial = options, ranks, partial
        self.converted = Converted(target, options.to)
        self._source = source
        self._done: list[Row] = []

    def plan(self) -> str:
        """Open the source and lay the target out; a digest of both, which must be that of every rank."""
        self.checkpoint = self._opened()
        with no_collection():
            selection = self._select()
            self._report(selection)
            self.stamps = self._stamps()
            identity = self._identity(selection)
            self.draft = self._draft(selection, identity)
            self._cut()
            spans = [(s.leaf.name, s.box, s.path, s.offset) for s in self.draft.spans]
            self.digest = digest(msgspec.json.encode([_CUTS, identity, self.options.verify, spans]))
        return self.digest

    def _opened(self) -> Checkpoint:
        return self._open(self._source)

    def _open(self, source: Source) -> Checkpoint:
        target = self.converted.path
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        if f"{checkpoint.path.real()}/".startswith(f"{target.real()}/"):
            raise Mismatch(f"the target {target} is the source, or around it; choose another path")
        return checkpoint if self.options.remap is None else under_map(checkpoint, self.options.remap)

    def _cut(self) -> None:
        """Cut the draft into what ranks copy."""
        self.units = units_of(self.draft)

    def _select(self) -> Selection:
        options, checkpoint = self.options, self.checkpoint
        known, rename = names_in(checkpoint.manifest), None if options.to == "huggingface" else options.rename
        asked = selector(options.only, known, checkpoint.path, rename=rename)
        if isinstance(checkpoint.reader, Remapped) and options.to != "huggingface":  # which has no place for optimizers
            checkpoint.reader.check_mapped(asked)
        wanted = select(checkpoint, asked)
        if not wanted.origin:
            raise Mismatch(f"{checkpoint.path} has neither a tensor nor a value that fits only={options.only!r}")
        self.converted.skipped = wanted.skipped
        if options.to == "huggingface":
            wanted = self._model(wanted)
        else:
            check_rename(rename, known, checkpoint.path)
            wanted = renamed(wanted, renamer(rename, known))
            if options.rename is not None:
                check_names(wanted)
        if options.to == "dcp":
            self.converted.left_out += dcp.left_out(wanted)
        if options.to in ("torch", "dcp"):
            self.converted.left_out += [f"attachments/{name}" for name in checkpoint.attachments]
        return cast(wanted, options.dtype)

    def _model(self, wanted: Selection) -> Selection:
        section = huggingface.section_of(self.checkpoint, self.options.only)
        inside = {n for n in (*wanted.tensors, *wanted.aliases) if names.under(n, section) and n != section}
        self.converted.left_out += [name for name in wanted.origin if name not in inside]
        if not inside:
            raise Mismatch(f"{self.checkpoint.path} has no tensors that fit only={self.options.only!r}")
        bare = huggingface.bare(section)
        known = [bare(name) for name in self.checkpoint.records if names.under(name, section) and name != section]
        check_rename(self.options.rename, known, self.checkpoint.path)
        new = renamer(self.options.rename, known)
        return renamed(select(self.checkpoint, inside.__contains__), lambda name: new(bare(name)))

    def _report(self, selection: Selection) -> None:
        converted = self.converted
        converted.tensors = list(selection.tensors)
        converted.tied = dict(selection.aliases)
        converted.renamed = {source: name for name, source in selection.origin.items() if source != name}
        converted.cast = {
            name: (leaf.record.dtype, leaf.dtype)
            for name, leaf in selection.tensors.items()
            if leaf.dtype != leaf.record.dtype
        }

    def _stamps(self) -> list[tuple[str, int, str | int]]:
        """Identifies the source's files: equal on all ranks, and as long as the files do not change."""
        return self._stamps_of(self.checkpoint)

    def _stamps_of(self, checkpoint: Checkpoint) -> list[tuple[str, int, str | int]]:
        stamps: list[tuple[str, int, str | int]] = []
        if checkpoint.remap is not None:
            stamps.append(("", 0, checkpoint.remap.to_json()))
        for i, file in enumerate(checkpoint.manifest.data_files):
            path = checkpoint.files.path(i)
            stamp: str | int = file.header_digest
            if not stamp and path.is_remote:
                stamp = path.commit or repr(path.modified())
            elif not stamp:  # a foreign file proves nothing of itself; the time of its last change has to do
                stamp = path.stat().st_mtime_ns if path.exists() else 0
            stamps.append((os.path.relpath(str(path), str(checkpoint.path)), file.bytes, stamp))
        return stamps

    def _identity(self, selection: Selection) -> str:
        """Identifies this source and what is made of it."""
        attached = dict(self.checkpoint.attachments)
        options = [self.options.to, self.options.step, self.options.max_shard_bytes]
        plain = [self.stamps, self.checkpoint.step, selection.plain(), attached, options]
        return digest(msgspec.json.encode(plain))

    def _draft(self, selection: Selection, identity: str) -> Draft:
        options, checkpoint = self.options, self.checkpoint
        if options.to == "huggingface":
            small = huggingface.small_files(checkpoint, options.extras) if self.ranks.first else {}
            self.converted.beside = sorted(small)
            return huggingface.draft(selection, max_file_bytes=options.max_shard_bytes, small=small)
        if options.to == "torch":
            return torch_file.draft(checkpoint, selection)
        if options.to == "dcp":
            return dcp.draft(checkpoint, selection, max_file_bytes=options.max_shard_bytes)
        return native.draft(
            checkpoint, selection, identity=identity, step=options.step, max_file_bytes=options.max_shard_bytes
        )

    def begin(self, plans: list[str]) -> str:
        """On the first rank: make room; the units that are done already, as ranges."""
        odd = next((rank for rank, plan in enumerate(plans) if plan != self.digest), None)
        if odd is not None:
            raise Mismatch(
                f"rank {odd} would make another target of {self.checkpoint.path} than rank 0: "
                "call convert with the same arguments on every rank, and rename= with the same answers"
            )
        self._done = self.partial.begin(self.digest, self.draft.files, overwrite=self.options.overwrite)
        return manifest.ranges(sorted(row.unit for row in self._done))

    def copy(self, done: str) -> Note:
        """Copy this rank's share of what is not done."""
        known = set(manifest.expand(done))
        self.converted.bytes_resumed = sum(unit.nbytes for unit in self.units if unit.number in known)
        share = share_of([u for u in self.units if u.number not in known], self.ranks.rank, self.ranks.size)
        copied = self._copy(share)
        self.converted.bytes_read, self.converted.bytes_unverified = copied.read, copied.unverified
        return Note(copied.rows)

    def _copy(self, share: list[Unit]) -> Copied:
        target = str(self.partial.target)
        journal = Journal(self.partial, self.ranks.rank)
        try:
            with events.task("convert", target, self.ranks.rank, sum(unit.nbytes for unit in share)) as task:
                return copy_units(
                    self.checkpoint, self.draft, share, self.partial.content, journal,
                    verify=self.options.verify, progress=task.advance,
                )  # fmt: skip
        finally:
            journal.close()

    def finish(self, notes: list[Note]) -> int:
        """On the first rank, when all tensors are there: the rest, then the target's name. The bytes of all files."""
        if self._stamps() != self.stamps:
            raise Mismatch(f"{self.checkpoint.path} was changed while it was converted: convert it again")
        heads, sums = self._joined(notes)
        content = self.partial.content
        touched = finish(content, chain(heads, self.draft.finish(sums)))
        files = list(dict.fromkeys([*self.draft.files, *touched]))
        nbytes = sum((content / name).stat().st_size for name in files)
        result = content / torch_file.NAME if self.options.to == "torch" else content
        self.partial.publish(result, files, overwrite=self.options.overwrite)
        return nbytes

    def _joined(self, notes: list[Note]) -> tuple[list[Fixed], list[str]]:
        """What the first rank is to write for others, and the sum of each span."""
        rows = {row.unit: row for row in [*self._done, *(row for note in notes for row in note.rows)]}
        parts: list[list[str]] = [[] for _ in self.draft.spans]
        atoms: list[list[Atom]] = [[] for _ in self.draft.spans]
        heads: list[Fixed] = []
        for unit in self.units:
            if unit.number not in rows:
                raise HoldfastError(f"no rank copied unit {unit.number} of {self.partial.target}; a fault of holdfast")
            row = rows[unit.number]
            heads += [Fixed(unit.path, offset, data) for offset, data in row.heads]
            for atom, part in zip(unit.atoms, row.sums, strict=True):
                parts[atom.span].append(part)
                atoms[atom.span].append(atom)
        return heads, [joined(part, atom, self.draft.sums) for part, atom in zip(parts, atoms, strict=True)]
