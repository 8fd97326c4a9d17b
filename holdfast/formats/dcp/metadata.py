"""DCP's metadata: which tensors and objects a folder holds, and where in its data files each of their entries lies."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import members
from holdfast.formats.dcp import distcp
from holdfast.formats.dcp.distcp import Entry
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.machine.torch_files import load_pickle
from holdfast.formats.machine.untrusted import read_whole
from holdfast.formats.simplified import PerRank
from holdfast.formats.sources import File, Stretch, file
from holdfast.formats.stored import Stored
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, inside, whole
from holdfast.storage.place import Place

DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
MAX_METADATA = 4 << 30
MAX_COMPARED = 64 << 10
"""Tensors of more bytes of which each rank wrote its own are taken for replicas."""

_OF_TRAINING = frozenset(["model", "module", "optim", "optimizer", "model_state_dict", "state_dict", "state"])


def metadata_files(folder: Place) -> list[Place]:
    """`.metadata`, or that of each rank where the save ran without collectives; none if there is none.

    Raises Damaged if that of a rank is missing.
    """
    names = members.names(folder) if folder.is_dir() else []
    if ".metadata" in names:
        return [folder / ".metadata"]
    ranks = {int(m[1]) for m in map(re.compile(r"__(\d+)\.metadata").fullmatch, names) if m}
    wrote = {int(m[1]) for m in map(DATA_FILE.fullmatch, names) if m}
    missing = [*(rank for rank in range(len(ranks)) if rank not in ranks), *sorted(wrote - ranks)]
    if ranks and missing:
        raise Damaged(
            f"{folder} was saved without collectives, with the metadata of each rank in a file, but "
            f"{folder / f'__{missing[0]}.metadata'} is missing: that rank never finished, or its file was lost"
        )
    return [folder / f"__{rank}.metadata" for rank in sorted(ranks)]


def load(path: Place) -> Record:
    """One metadata file. Raises Damaged, Unsupported."""
    record = load_pickle(read_whole(path, MAX_METADATA), path)
    if not isinstance(record, Record) or not record.name.endswith("Metadata"):
        raise Damaged(f"{path} holds no metadata of DCP")
    version = record.get("version")
    if version is not None and str(version).partition(".")[0] not in ("0", "1"):
        raise Unsupported(f"{path} is of DCP's version {version}; versions up to 1 are read")
    return record


class Files:
    """The data files of a folder, each looked at once."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._files: dict[str, File] = {}

    def get(self, relative: Any, key: str) -> File:
        """A file by its name in the metadata. Raises Damaged if it is missing or lies outside of the folder."""
        if not isinstance(relative, str) or not relative:
            raise Damaged(f"{self.folder}: {key} is said to be in a file without a name")
        if relative not in self._files:
            path = self.folder / relative
            if relative.startswith("/") or not members.lies_in(path, self.folder):
                raise Damaged(f"{self.folder}: {key} is said to be in {relative}, outside of the checkpoint")
            try:
                self._files[relative] = file(path)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                raise Damaged(f"{path} is missing; {key} is in it. Bring it back from a copy") from None
        return self._files[relative]

    def world_size(self) -> int:
        """One more than the last rank that has a file here."""
        names = [*self._files, *members.names(self.folder)]
        return 1 + max((int(m[1]) for m in map(DATA_FILE.fullmatch, names) if m), default=0)


@dataclass
class Tensor:
    """A tensor while its chunks are collected. ``of_rank``: where each rank that wrote all of it did so."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[Box, Stretch] = field(default_factory=dict)
    of_rank: dict[int, Stretch] = field(default_factory=dict)

    def stored(self, key_path: Any) -> Stored | PerRank:
        """The tensor; one for each rank if they wrote different ones (states of random number generators, say).

        Replicas of parameters and of their optimizer state are taken as equal: to compare them is to read them all.
        """
        tensor = Stored(self.dtype, self.shape, tuple(self.chunks.items()))
        if len(self.of_rank) < 2 or tensor.nbytes > MAX_COMPARED or not _OF_TRAINING.isdisjoint(key_path):
            return tensor
        if len({place.read() for place in self.of_rank.values()}) == 1:
            return tensor
        box = whole(self.shape)
        own = {rank: Stored(self.dtype, self.shape, ((box, place),)) for rank, place in self.of_rank.items()}
        return PerRank(tuple(own.get(rank) for rank in range(max(own) + 1)))


def collect(
    record: Record, path: Place, files: Files, rank: int, tensors: dict[str, Tensor],
    objects: dict[str, dict[int, Entry]],
) -> None:  # fmt: skip
    """Add the contents of one metadata file. Chunks that several ranks wrote (replicas) count once."""
    infos = _infos(record, path)
    for key, described in _mapping(record, "state_dict_metadata", path).items():
        if not isinstance(key, str) or not isinstance(described, Record):
            raise Damaged(f"{path} lists {str(key)[:100]}, which is neither a tensor nor an object")
        if described.name.endswith(".BytesStorageMetadata"):
            objects.setdefault(key, {})[rank] = _entry(infos.get((key, None)), key, path, files)
            continue
        dtype, shape = _dtype(described, path, key), _numbers(described.get("size"), path, f"the shape of {key}")
        tensor = tensors.setdefault(key, Tensor(dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise Damaged(f"{path}: {key} is {dtype} {list(shape)}, for another rank {tensor.dtype} {tensor.shape}")
        chunks = described.get("chunks")
        if not isinstance(chunks, list):
            raise Damaged(f"{path} does not list the chunks of {key}")
        for chunk in chunks if dtypes.known(dtype) else ():
            box = Box(_attribute(chunk, "offsets", path, key), _attribute(chunk, "sizes", path, key))
            if not box.size:  # a rank without rows of it
                continue
            if not len(box.offsets) == len(box.lengths) == len(shape) or not inside(box, shape):
                raise Damaged(f"{path}: {key} of shape {list(shape)} has a chunk at {box.offsets} of {box.lengths}")
            if box not in tensor.chunks or box.lengths == shape:
                entry = _entry(infos.get((key, box.offsets)), key, path, files)
                stretch = distcp.chunk(entry, dtype, box.lengths)
                tensor.chunks.setdefault(box, stretch)
                if box.lengths == shape:
                    tensor.of_rank[rank] = stretch


def _infos(record: Record, path: Place) -> dict[tuple[Any, tuple[int, ...] | None], Any]:
    """Where each entry lies, by its key and, for a chunk of a tensor, its offsets."""
    infos: dict[tuple[Any, tuple[int, ...] | None], Any] = {}
    for index, info in _mapping(record, "storage_data", path).items():
        key = index.get("fqn") if isinstance(index, Record) else None
        if not isinstance(index, Record) or not isinstance(key, str):
            raise Damaged(f"{path} places {str(index)[:100]}, which is no key")
        offsets = index.get("offset")
        infos[key, None if offsets is None else _numbers(offsets, path, key)] = info
    return infos


def _entry(info: Any, key: str, path: Place, files: Files) -> Entry:
    if not isinstance(info, Record):
        raise Damaged(f"{path} does not say where {key} lies")
    begin, nbytes, transforms = info.get("offset"), info.get("length"), info.get("transform_descriptors") or ()
    source = files.get(info.get("relative_path"), key)
    if type(begin) is not int or type(nbytes) is not int or min(begin, nbytes) < 0:
        raise Damaged(f"{path}: {key} is said to lie at {str(begin)[:40]} and have {str(nbytes)[:40]} bytes")
    if begin + nbytes > source.nbytes:
        raise Damaged(
            f"{source.path} has {source.nbytes} bytes, but {key} is said to lie at {begin}:{begin + nbytes}: "
            "it is truncated or was altered"
        )
    if not isinstance(transforms, (list, tuple)):
        raise Damaged(f"{path}: {key} was written through {str(transforms)[:100]}, which are no extensions")
    return Entry(key, source, begin, nbytes, tuple(map(str, transforms)))


def _dtype(described: Record, path: Place, key: str) -> str:
    # Properties are pickled as a row, the dtype first.
    properties = described.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(dtype, Name):
        raise Damaged(f"{path} does not name the dtype of {key}")
    return dtype.text.removeprefix("torch.")


def _mapping(record: Record, name: str, path: Place) -> dict[Any, Any]:
    mapping = record.get(name)
    if not isinstance(mapping, dict):
        raise Damaged(f"{path} has no {name}")
    return mapping


def _attribute(chunk: Any, name: str, path: Place, key: str) -> tuple[int, ...]:
    return _numbers(chunk.get(name) if isinstance(chunk, Record) else None, path, f"{name} of a chunk of {key}")


def _numbers(value: Any, path: Place, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise Damaged(f"{path}: {what} is {str(value)[:100]}, no row of sizes")
    return tuple(value)
