"""Damage to a checkpoint on disk: a bad block, a flipped bit, a cut or a missing file; each says what it hit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.ondisk import datafile, manifest, names
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.datafile import Piece
from holdfast.read.files import DataFiles
from holdfast.storage.local.local_place import LocalPlace

SECTOR = 4096


@dataclass(frozen=True)
class Damage:
    """What was hit: bytes ``offset`` to ``offset + nbytes`` of ``file``, an absolute path.

    ``part`` is "data", "header", "manifest", "attachment" or, for what belongs to no checkpoint, "other"; ``tensor``
    the full name of the tensor whose bytes they are, if they are one's; ``block`` the number of the block within the
    piece of it that this file holds.
    """

    file: str
    part: str
    offset: int
    nbytes: int
    tensor: str | None = None
    block: int | None = None


def corrupt_block(
    path: str | os.PathLike[str], *, tensor: str = "*", block: int | None = None, seed: int = 0
) -> Damage:  # fmt: skip
    """Overwrite bytes in one block (8 MiB, or what is left) of a tensor of the checkpoint at ``path``.

    ``tensor`` is a name or a pattern; among several, and among its blocks if ``block`` does not count them from 0
    (over all its cells, in their order), ``seed`` chooses. Raises ValueError if there is none, NotACheckpoint.
    """
    checkpoint = Checkpoint(LocalPlace(path).absolute())
    files = _data_files(checkpoint)
    blocks_of: dict[str, list[tuple[int, Piece, int]]] = {}
    for name, record in checkpoint.manifest.tensors.items():
        if fnmatchcase(name, tensor):
            for box, index in record.boxes():
                piece = files.header(index).pieces[datafile.key_of(names.in_section(name), box, record.shape)]
                blocks = ((index, piece, n) for n in range(-(-piece.nbytes // BLOCK)))
                blocks_of.setdefault(name, []).extend(blocks)
    if not blocks_of:
        raise ValueError(f"{path} has no tensor {tensor!r} with bytes; it has {', '.join(checkpoint.tensors)}")
    chance = random.Random(seed)
    name = chance.choice(sorted(blocks_of))
    if block is not None and not 0 <= block < len(blocks_of[name]):
        raise ValueError(f"{name} has {len(blocks_of[name])} blocks, so there is no block {block}")
    index, piece, number = chance.choice(blocks_of[name]) if block is None else blocks_of[name][block]
    begin, nbytes = piece.begin + number * BLOCK, min(BLOCK, piece.nbytes - number * BLOCK)
    at = begin + chance.randrange(nbytes)
    length = min(SECTOR, begin + nbytes - at)
    file = Path(str(files.path(index)))
    with file.open("r+b") as opened:
        opened.seek(at)
        before = opened.read(length)
        opened.seek(at)
        opened.write(bytes(byte ^ chance.randrange(1, 256) for byte in before))
    return Damage(str(file), "data", at, length, name, number)


def flip_bit(
    path: str | os.PathLike[str], *, file: str = "*", offset: int | None = None, bit: int | None = None, seed: int = 0
) -> Damage:
    """Flip one bit of a file, or of one of the files of the checkpoint at ``path`` that fit ``file``.

    ``seed`` chooses what is not given: each byte of these files is as likely. Raises ValueError if there is none.
    """
    chance = random.Random(seed)
    target = _one_of(path, file, chance, by_size=True)
    size = target.stat().st_size
    at = chance.randrange(size) if offset is None else offset
    if not 0 <= at < size:
        raise ValueError(f"{target} has {size} bytes, so there is no byte {at}")
    damage = _damage_at(target, at, 1)
    with target.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << (chance.randrange(8) if bit is None else bit)]))
    return damage


def truncate(
    path: str | os.PathLike[str], *, file: str = "*.safetensors", size: int | None = None, seed: int = 0
) -> Damage:
    """Cut a file, or one of those of the checkpoint at ``path`` that fit ``file``, to ``size`` bytes.

    ``seed`` chooses what is not given. Raises ValueError if there is no such file, or it is no longer than that.
    """
    chance = random.Random(seed)
    target = _one_of(path, file, chance, by_size=True)
    nbytes = target.stat().st_size
    left = chance.randrange(nbytes) if size is None else size
    if not 0 <= left < nbytes:
        raise ValueError(f"{target} has {nbytes} bytes, and cannot be cut to {left}")
    damage = _damage_at(target, left, nbytes - left)
    os.truncate(target, left)
    return damage


def drop_file(path: str | os.PathLike[str], *, file: str = "*.safetensors", seed: int = 0) -> Damage:
    """Delete a file, or one of those of the checkpoint at ``path`` that fit ``file``; ``seed`` chooses."""
    target = _one_of(path, file, random.Random(seed), by_size=False)
    damage = _damage_at(target, 0, target.stat().st_size)
    target.unlink()
    return damage


def _one_of(path: str | os.PathLike[str], pattern: str, chance: random.Random, *, by_size: bool) -> Path:
    at = Path(path).absolute()
    if at.is_file():
        return at
    files = sorted(f for f in at.rglob("*") if f.is_file() and fnmatchcase(f.relative_to(at).as_posix(), pattern))
    weights = [f.stat().st_size if by_size else 1 for f in files]
    if not sum(weights):
        raise ValueError(f"{path} has no file {pattern!r}" + (" with bytes" if by_size else ""))
    return chance.choices(files, weights)[0]


def _damage_at(file: Path, begin: int, nbytes: int) -> Damage:
    """What these bytes of a file are; read before they are changed."""
    folder = next((at for at in file.parents if (at / manifest.FILE_NAME).is_file()), None)
    if folder is None:
        return Damage(str(file), "other", begin, nbytes)
    relative = file.relative_to(folder).as_posix()
    if relative == manifest.FILE_NAME:
        return Damage(str(file), "manifest", begin, nbytes)
    try:
        files = _data_files(Checkpoint(LocalPlace(folder)))
        index = [record.path for record in files.records].index(relative)
        header = files.header(index)
    except ValueError:  # not one of its data files, or, as Damaged is a ValueError, damaged before
        kind = "attachment" if relative.startswith("attachments/") else "other"
        return Damage(str(file), kind, begin, nbytes)
    if begin < header.nbytes:
        return Damage(str(file), "header", begin, nbytes)
    section = relative.partition("/")[0]
    for name, piece in _tensors_of(files, index, section):
        if piece.begin <= begin < piece.begin + piece.nbytes:
            return Damage(str(file), "data", begin, nbytes, name, (begin - piece.begin) // BLOCK)
    return Damage(str(file), "data", begin, nbytes)


def _tensors_of(files: DataFiles, index: int, section: str) -> Iterator[tuple[str, Piece]]:
    for key, piece in files.header(index).pieces.items():
        yield f"{section}/{datafile.base_of(key)}", piece


def _data_files(checkpoint: Checkpoint) -> DataFiles:
    files = checkpoint.files
    if not isinstance(files, DataFiles):
        raise HoldfastError(f"{checkpoint.path} is of the format {checkpoint.format}, not a checkpoint of holdfast")
    return files
