"""torch's own file: one archive of all tensors and values, out of a checkpoint or of a state in memory."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from holdfast.buffers.memory import Buffer, buffer
from holdfast.buffers.stage import contiguous_parts, copy_bytes, host_view
from holdfast.checkpoint import Checkpoint
from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.export import copying, pickles, zip_file
from holdfast.export.draft import Draft, Fixed, Span
from holdfast.export.selection import Leaf, Selection, check_values, nested
from holdfast.export.zip_file import Ending, Member
from holdfast.ondisk import dtypes, scalars
from holdfast.ondisk.box import whole
from holdfast.ondisk.containers import mapped
from holdfast.state.tensors import dtype_name
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming

NAME = "state.pt"
"""How the file is called until it stands at its target."""


def draft(checkpoint: Checkpoint, selection: Selection) -> Draft:
    """One file. A value that differs by rank becomes the list of the values of all ranks."""
    check_values(selection, pickles.dumps)
    leaves = list(selection.tensors.values())
    members, at = zip_file.storages(leaf.nbytes for leaf in leaves)
    spans = [Span(leaf, whole(leaf.shape), NAME, m.data) for leaf, m in zip(leaves, members, strict=True)]

    def finish(sums: Sequence[str]) -> Iterator[Fixed]:
        totals = [int(total) for total in sums]
        tail, begin = b"", 0
        for m, total in zip(members, totals, strict=True):
            yield Fixed(NAME, begin, tail + zip_file.before(m))
            tail, begin = zip_file.after(m, total), m.data + m.nbytes
        ending = Ending(at, zip(members, totals, strict=True))
        keys = {leaf.name: str(number) for number, leaf in enumerate(leaves)}
        more = len(keys)

        def replaced(leaf: Any) -> Any:
            nonlocal more
            if isinstance(leaf, Leaf):
                return pickles.tensor(leaf.dtype, leaf.shape, leaf.nbytes, keys[leaf.name])
            if isinstance(leaf, torch.Tensor):
                key, more = str(more), more + 1
                ending.add(f"data/{key}", data_of(leaf))
                return pickles.tensor(dtypes.name_of(leaf.dtype), tuple(leaf.shape), leaf.nbytes, key)
            return leaf

        tree = mapped(nested(selection, checkpoint.per_rank), replaced)
        add_small(ending, pickles.dumps(tree))
        yield Fixed(NAME, begin, tail + ending.close())

    return Draft({NAME: at}, spans, "crc32", finish)


def add_small(ending: Ending, pickle: bytes) -> None:
    """The members that say what the storages are: the pickle, the byte order, the version of the layout."""
    ending.add("data.pkl", pickle)
    ending.add("byteorder", b"little")
    ending.add("version", b"3\n")


def archive(tree: Any, tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """A whole archive in memory; ``tree`` calls the storages of ``tensors`` by their numbers."""
    ending = Ending(0)
    for number, tensor in enumerate(tensors):
        ending.add(f"data/{number}", data_of(tensor))
    add_small(ending, pickles.dumps(tree))
    return ending.close()


def data_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on the CPU, row-major."""
    tensor = tensor.contiguous()
    return bytes(host_view(tensor.data_ptr(), tensor.nbytes)) if tensor.nbytes else b""


_GRAIN = 2 << 20
"""Memory is taken in multiples of this, a huge page, so that a state that grows a little finds room."""

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{8}\.holdfast", re.DOTALL)

_VALUES = frozenset(
    [type(None), bool, int, float, str, bytes, bytearray, complex, torch.Size, torch.dtype, torch.device]
)
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter, torch.nn.Buffer])


@dataclass(frozen=True)
class Image:
    """The file before it is written: ``memory`` holds its first ``end`` bytes, but for headers and sums.

    ``members`` are the tensors, and ``pickle`` says how they belong together.
    """

    memory: Buffer
    members: list[Member]
    pickle: bytes
    end: int


def copied(state: Mapping[str, Any], memory: Buffer | None = None) -> Image:
    """Copy ``state`` to host memory: to ``memory`` if that is large enough. Raises Unsupported, naming the path.

    NumPy's numbers become Python's and its arrays tensors; other kinds of dicts, a deque and a frozenset become a dict,
    a list and a set: `torch.load` reads no more with ``weights_only=True``.
    """
    tree = _Tree()
    pickle = pickles.dumps(tree.node("", dict(state)))
    members, at = zip_file.storages(tensor.nbytes for tensor in tree.tensors)
    if memory is None or len(memory.view) < at:
        memory = buffer(max(-(-at // _GRAIN), 1) * _GRAIN)
    for member, tensor in zip(members, tree.tensors, strict=True):
        address = memory.address + member.data
        for part in contiguous_parts(tensor) if tensor.nbytes else ():
            copy_bytes(part, 0, part.nbytes, address)
            address += part.nbytes
    return Image(memory, members, pickle, at)


def write(image: Image, path: LocalPlace, extra: Mapping[str, bytes], commit: Callable[[LocalPlace], None]) -> int:
    """Write the file beside ``path``, durably, under a temporary name; then ``commit`` renames it.

    ``extra`` are more members of the archive. Returns the size of the file. If something fails, the file is deleted.
    """
    ending = Ending(image.end, list(_sealed(image)))
    add_small(ending, image.pickle)
    for name, data in extra.items():
        ending.add(name, data)
    tail = ending.close()
    path.parent.make_folder()
    _sweep(path.parent)
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.holdfast")
    nbytes = image.end + len(tail)
    locked, _ = temporary.open_to_write(nbytes)  # until it is closed, `_sweep` leaves the file alone
    try:
        copying.write(temporary, image.memory.view[: image.end], 0)
        with naming(temporary, "write"), copying.opened(temporary, os.O_RDWR) as fd:
            disk.write_all(fd, tail, image.end, temporary)
            disk.sync(fd, temporary)
        commit(temporary)
    except BaseException:
        with suppress(OSError):  # it has been renamed
            disk.delete(temporary)
        raise
    finally:
        os.close(locked)
    return nbytes


def _sweep(folder: LocalPlace) -> None:
    """Delete what `write` has left in a folder when its process was killed. A failure costs space alone."""
    try:
        left = [LocalPlace(entry.path) for entry in disk.listed(folder) if _TEMPORARY.fullmatch(entry.name)]
        for path in left:
            if not path.in_use():
                disk.delete_all(path)
    except OSError as error:
        log.warning("what killed saves may have left in %s stays: %s", folder, error)


def _sealed(image: Image) -> Iterator[tuple[Member, int]]:
    """Each tensor with its sum, after its headers were put around it."""
    view = image.memory.view
    for member in image.members:
        total = crc32(view[member.data : member.data + member.nbytes])
        before, after = zip_file.before(member), zip_file.after(member, total)
        view[member.header : member.data] = before
        view[member.data + member.nbytes : member.end] = after
        yield member, total


class _Tree:
    """Turns a state into nodes that `pickles` writes, and collects its tensors: the same memory once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def node(self, at: str, value: Any) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(at, value)
        if isinstance(value, dict):
            items = [(_key(at, key), self.node(f"{at}/{key}" if at else str(key), v)) for key, v in value.items()]
            return kind(items) if kind is OrderedDict else Counter(dict(items)) if kind is Counter else dict(items)
        if kind in (list, tuple, deque):
            elements = [self.node(f"{at}/{i}", element) for i, element in enumerate(value)]
            return tuple(elements) if kind is tuple else elements
        if kind in (set, frozenset):
            return {_key(at, element) for element in value}
        if scalars.is_array(value):
            return self._array(at, value)
        return _number(at, value)

    def _tensor(self, at: str, tensor: torch.Tensor) -> Any:
        if type(tensor) not in _TENSORS:
            raise Unsupported(
                f"{at} is a {scalars.full_name(tensor)}, and a file holds plain tensors: save a plain one that has its "
                "values (full_tensor() of a DTensor, dequantize())"
            )
        dtype, tensor = dtype_name(at, tensor), tensor.detach()
        layout = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        memory = (tensor.data_ptr(), dtype, tensor.device, layout)
        number = self._numbers.setdefault(memory if tensor.nbytes else (at,), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return pickles.tensor(dtype, tuple(tensor.shape), tensor.nbytes, str(number))

    def _array(self, at: str, array: Any) -> Any:
        try:
            return self._tensor(at, torch.from_numpy(array.copy()))
        except TypeError:
            raise Unsupported(f"{at} is a NumPy array of {array.dtype}, for which torch has no type") from None


def _key(at: str, key: Any) -> Any:
    if type(key) is tuple:
        return tuple(_key(at, part) for part in key)
    return key if type(key) in _VALUES else _number(f"{at}: the key {str(key)[:40]!r}", key)


def _number(at: str, value: Any) -> Any:
    """The Python number of a NumPy scalar. Raises Unsupported for everything else."""
    if scalars.is_numpy_scalar(value):
        return scalars.python_scalar(value)
    raise Unsupported(f"{at}: {scalars.why_not(value)}")
