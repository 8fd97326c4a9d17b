"""The memory that the tensors of a checkpoint come into: new, the caller's own, or the file itself, mapped.

`Checkpoint.read` and `Checkpoint.state_dict` ask here what is to be read where. Never maps what lies in a store, and
never changes a file.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.errors import Damaged, Mismatch, Unsupported
from holdfast.events import log
from holdfast.ondisk import dtypes, names
from holdfast.ondisk.box import Box, inside, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.read.examine import check_pieces
from holdfast.read.files import Files
from holdfast.read.ranges import Verify
from holdfast.read.source import ReadStats, damaged
from holdfast.read.wanted import Wanted
from holdfast.state.tensors import dtype_name
from holdfast.storage.local import disk
from holdfast.storage.naming import naming_unless_missing
from holdfast.storage.place import Place

Records = Mapping[str, TensorRecord]
SavedName = Callable[[str], str]
_SHOWN = 20


class Filled(NamedTuple):
    """Tensors by name, and what has to be read before they hold what was saved."""

    tensors: dict[str, torch.Tensor]
    wanted: list[Wanted]


def into_new(records: Records, saved_name: SavedName) -> Filled:
    """New memory for whole tensors; tied ones share it."""
    stored: dict[str, torch.Tensor] = {}
    alike: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    filled = Filled({}, [])
    for name, record in records.items():
        source = saved_name(name)
        if source not in stored:
            first = alike.get((record.dtype, record.shape))
            if first is None:
                made = alike[record.dtype, record.shape] = torch.empty(
                    record.shape, dtype=dtypes.torch_dtype(record.dtype), device="cpu"
                )
            else:  # in half the time
                made = torch.empty_like(first)
            stored[source] = made
            filled.wanted.append(Wanted(source, record, whole(record.shape), stored[source]))
        filled.tensors[name] = stored[source]
    return filled


def into_given(
    records: Records, saved_name: SavedName, into: Mapping[Any, Any], where: object, *, cast: bool
) -> Filled:
    """The tensors of ``into``, nested or by name. Raises Mismatch, listing all that is missing, left over or unlike.

    Of tied tensors one is enough; the others are the same tensor then.
    """
    given = dict(_tensors_in("", into, records))
    by_source: dict[str, torch.Tensor] = {}
    filled, faults = Filled({}, []), []
    for name, tensor in given.items():
        if name not in records:
            faults.append(f"{name} is given, but there is no such tensor, or it was not asked for")
            continue
        record, source = records[name], saved_name(name)
        faults += unlike(name, record, whole(record.shape), tensor, cast=cast)
        if by_source.get(source) is not tensor:
            by_source.setdefault(source, tensor)
            filled.wanted.append(Wanted(source, record, whole(record.shape), tensor.detach()))
    for name in records:
        if name in given:
            filled.tensors[name] = given[name]
        elif saved_name(name) in by_source:
            filled.tensors[name] = by_source[saved_name(name)]
        else:
            faults.append(f"{name} is saved, but no tensor is given for it (only= leaves it out)")
    if faults:
        more = [f"… and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        text = "".join(f"\n    {fault}" for fault in [*faults[:_SHOWN], *more])
        raise Mismatch(f"{where} does not fit into=; nothing was changed:{text}")
    return filled


def unlike(name: str, record: TensorRecord, box: Box, tensor: torch.Tensor, *, cast: bool) -> Iterator[str]:
    """Why a tensor cannot take a box of a saved one. Raises Unsupported for one without plain memory of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise Unsupported(f"{name} is to go into a {type(tensor).__qualname__}: holdfast.load fills those")
    dtype = dtype_name(name, tensor)
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise Unsupported(f"{name} is to go into an expanded tensor, whose elements share memory: give a clone() of it")
    if tuple(tensor.shape) != box.lengths:
        yield f"{name} has shape {list(box.lengths)}, the given tensor {list(tensor.shape)}"
    elif dtype != record.dtype and not cast:
        yield f"{name} is saved as {record.dtype}, the given tensor is {dtype} (cast=True converts)"


def _tensors_in(at: str, node: Any, records: Records) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield at, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            name = key if not at and key in records else names.child(at, str(key))
            yield from _tensors_in(name, value, records)
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from _tensors_in(names.child(at, str(i)), value, records)
    else:
        raise Mismatch(f"into= has a {type(node).__qualname__} at {at}: only tensors can be filled, leave it out")


def into_mapped(
    records: Records, saved_name: SavedName, files: Files, where: object, *, verify: Verify
) -> Filled:  # fmt: skip
    """Tensors that lie whole in a local file as that file, mapped; new memory for all others.

    With ``verify`` every block of what is mapped is read once and compared with its sum, in bounded memory. Raises
    Damaged, listing every fault.
    """
    mapped: dict[str, torch.Tensor] = {}
    pieces: dict[int, list[tuple[Piece, Sequence[str]]]] = {}
    rest: dict[str, TensorRecord] = {}
    maps, stats = MappedFiles(), ReadStats()
    for name, record in records.items():
        source = saved_name(name)
        if source in mapped:
            continue
        as_file = _mapped(source, record, files, maps, stats)
        if as_file is None:
            rest[name] = record
            continue
        mapped[source], index, piece, sums = as_file
        pieces.setdefault(index, []).append((piece, sums))
    faults = []
    for index, some in pieces.items() if verify else ():
        some.sort(key=lambda item: item[0].begin)
        faults += check_pieces(files, index, some, stats)
    if faults:
        raise Damaged("\n".join([f"{where} is damaged:", *dict.fromkeys(faults)]))
    new = into_new(rest, saved_name)
    log.debug("%s: %d tensors mapped, %d read", where, len(mapped), len(new.wanted))
    tensors = {name: new.tensors[name] if name in rest else mapped[saved_name(name)] for name in records}
    return Filled(tensors, new.wanted)


def _mapped(
    source: str, record: TensorRecord, files: Files, maps: MappedFiles, stats: ReadStats
) -> tuple[torch.Tensor, int, Piece, Sequence[str]] | None:
    if not prod(record.shape) or files.is_made(source):
        return None
    everything = whole(record.shape)
    cell, at = next(iter(record.touching(everything)))
    if cell != everything:
        return None
    index, piece, sums = files.piece(at, source, cell, record, stats)
    path = files.plain(index)
    tensor = None if path is None else maps.tensor(path, piece, record.dtype, record.shape)
    return None if tensor is None else (tensor, index, piece, sums)


def box_of(name: str, shape: Sequence[int], box: Sequence[slice | tuple[int, int]]) -> Box:
    """A box that is given by a slice or a pair (start, stop) for each axis; missing axes are taken whole."""
    spans = [b.indices(n)[:2] if isinstance(b, slice) else b for b, n in zip(box, shape, strict=False)]
    if any(isinstance(b, slice) and b.step not in (None, 1) for b in box):
        raise Mismatch(f"a box of {name} has steps of 1 only")
    spans += [(0, n) for n in shape[len(box) :]]
    result = Box(tuple(a for a, _ in spans), tuple(max(b - a, 0) for a, b in spans))
    if len(box) > len(shape) or not inside(result, shape):
        raise Mismatch(f"box {result} does not lie in {name} of shape {list(shape)}")
    return result


_PROT_READ, _PROT_WRITE, _MAP_PRIVATE, _MAP_NORESERVE = 1, 2, 2, 0x4000  # of Linux

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

MappedFile = ctypes.Array[ctypes.c_ubyte]


class MappedFiles:
    """Files of one checkpoint, each mapped once; a mapping lives as long as any tensor of it."""

    def __init__(self) -> None:
        self._mappings: dict[Place, MappedFile | None] = {}

    def tensor(self, path: Place, piece: Piece, dtype: str, shape: Sequence[int]) -> torch.Tensor | None:
        """The whole tensor that a piece of a file is; None if it cannot be mapped (it is not aligned, say).

        Raises Damaged if the file is missing or ends before it.
        """
        if piece.begin % dtypes.itemsize(dtype):
            return None
        if path not in self._mappings:
            self._mappings[path] = _mapping(path)
        mapping = self._mappings[path]
        if mapping is None:
            return None
        if len(mapping) < piece.begin + piece.nbytes:
            raise damaged(path, f"ends at byte {len(mapping)}")
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=piece.nbytes, offset=piece.begin)
        return data.view(dtypes.torch_dtype(dtype)).view(tuple(shape))


def _mapping(path: Place) -> MappedFile | None:
    """All of a file, copied page by page where it is written to; None if the file system or the memory has no room."""
    try:
        with naming_unless_missing(path, "open"):
            fd = disk.open_regular(path)
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    try:
        nbytes = os.fstat(fd).st_size
        # Not Python's mmap: that keeps a descriptor of every file. Nothing is reserved for pages that may be written,
        # else the kernel would refuse a file that is larger than the memory.
        flags = _MAP_PRIVATE | _MAP_NORESERVE
        address = _libc.mmap(None, nbytes, _PROT_READ | _PROT_WRITE, flags, fd, 0) if nbytes else None
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        return None
    mapping: MappedFile = (ctypes.c_ubyte * nbytes).from_address(address)
    finalizer = weakref.finalize(mapping, _libc.munmap, address, nbytes)
    finalizer.atexit = False  # tensors may outlive the interpreter's end
    return mapping
