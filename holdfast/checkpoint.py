"""An opened checkpoint: what it holds, one slice of it, or all of it on the CPU.

Returned by `open` and `save`, used by `load` and the manager. Lazy: nothing is read before it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import torch

from holdfast import events
from holdfast.buffers.stable import wait_for_copies
from holdfast.commit.commit import commit_late
from holdfast.commit.folder import what_is_there
from holdfast.errors import Mismatch, NotACheckpoint, Untrusted
from holdfast.formats.detect import open_foreign
from holdfast.formats.own import Own
from holdfast.formats.reader import Reader
from holdfast.ondisk import dtypes, manifest, spans, values
from holdfast.ondisk.box import whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns, names_in, near, selector
from holdfast.policies.signing.keys import Keys
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.damage import Verified, verdict
from holdfast.read.files import Files
from holdfast.read.filling import box_of, into_given, into_mapped, into_new, unlike
from holdfast.read.nested import nested
from holdfast.read.ranges import Verify
from holdfast.read.read import Wanted, read_boxes
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_cache, with_default_deadline


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a saved tensor without reading it: torch dtype, global shape, bytes, and its cells' boxes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    record: TensorRecord

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, lengths) of each cell that it was saved in."""
        return [(b.offsets, b.lengths) for b, _ in self.record.boxes()]


class Checkpoint:
    """A checkpoint, ours or foreign, opened lazily. Made by `holdfast.open` and `holdfast.save`."""

    def __init__(
        self, path: Place, seconds: float = 0.0, *, reader: Reader | None = None, beside: Place | None = None,
        require: Keys | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.seconds = seconds
        """How long the save took that returned this; 0.0 if it was opened."""
        self.reader = reader or Own(path, beside=beside, require=require)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @cached_property
    def manifest(self) -> Manifest:
        """The commit record. Raises NotACheckpoint, Unsupported or Damaged, saying which and what to do."""
        return self.reader.manifest

    @property
    def signed_by(self) -> str | None:
        """The public key, in hexadecimal digits, whose signature was required and is right; None if none was."""
        return self.reader.signed_by

    @property
    def files(self) -> Files:
        """Where the bytes lie."""
        return self.reader.files

    @property
    def format(self) -> str:
        """What wrote it: ``"holdfast"``, or the name of a foreign format."""
        return self.reader.format

    @property
    def reading(self) -> str:
        """Which reading of the path was taken where several were possible; empty for ours."""
        return self.reader.reading

    @property
    def left_out(self) -> Mapping[str, str]:
        """What a foreign file holds that has no place in a state, by path, with the reason."""
        return self.reader.left_out

    @property
    def step(self) -> int | None:
        """The training step, or None if the save gave none."""
        return self.manifest.step

    @property
    def run(self) -> str:
        """The run that saved it, 16 hex digits: a run that goes on from one of its checkpoints stays the same run."""
        return self.manifest.run

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(f.bytes for f in self.manifest.data_files)

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, tied ones under each of their names; nothing but the manifest is read."""
        return {
            name: TensorInfo(name, dtypes.torch_dtype(record.dtype), record.shape, record.nbytes, record)
            for name, record in self.records.items()
        }

    @cached_property
    def records(self) -> Mapping[str, TensorRecord]:
        stored = self.manifest.tensors
        return {**stored, **{alias: stored[name] for alias, name in self.manifest.aliases.items()}}

    def saved_name(self, name: str) -> str:
        """The name under which a (possibly tied) tensor is stored."""
        return self.manifest.aliases.get(name, name)

    def value(self, path: str) -> Any:
        """One value by its path. Raises KeyError, and Damaged for what no value is."""
        return values.decoded(self.manifest.values[path], path, self.path / manifest.FILE_NAME)

    @cached_property
    def values(self) -> dict[str, Any]:
        """All values of the state, nested as they were saved; tensors and per-rank values are left out."""
        leaves: dict[str, Any] = {path: self.value(path) for path in self.manifest.values}
        return nested(leaves, self.manifest.containers, self.path / manifest.FILE_NAME)

    @property
    def attachments(self) -> Mapping[str, int]:
        """Names of the attached files with their bytes."""
        return self.reader.attachments

    def attachment(self, name: str) -> bytes:
        """The content of an attached file. Raises KeyError for an unknown name, Damaged if it was altered."""
        return self.reader.attachment(name)

    def prove(self, names: Iterable[str]) -> None:
        """Raise Damaged unless the files of these tensors are there, each as long as it is said to be.

        Asked before memory is taken: a manifest can claim any size, and its files are what bears it out.
        """
        texts = {self.records[name].files for name in names}
        self.files.prove({index for text in texts for index in spans.read(text)})

    def read(
        self, name: str, box: Sequence[slice | tuple[int, int]] | None = None, *, into: torch.Tensor | None = None,
        cast: bool = False, verify: Verify = True,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor, or one box of it, on the CPU or ``into`` a given one; only the byte ranges that hold it are read.

        ``box`` has a slice or a pair (start, stop) for each axis; missing axes are taken whole. ``into``: a tensor of
        the box's shape, on any device and with any strides, which is filled and returned; of the saved dtype, or of
        any with ``cast``. Raises KeyError for an unknown name, Mismatch for a box outside of the tensor or a given
        tensor that does not fit, Damaged for altered bytes.
        """
        record, verify = self.records.get(name), self.reader.verifying(verify)
        if record is None:
            raise KeyError(f"{self.path} has no tensor {name!r}{near(name, self.records)}")
        wanted = whole(record.shape) if box is None else box_of(name, record.shape, box)
        if into is None:
            self.prove([name])
            result = torch.empty(wanted.lengths, dtype=dtypes.torch_dtype(record.dtype), device="cpu")
        else:
            for fault in unlike(name, record, wanted, into, cast=cast):
                raise Mismatch(f"{self.path}: {fault}")
            wait_for_copies()  # a save in the background still reads what would change here
            result = into
        read_boxes(self.files, [Wanted(self.saved_name(name), record, wanted, result.detach())], verify=verify)
        return result

    @property
    def differing(self) -> list[str]:
        """Paths of the values that differ by rank; `per_rank` reads them."""
        return list(self.manifest.per_rank)

    def per_rank(self, path: str, rank: int) -> Any:
        """The value that ``rank`` saved as `PerRank` (or `RNG`) at ``path``. Raises KeyError or Damaged."""
        return self.reader.per_rank(path, rank)

    def state_dict(
        self, only: Patterns = "*", *, into: Mapping[Any, Any] | None = None, cast: bool = False, mmap: bool = False,
        verify: Verify = True,
    ) -> dict[str, Any]:  # fmt: skip
        """The nested state on the CPU: whole tensors and values whose names fit ``only``.

        ``only``: names of the checkpoint, paths above them, or patterns, one or several. Raises Mismatch, with near
        names, if one of them fits nothing. Tied tensors come as one. `per_rank` reads values that differ by rank.

        ``into``: tensors to be filled in place of new ones, nested as the state is or by name, on any device and with
        any strides; of the saved dtypes, or of any with ``cast``. They are what comes back. Raises Mismatch, listing
        every one that is missing, left over or unlike; then nothing was changed.

        ``mmap``: a tensor that lies whole and plain in a local file is that file, mapped: it takes memory only where
        it is looked at, and what is written to it never reaches the file. All others are read: tensors saved in
        several cells, compressed ones, those in a store. With ``verify`` what is mapped is read once to compare its
        sums, and not kept; without, only headers are proved, and opening costs nothing (see docs/loading.md).
        """
        verify = self.reader.verifying(verify)
        if into is not None and mmap:
            raise ValueError("into= gives the memory, and mmap= would have none: give one of them")
        wanted = selector(only, names_in(self.manifest), self.path)
        records = {name: record for name, record in self.records.items() if wanted(name)}
        if into is not None:
            filled = into_given(records, self.saved_name, into, self.path, cast=cast)
            wait_for_copies()
        elif mmap:
            filled = into_mapped(records, self.saved_name, self.files, self.path, verify=verify)
        else:
            self.prove(records)
            filled = into_new(records, self.saved_name)
        read_boxes(self.files, filled.wanted, verify=verify)
        leaves: dict[str, Any] = dict(filled.tensors)
        leaves.update((p, self.value(p)) for p in self.manifest.values if wanted(p))
        containers = {p: kind for p, kind in self.manifest.containers.items() if wanted(p)}
        return nested(leaves, containers, self.path / manifest.FILE_NAME)

    def verify(self, *, deep: bool = True, raises: bool = True) -> Verified:
        """Read and check every byte, by several threads of this process. Raises Damaged, listing all that is hit.

        ``deep=False`` looks at headers, sizes and attachments alone. ``raises=False``: damages are in what is returned,
        and not raised. Of a foreign checkpoint every byte of every tensor is read; what the format keeps no sum of
        counts as ``unverified``. `holdfast.tools.verify` shares the work among the ranks of a group. Raises
        StorageError if a store or the disk cannot be read.
        """
        began = monotonic()
        findings = self.reader.examine(deep=deep)
        return verdict(self.path, self.manifest, findings, deep=deep, began=began, raises=raises)


def open_checkpoint(
    path: str | os.PathLike[str] | Place, *, cache: str | os.PathLike[str] | None = None, require: Keys | None = None
) -> Checkpoint:  # fmt: skip
    """Open the checkpoint at ``path``, ours or of a foreign format: what describes it is read and proved, nothing else.

    ``path``: a folder, a file, or a template with ``{rank}``, as the format's users name it (see docs/formats.md), on
    disk or, as a URL or from `holdfast.storage.at`, in a store (see docs/stores.md). ``cache``: for a path in a store,
    a folder on local disk in which the processes of a machine share what they have fetched.

    ``require``: public keys, one of which must have signed the checkpoint (see docs/security.md): then all that is read
    of it is proved to be what was signed.
    Raises NotACheckpoint if there is none (saying what is there instead), Unsupported for a format version from the
    future, Damaged if the manifest was altered, Untrusted if it is not signed as required.
    """
    target = with_default_deadline(location(path), DEADLINE)
    if cache is not None:
        target = with_cache(target, cache)
    checkpoint = Checkpoint(target, require=require)
    try:
        checkpoint.manifest  # noqa: B018 - reading it is the check
    except NotACheckpoint as error:
        if require is not None and not target.is_remote and not target.exists():
            raise
        if require is not None:  # not even looked at: a reader of another format would have to believe it
            raise Untrusted(
                f"{error}. require= takes signed checkpoints of holdfast: other formats cannot be signed, convert them "
                "(holdfast.convert) and sign the result if you trust them"
            ) from None
        reader = open_foreign(target)
        if reader is None:
            if target.is_remote:
                raise NotACheckpoint(what_is_there(target)) from None
            raise
        checkpoint = Checkpoint(target, reader=reader)
        events.log.info("%s: read as %s%s", target, reader.format, f" ({reader.reading})" if reader.reading else "")
    return checkpoint


def recover(path: str | os.PathLike[str] | Place) -> Checkpoint:
    """The checkpoint at ``path``; a background save whose ranks all finished, but died before its commit, is committed.

    `CheckpointManager.restore` does so by itself. Raises NotACheckpoint if not all ranks had finished, StorageError.
    """
    folder = with_default_deadline(location(path), DEADLINE)
    commit_late(folder, strict=True)
    return open_checkpoint(folder)
