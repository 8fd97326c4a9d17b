"""The base of an incremental save: an earlier checkpoint, and which of its files this rank reuses.

The policies call `reuse` before anything is staged. Never changes the base and never trusts a name or a time: a piece
is reused if its bytes have the sums that the base's own header, checked by its digest, gives for them.

Each rank decides by itself. We rejected a shared decision, because it costs a round and nothing depends on it. We
rejected copying live pieces out of old files later, because that rewrites what is committed. The rule that half of a
file has to be wanted bounds dead bytes without it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.buffers.device import Copier
from holdfast.commit.job import Base
from holdfast.errors import HoldfastError, Mismatch, NotACheckpoint, StorageError
from holdfast.events import log
from holdfast.ondisk import datafile, dtypes, manifest, names
from holdfast.ondisk.box import Box
from holdfast.ondisk.datafile import base_of
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.part import ReusedFile
from holdfast.plan.plan import Plan
from holdfast.policies.incremental.fingerprint import Fingerprints, Prints
from holdfast.policies.incremental.same import Claim, unchanged
from holdfast.read.files import DataFiles
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.write.datafiles import KEPT, DataFile, OpenFiles

SMALLEST = 16 << 10
"""A file of which fewer bytes are wanted is not worth a line in the manifest: they are written again."""

MOST = 16
"""Files that one rank reuses for one section; of more, those with the fewest bytes are written again."""

_NO_LINKS = {
    getattr(errno, name) for name in ("EPERM", "EACCES", "EXDEV", "EMLINK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL")
}


@dataclass(frozen=True)
class OpenedBase:
    folder: Place
    record: Manifest
    files: DataFiles

    def file(self, index: int) -> FileRecord:
        """A data file with the id of the save that wrote it."""
        record = self.record.data_files[index]
        return record._replace(save=record.save or self.record.save)


@dataclass(frozen=True)
class Reused:
    """The files that are left to write, what is reused, and the fingerprints to remember once the save is committed."""

    files: list[DataFile]
    reused: list[ReusedFile]
    prints: Prints


def check_sibling(base: Place, folder: Place) -> None:
    """Raise Mismatch unless ``base`` lies beside ``folder``: only then is a reuse valid wherever the root goes."""
    if base.parent.real() != folder.parent.real():
        raise Mismatch(f"the base {base} does not lie beside {folder}: only what is in the same folder can be reused")
    if base.name == folder.name:
        raise Mismatch(f"{folder} cannot be its own base: save to another path, or without base=")


def open_base(base: Base, folder: Place) -> OpenedBase | None:
    """The base of a save to ``folder``; None if there is none. Raises HoldfastError if it is required."""
    try:
        path = base.choose()
        if path is None or (path == folder and not base.required):
            return None
        check_sibling(path, folder)
        record = _read(path)
    except (HoldfastError, OSError) as error:
        if base.required:
            raise
        log.warning("%s is saved as a whole: its base cannot be read (%s)", folder, error)
        return None
    return OpenedBase(path, record, DataFiles(path, record.data_files))


def _read(folder: Place) -> Manifest:
    target = folder / manifest.FILE_NAME
    try:
        return manifest.decode(target.read_small(), str(target))
    except (FileNotFoundError, StorageError) as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise NotACheckpoint(f"{folder} cannot be a base: it is no committed checkpoint of holdfast") from None


def reuse(
    base: OpenedBase | None, files: Sequence[DataFile], plan: Plan, rank: int, folder: Place, *, opened: OpenFiles,
    fingerprints: Fingerprints, copier: Copier,
) -> Reused:  # fmt: skip
    """Find what ``files`` have in common with the base, and make sure that ``folder`` can be read without writing it.

    On local disk files of the base are hard-linked; ``opened`` collects the links, for the caller to close, and to
    delete if the save fails. Trouble with the base is logged, and what it concerns is written.
    """
    pieces = _pieces(plan, rank)
    prints = fingerprints.take(
        (
            (*pieces[file.section, piece.key][:2], source)
            for file in files
            for piece, source in zip(file.pieces, file.sources, strict=True)
            if (file.section, piece.key) in pieces
        ),
        copier,
    )
    if base is None:
        return Reused(list(files), [], prints)
    before = fingerprints.of(base.record.save)
    position = {name: number for number, name in enumerate(plan.tensors)}
    to_write: list[DataFile] = []
    reused: list[ReusedFile] = []
    for file in files:
        gone: set[int] = set()
        count = 0
        for index, claims in _claims(base, file, pieces, prints, before):
            same = _same(base, index, claims, copier) if count < MOST else []
            path = _bring(base, index, file.section, folder, opened) if same else None
            if path is not None:
                count += 1
                record = base.file(index)
                old = (path, record.bytes, record.header_bytes, record.header_digest, str(record.save))
                tensors = manifest.ranges(sorted(position[claim.name] for claim in same))
                reused.append(ReusedFile(old, tensors, file.volume))
                gone.update(number for claim in same for number in claim.numbers)
        left = _without(file, gone) if gone else file
        if left is not None:
            to_write.append(left)
        elif any(path.parent == folder / file.section for path in opened.paths):  # else it is synced with the file
            (folder / file.section).sync_folder()
    return Reused(to_write, reused, prints)


_Pieces = dict[tuple[str, str], tuple[str, Box, tuple[int, ...]]]


def _pieces(plan: Plan, rank: int) -> _Pieces:
    """Name, box and global shape of each piece of a tensor that a rank owns, by section and key."""
    return {
        (names.section_of(name), datafile.key_of(names.in_section(name), box, tensor.shape)): (name, box, tensor.shape)
        for name, tensor, box in plan.written_by(rank)
    }


def _claims(
    base: OpenedBase, file: DataFile, pieces: _Pieces, prints: Prints, before: Prints
) -> list[tuple[int, list[Claim]]]:
    """Tensors that a file of the base has in exactly these pieces, by the number of that file; the most bytes first."""
    tensors: dict[str, list[tuple[int, Box]]] = {}
    for number, piece in enumerate(file.pieces):
        if piece.nbytes and (file.section, piece.key) in pieces:
            name, box, shape = pieces[file.section, piece.key]
            record = base.record.tensors.get(name)
            if record is not None and (record.dtype, tuple(record.shape)) == (piece.dtype, tuple(shape)):
                tensors.setdefault(name, []).append((number, box))
    claims: dict[int, list[Claim]] = {}
    for name, own in tensors.items():
        cells = [base.record.tensors[name].touching(box) for _, box in own]
        files = {at[0][1] for at in cells}
        if len(files) == 1 and all(len(at) == 1 and at[0][0] == box for at, (_, box) in zip(cells, own, strict=True)):
            numbers = [number for number, _ in own]
            now, then = ([known.get((name, box)) for _, box in own] for known in (prints, before))
            same = None if None in now or None in then else now == then
            keys, sources = [file.pieces[n].key for n in numbers], [file.sources[n] for n in numbers]
            claims.setdefault(files.pop(), []).append(Claim(name, numbers, keys, sources, same))
    return sorted(claims.items(), key=lambda item: -sum(claim.nbytes for claim in item[1]))


def _same(base: OpenedBase, index: int, claims: Sequence[Claim], copier: Copier) -> list[Claim]:
    """The claims on a file that hold, if they are enough to reuse it."""
    record = base.file(index)
    enough = max(SMALLEST, (record.bytes - record.header_bytes) / 2)
    if sum(claim.nbytes for claim in claims if claim.same is not False) < enough:
        return []
    sums: dict[str, Sequence[str]] = {}
    if any(claim.same is None for claim in claims):
        try:
            header = base.files.header(index)
        except (HoldfastError, OSError) as error:
            log.warning("what %s holds is written again: %s", base.files.path(index), error)
            return []
        for claim in claims:
            for key, source in zip(claim.keys, claim.sources, strict=True):
                piece = header.pieces.get(key)
                if piece is not None and piece.dtype == dtypes.name_of(source.dtype):
                    sums[key] = header.sums.get(key, ())
    return unchanged(claims, sums, enough, copier)


def _bring(base: OpenedBase, index: int, section: str, folder: Place, opened: OpenFiles) -> str | None:
    """The path by which ``folder`` calls a file of the base from now on; None if it cannot have it."""
    record = base.file(index)
    beside = record.path if record.path.startswith("../") else f"../{base.folder.name}/{record.path}"
    if beside.split("/")[1] == folder.name:
        return None  # it lies in the checkpoint that is being overwritten
    source, path = base.folder / record.path, f"{section}/{record.path.rpartition('/')[2]}"
    target = folder / path
    if not (source.has_links and target.has_links):
        return beside
    try:
        return path if _link(source, target, record.bytes, opened) else None
    except OSError as error:
        if error.errno in _NO_LINKS:
            log.debug("%s is reused where it lies: %s", source, error)
            return beside
        log.warning("what %s holds is written again: %s", source, error)
        return None


def _link(source: Place, target: Place, nbytes: int, opened: OpenFiles) -> bool:
    if disk.stat(source).st_size != nbytes:
        raise OSError(errno.EIO, "it has another size than its manifest says")
    target.parent.make_folder()
    try:
        disk.link(source, target)
    except FileExistsError:
        # Another rank may reuse the same file, or the checkpoint that is overwritten does: it is theirs to take away.
        return os.path.samefile(source, target)
    opened.paths.append(target)
    if len(opened.descriptors) < KEPT:
        # Locked as a file that is being written: a sweep sees that this save lives.
        opened.descriptors.append(target.open_locked())
    return True


def _without(file: DataFile, gone: set[int]) -> DataFile | None:
    """What is left of a file to write; None if that is nothing."""
    kept = [number for number in range(len(file.pieces)) if number not in gone]
    if not any(file.pieces[number].nbytes for number in kept):
        return None
    pieces = datafile.arrange(file.pieces[number] for number in kept)
    held = {base_of(piece.key) for piece in pieces}
    shapes = {name: shape for name, shape in file.shapes.items() if name in held}
    return replace(file, pieces=pieces, sources=[file.sources[number] for number in kept], shapes=shapes)
