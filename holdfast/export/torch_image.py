"""A state in memory as one file of torch: copied and laid out first, summed and written later.

Lightning's plugin calls `copied` where training waits, and `write` in the background; `dcp_to_torch_save` calls both.
Never writes a pickle that names more than `torch.load` allows with ``weights_only=True``, and never looks at the state
again once it is copied.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from holdfast.buffers.memory import Buffer, buffer
from holdfast.buffers.stage import contiguous_parts, copy_bytes
from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.export import copying, pickles, zip_file
from holdfast.export.torch_file import add_small
from holdfast.export.zip_file import Ending, Member
from holdfast.ondisk import scalars
from holdfast.state.tensors import dtype_name
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming

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
