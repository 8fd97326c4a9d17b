"""What ``torch.save`` wrote, as a tree of values and unread tensors: the zip container and the one before it."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine import pickles, torch_tensors
from holdfast.formats.machine.pickles import Calls, EndsEarly, Record
from holdfast.formats.machine.torch_tensors import Storage, legacy_storage, zip_storage
from holdfast.formats.machine.zips import Archive, is_zip
from holdfast.formats.sources import Memory, Stretch, all_of, file
from holdfast.storage.place import Place

__all__ = ["Storage", "is_torch_file", "load_file", "load_path", "load_pickle"]

MAX_PICKLE = 2 << 30
MAX_PICKLE_DEFLATION = 64
"""How much larger than its file an unpacked pickle may be: some zip their checkpoints."""

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_HEADS = (
    b"L119547037146038801333356L\n.",  # protocols 0 and 1
    *(bytes([0x80, n]) + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." for n in (2, 3)),
    *(bytes([0x80, n]) + b"\x95\r\0\0\0\0\0\0\0\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." for n in (4, 5)),
)
"""How a file of the old container begins: its magic number, pickled."""


def is_torch_file(data: Stretch) -> bool:
    """Whether this begins as torch's files do, those of 2016 included, which `load_file` refuses."""
    return is_zip(data) or _head(data).startswith(_HEADS) or _is_tar(data)


def load_path(path: Place) -> Any:
    """What the file at ``path`` holds."""
    return load_file(all_of(file(path)))


def load_file(data: Stretch) -> Any:
    """What a file of torch holds: containers, values, `Stored` and `Opaque` tensors, and records of objects.

    Raises Damaged if it is truncated or contradicts itself, Unsupported if it holds code or names it.
    """
    return _load(data, _calls(data.source.path))


def load_pickle(data: bytes, where: Place) -> Any:
    """A bare pickle that names torch's types but has no storages beside it."""
    return pickles.load(data, where, calls=_calls(where))[0]


def _load(data: Stretch, calls: Calls) -> Any:
    if is_zip(data):
        return _load_zip(data, calls)
    if _head(data).startswith(_HEADS):
        return _load_legacy(data, calls)
    path = data.source.path
    if _is_tar(data):
        raise Unsupported(f"{path} was written by a torch of 2016; load it with torch.load and save it again")
    raise Damaged(f"{path} is no file of torch.save, or its beginning was altered")


def _head(data: Stretch) -> bytes:
    return data.read(0, min(32, data.nbytes))


def _is_tar(data: Stretch) -> bool:
    if data.nbytes < 512:
        return False
    header = data.read(0, 512)
    first = header[:100].rstrip(b"\0")
    return header[257:262] == b"ustar" and first in (b"sys_info", b"pickle", b"tensors", b"storages")


def _load_zip(data: Stretch, calls: Calls) -> Any:
    archive, where = Archive(data), data.source.path
    pickles_in = [name for name in archive.names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles_in) != 1:
        held = ", ".join(name[:60] for name in archive.names[:5])
        raise Unsupported(f"{where} is a zip archive, but none of torch.save: it holds {held or 'nothing'}")
    prefix = pickles_in[0].partition("/")[0]
    if f"{prefix}/constants.pkl" in archive:
        raise Unsupported(f"{where} is a TorchScript program; save the module's state_dict() instead")
    _check_order(archive, f"{prefix}/byteorder", where)
    nbytes = archive.nbytes(pickles_in[0])
    if nbytes > MAX_PICKLE or nbytes > MAX_PICKLE_DEFLATION * data.nbytes:
        raise Damaged(f"{where}: its pickle claims {nbytes} bytes, the file has {data.nbytes}")
    storages: dict[str, Stretch] = {}

    def storage(key: str, nbytes: int) -> Stretch:
        if key not in storages:
            name = f"{prefix}/data/{key}"
            if name not in archive:
                name = f"{prefix}/tensors/{key}"  # torch 1.4
            if name not in archive:
                raise Damaged(f"{where}: its tensors name storage {key[:60]!r}, which it does not hold; it was altered")
            storages[key] = archive.member(name)
        return storages[key].part(0, nbytes)

    pickled = archive.member(pickles_in[0]).read()
    return pickles.load(pickled, where, calls=calls, persistent=lambda key: zip_storage(key, storage, where))[0]


def _check_order(archive: Archive, name: str, where: Place) -> None:
    if name in archive and (archive.nbytes(name) > 10 or archive.member(name).read() != b"little"):
        raise Unsupported(f"{where} was written on a big-endian machine; load and save it again with torch")


def _load_legacy(data: Stretch, calls: Calls) -> Any:
    # The length of the pickles is not recorded: a prefix is tried, and a longer one if they do not end in it.
    length = 1 << 20
    while True:
        length = min(length, data.nbytes, MAX_PICKLE)
        try:
            return _load_legacy_from(data, data.read(0, length), calls)
        except EndsEarly:
            if length in (data.nbytes, MAX_PICKLE):
                raise
        length *= 8


def _load_legacy_from(data: Stretch, head: bytes, calls: Calls) -> Any:
    where, at = data.source.path, 0
    start: list[Any] = []
    for _ in range(3):
        value, at = pickles.load(head, where, start=at)
        start.append(value)
    if start[0] != _MAGIC or start[1] != _PROTOCOL or not isinstance(start[2], dict):
        raise Damaged(f"{where} begins like a file of torch.save, but its first pickles are others; it was altered")
    if not start[2].get("little_endian", True):
        raise Unsupported(f"{where} was written on a big-endian machine; load and save it again with torch")
    # The pickle is read twice: for the storages, and once their places are known for the tensors.
    sizes: dict[str, tuple[int, int]] = {}
    nothing = all_of(Memory(where, b""))

    def note(key: str, nbytes: int, itemsize: int) -> Stretch:
        if sizes.setdefault(key, (nbytes, itemsize))[0] != nbytes:
            raise Damaged(f"{where}: its tensors disagree about the size of storage {key[:60]!r}; it was altered")
        return nothing

    _, after = pickles.load(
        head, where, calls=dict.fromkeys(calls, _unread), start=at,
        persistent=lambda key: legacy_storage(key, note, where),
    )  # fmt: skip
    keys, after = pickles.load(head, where, start=after)
    texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not texts or len(keys) != len(sizes) or {*keys} != sizes.keys():
        raise Damaged(f"{where}: its storages are not those that its tensors name; it was altered")
    places: dict[str, Stretch] = {}
    for key in keys:
        nbytes, itemsize = sizes[key]
        if data.part(after, 8).read() != struct.pack("<q", nbytes // itemsize):
            raise Damaged(f"{where}: no storage of {nbytes} bytes begins at byte {after}; it was altered")
        places[key] = data.part(after + 8, nbytes)
        after += 8 + nbytes

    def place(key: str, nbytes: int, itemsize: int) -> Stretch:
        return places[key]

    return pickles.load(
        head, where, calls=calls, persistent=lambda key: legacy_storage(key, place, where), start=at
    )[0]  # fmt: skip


def _unread(*_: Any) -> Record:
    return Record("torch.Tensor")


def _nested(where: Place, data: Any) -> Any:
    # A storage that a plain pickle holds as a file of its own. There is none within that.
    if not isinstance(data, bytes):
        raise TypeError(f"a storage of a {type(data).__name__}")
    return _load(all_of(Memory(where, data)), torch_tensors.calls(where))


def _calls(where: Place) -> Calls:
    return {**torch_tensors.calls(where), "torch.storage._load_from_bytes": partial(_nested, where)}
