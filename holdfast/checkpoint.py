"""An opened checkpoint: what it holds, one slice of it, or all of it on the CPU.

Returned by `open` and `save`, used by `load` and the manager. Lazy: nothing is read before it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from time import monotonic
from typing import Any

import torch

from holdfast.buffers.stable import wait_for_copies
from holdfast.errors import Mismatch
from holdfast.formats.detect import reader_of
from holdfast.formats.own import Own
from holdfast.formats.reader import Reader, TensorInfo
from holdfast.ondisk import dtypes, manifest, spans, values
from holdfast.ondisk.arguments import VERIFY
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
from holdfast.read.read import read_boxes
from holdfast.read.wanted import Wanted
from holdfast.remap.remap import Remap
from holdfast.remap.remapped import Remapped
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_cache, with_default_deadline


class Checkpoint:
    """An opened checkpoint, of holdfast or of another library. Made by `holdfast.open` and `holdfast.save`.

    Attributes:
        path: Where it lies.
        seconds: How long the save took that returned this; 0.0 if it was opened.
        reader: What reads its format.
        beside: A place that has the files that ``path`` lacks.
        require: Public keys, one of which must have signed it.
    """

    def __init__(
        self, path: Place, seconds: float = 0.0, *, reader: Reader | None = None, beside: Place | None = None,
        require: Keys | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.seconds = seconds
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
    def remap(self) -> Remap | None:
        """The map under which it was opened; None without one."""
        return self.reader.remap if isinstance(self.reader, Remapped) else None

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
        """Return the name under which a tensor is stored, which for a tied one may be another.

        Args:
            name: A name of the tensor.
        """
        return self.reader.stored_name(name)

    def value(self, path: str) -> Any:
        """Return one value.

        Args:
            path: Its name, such as ``"scheduler/last_epoch"``.

        Raises:
            KeyError: There is no such value.
            Damaged: What is there is no value.
        """
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
        """Return the content of an attached file.

        Args:
            name: Its name; `attachments` lists them.

        Raises:
            KeyError: There is no such file.
            Damaged: It was altered.
        """
        return self.reader.attachment(name)

    def prove(self, names: Iterable[str]) -> None:
        """Check that the files of tensors are there, each as long as it has to be. Called before memory is taken.

        Args:
            names: Names of tensors.

        Raises:
            Damaged: A file is missing, or has another size.
        """
        texts = {r.files for name in names for _, r in self.files.origins(self.saved_name(name), self.records[name])}
        self.files.prove({index for text in texts for index in spans.read(text)})

    def read(
        self, name: str, box: Sequence[slice | tuple[int, int]] | None = None, *, into: torch.Tensor | None = None,
        cast: bool = False, verify: Verify = True,
    ) -> torch.Tensor:  # fmt: skip
        """Read a tensor, or one box of it. Only the byte ranges that hold it are read.

        Args:
            name: The tensor's name.
            box: A slice or a pair (start, stop) for each axis. Missing axes are taken whole.
            into: A tensor of the box's shape, on any device and with any strides, to fill and return. Without it the
                result is a new tensor on the CPU.
            cast: Let ``into`` have another dtype.
            verify: As in `holdfast.load`.

        Returns:
            The tensor, of the saved dtype or ``into``'s.

        Raises:
            KeyError: There is no such tensor.
            Mismatch: The box lies outside of the tensor, or ``into`` does not fit.
            Damaged: Bytes are not what was written.

        Example:
            >>> checkpoint.read("model/tok.weight").shape
            torch.Size([128, 32])
        """
        record, verify = self.records.get(name), self.reader.verifying(VERIFY.checked("verify", verify))
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
        """Return the value that one rank saved as `PerRank` or `RNG`.

        Args:
            path: The value's name; `differing` lists them.
            rank: The rank that saved it.

        Raises:
            KeyError: There is no such value, or no such rank.
            Damaged: Bytes are not what was written.
        """
        return self.reader.per_rank(path, rank)

    def state_dict(
        self, only: Patterns = "*", *, into: Mapping[Any, Any] | None = None, cast: bool = False, mmap: bool = False,
        verify: Verify = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the state on the CPU: whole tensors and values, nested as they were saved, without `per_rank` values.

        Args:
            only: Names of the checkpoint, paths above them, or patterns, one or several.
            into: Tensors to fill in the place of new ones, nested as the state is or by name, on any device and with
                any strides. They are what comes back.
            cast: Let tensors of ``into`` have other dtypes.
            mmap: Map tensors that lie whole and plain in a local file, so that they take memory where they are looked
                at. What is written to them never reaches the file. With ``verify=False`` nothing of them is read in
                advance.
            verify: As in `holdfast.load`.

        Raises:
            Mismatch: ``only`` fits nothing, or ``into`` does not fit; it lists all names. Nothing was changed.
            Damaged: Bytes are not what was written.

        Example:
            >>> weights = checkpoint.state_dict("model")["model"]
        """
        verify = self.reader.verifying(VERIFY.checked("verify", verify))
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
        leaves: dict[str, Any] = {**filled.tensors, **{p: self.value(p) for p in self.manifest.values if wanted(p)}}
        containers = {p: kind for p, kind in self.manifest.containers.items() if wanted(p)}
        return nested(leaves, containers, self.path / manifest.FILE_NAME)

    def verify(self, *, deep: bool = True, raises: bool = True) -> Verified:
        """Check every byte. `holdfast.tools.verify` shares the work among ranks.

        Args:
            deep: False looks at headers, sizes and attachments alone.
            raises: False returns damages in the place of raising them.

        Returns:
            What was checked. Bytes of which the format keeps no sum count as ``unverified``.

        Raises:
            Damaged: Bytes are not what was written; it names files, bytes and tensors.
            StorageError: The disk or store cannot be read.
        """
        began, findings = monotonic(), self.reader.examine(deep=deep)
        if isinstance(self.reader, Remapped):
            return self.reader.verdict(findings, deep=deep, began=began, raises=raises)
        return verdict(self.path, self.manifest, findings, deep=deep, began=began, raises=raises)


def open_checkpoint(
    path: str | os.PathLike[str] | Place, *, cache: str | os.PathLike[str] | None = None, require: Keys | None = None,
    remap: Remap | None = None,
) -> Checkpoint:  # fmt: skip
    """Open the checkpoint at ``path``, of holdfast or of another library. It reads what describes it, and no tensor.

    Args:
        path: A folder, a file, or a template with ``{rank}``, as users of its format name it (docs/formats.md); a path,
            a URL, or a place from `holdfast.storage.at`.
        cache: For a path in a store, a folder on local disk in which processes of a node share what they have fetched.
        require: Public keys, one of which must have signed the checkpoint. Then all that is read of it is proved to be
            what was signed.
        remap: A map to another layout (`holdfast.remap`). The checkpoint then has the names and shapes that it makes.

    Returns:
        The checkpoint. Tensors are read when you ask for them.

    Raises:
        NotACheckpoint: There is none; it says what is there instead.
        Unsupported: The format version is of a later holdfast.
        Damaged: The manifest was altered.
        Untrusted: It is not signed as required.
        Mismatch: ``remap`` does not fit what is there.

    Example:
        >>> checkpoint = holdfast.open("/ckpt/step-7")
        >>> checkpoint.read("model/tok.weight", (slice(0, 8),)).shape
        torch.Size([8, 32])
    """
    target = with_default_deadline(location(path), DEADLINE)
    if cache is not None:
        target = with_cache(target, cache)
    checkpoint = Checkpoint(target, reader=reader_of(target, require))
    return checkpoint if remap is None else under_map(checkpoint, remap)


def under_map(checkpoint: Checkpoint, remap: Remap) -> Checkpoint:
    """The same checkpoint with the names and shapes that a map makes. Raises Mismatch if it does not fit."""
    if checkpoint.remap is not None:
        raise Mismatch(f"{checkpoint.path} is opened under a map already: join the two, as in second @ first")
    mapped = Checkpoint(checkpoint.path, checkpoint.seconds, reader=Remapped(checkpoint.reader, remap))
    mapped.manifest  # noqa: B018 - a map that does not fit is refused before anything is read
    return mapped
