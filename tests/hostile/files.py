"""Hostile archives, indexes and folders: paths that lead away, sizes that lie, what unpacks without end, odd files.

Each case makes a whole checkpoint in an empty folder. ``secret.txt`` beside that folder must not be read by any.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors

import holdfast
from holdfast.ondisk import blocks
from holdfast.ondisk.manifest import seal
from tests.hostile.pickled import Case, file_of, state, zipped

BIG = 1 << 40

# Zip


def _fields(signature: bytes, at: int, number: int, width: int = 4, which: int = 0) -> bytes:
    data = bytearray(zipped(state()))
    place = -1
    for _ in range(which + 1):
        place = data.index(signature, place + 1)
    data[place + at : place + at + width] = number.to_bytes(width, "little")
    return bytes(data)


def _renamed() -> bytes:
    """A member that is called one thing by its own header and another by the directory."""
    return zipped(state()).replace(b"archive/data/0", b"archive/data/9", 1)


def _double() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for pickled in (state(), state(b"K\x01")):
            archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(64))
    return made.getvalue()


def _deflated(nbytes: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + b"X" + struct.pack("<I", nbytes) + b"a" * nbytes + b"Ns.")
    return made.getvalue()


def _zip_of_lies(nbytes: int) -> bytes:
    """A deflated pickle that is said to have so many bytes."""
    data = bytearray(_deflated(1000))
    for signature, at in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
        place = data.index(signature)
        data[place + at : place + at + 4] = nbytes.to_bytes(4, "little")
    return bytes(data)


_CENTRAL, _LOCAL, _END = b"PK\1\2", b"PK\3\4", b"PK\5\6"

ZIPS: dict[str, bytes] = {
    "two members of one name": _double(),
    "names that differ in directory and header": _renamed(),
    "a flag that says encrypted, in the header": _fields(_LOCAL, 6, 1, 2),
    "a flag that says encrypted, in the directory": _fields(_CENTRAL, 8, 1, 2),
    "another method in the header": _fields(_LOCAL, 8, 8, 2),
    "an unknown method": _fields(_CENTRAL, 10, 99, 2),
    "a member beyond the end": _fields(_CENTRAL, 42, 0xFFFFFFF0),
    "a member larger than the file": _fields(_CENTRAL, 24, 0x7FFFFFFF),
    "packed bytes that reach into the next": _fields(_CENTRAL, 20, 5000),
    "a directory that begins elsewhere": _fields(_END, 16, 3),
    "a directory beyond the end": _fields(_END, 16, 0xFFFFFF00),
    "a directory of 4 GiB": _fields(_END, 12, 0xFFFFFF00),
    "more members than there are": _fields(_END, 10, 60_000, 2),
    "a zip64 record that is not there": _fields(_CENTRAL, 24, 0xFFFFFFFF),
    "no directory": zipped(state())[:-40],
    "a pickle of 1 GiB, it says": _zip_of_lies(1 << 30),
    "a pickle of 4 GiB, it says": _zip_of_lies(0xFFFFFFF0),
    "a 7z archive (nullifAI)": b"7z\xbc\xaf\x27\x1c\0\4" + bytes(200),
    "a rar archive": b"Rar!\x1a\7\1\0" + bytes(200),
    "a polyglot: pickle before the zip": b"\x80\x02N." + zipped(state())[:-40],
}

# Tar


def _tar(name: str = "ckpt/x", kind: bytes = tarfile.REGTYPE, link: str = "", size: int | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, 3
        archive.addfile(info, io.BytesIO(b"abc"))
    data = bytearray(made.getvalue())
    if size is not None:
        data[124:136] = b"\x80" + size.to_bytes(11, "big")
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def _composer(data: bytes, called: str = "ep0-ba1-rank0.tar") -> Case:
    def make(folder: Path) -> Path:
        (folder / called).write_bytes(data)
        return folder / called

    return make


_MEMBER = "composer_states.pt"
TARS: dict[str, bytes] = {
    "a member above (tarslip)": _tar("../../secret.txt"),
    "an absolute member": _tar("/etc/passwd"),
    "a member beside": _tar("a/../../x"),
    "a symbolic link": _tar(_MEMBER, tarfile.SYMTYPE, "../secret.txt"),
    "a hard link": _tar(_MEMBER, tarfile.LNKTYPE, "/etc/passwd"),
    "a device": _tar(_MEMBER, tarfile.CHRTYPE),
    "a pipe": _tar(_MEMBER, tarfile.FIFOTYPE),
    "a sparse file": _tar(_MEMBER, tarfile.GNUTYPE_SPARSE),
    "a member of 2**80 bytes": _tar(_MEMBER, size=1 << 80),
    "a long name of 2 GiB": _tar(_MEMBER, tarfile.GNUTYPE_LONGNAME, size=1 << 31),
    "attributes of 2 GiB": _tar(_MEMBER, tarfile.XHDTYPE, size=1 << 31),
    "a name with NUL": _tar(_MEMBER).replace(b"composer_states.pt", b"compo\0r_states.pt", 1),
    "a hostile pickle inside": _tar(_MEMBER),
}


def _bomb(pack: Callable[[bytes], bytes], called: str) -> Case:
    def make(folder: Path) -> Path:
        return _composer(pack(_tar(_MEMBER, size=64 << 20)[:512] + bytes(64 << 20)), called)(folder)

    return make


# Safetensors and their indexes


def _header(told: Any, data: bytes = bytes(64)) -> bytes:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + data


def _one(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS: dict[str, bytes] = {
    "overlap": _header({"a": _one([16], 0, 64), "b": _one([8], 32, 64)}),
    "a hole": _header({"a": _one([4], 0, 16), "b": _one([4], 48, 64)}),
    "bytes that nobody names": _header({"a": _one([8], 0, 32)}),
    "offsets beyond the end": _header({"a": _one([BIG], 0, 4 * BIG)}),
    "a shape larger than its bytes": _header({"a": _one([BIG], 0, 64)}),
    "a shape that overflows": _header({"a": _one([1 << 62, 16], 0, 64)}),
    "a negative shape": _header({"a": _one([-4, -4], 0, 64)}),
    "negative offsets": _header({"a": _one([16], -64, 0)}),
    "offsets of 10**30": _header({"a": _one([16], 0, 10**30)}),
    "offsets of fractions": _header(b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0.5,64]}}'),
    "a shape of NaN": _header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}}'),
    "a name twice": _header(b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "an unknown type": _header({"a": _one([16], 0, 64, "X99")}),
    "a header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}" + bytes(64),
    "a header longer than the file": (5000).to_bytes(8, "little") + b"{}" + bytes(64),
    "JSON a hundred thousand deep": _header(b'{"a":' + b"[" * 100_000),
    "a header that is no JSON": _header(b"{" + bytes(64)),
    "a header that is no text": _header(b'{"\xff\xfe":1}'),
}  # fmt: skip


def _index(weight_map: Any) -> Case:
    def make(folder: Path) -> Path:
        (folder / "model-00001-of-00001.safetensors").write_bytes(safetensors({"a": torch.ones(4)}))
        (folder.parent / "outside.safetensors").write_bytes(safetensors({"a": torch.ones(4)}))
        names = weight_map() if callable(weight_map) else weight_map
        told = names if isinstance(names, bytes) else json.dumps({"metadata": {}, "weight_map": names})
        (folder / "model.safetensors.index.json").write_bytes(told if isinstance(told, bytes) else told.encode())
        return folder

    return make


INDEXES: dict[str, Case] = {
    "a path above": _index({"a": "../outside.safetensors"}),
    "an absolute path": _index({"a": "/etc/passwd"}),
    "a path with NUL": _index({"a": "model\0.safetensors"}),
    "a path with backslashes": _index({"a": "..\\outside.safetensors"}),
    "a path in URL's escapes": _index({"a": "%2e%2e/outside.safetensors"}),
    "a device": _index({"a": "/dev/zero"}),
    "a URL": _index({"a": "file:///etc/passwd"}),
    "a file that is a number": _index({"a": 7}),
    "a map that is a list": _index(["a"]),
    "JSON a hundred thousand deep": _index(b'{"weight_map":' + b"[" * 100_000),
    "a million names of no file": _index(lambda: {str(n): "x.safetensors" for n in range(1_000_000)}),
}


# Odd files in the place of data, and links


def _instead(make_it: Callable[[Path], Any], foreign: bool = True) -> Case:
    """Something else where a data file should be."""

    def make(folder: Path) -> Path:
        if foreign:
            make_it(folder / "model.safetensors")
            return folder
        holdfast.save({"model": {"w": torch.ones(4)}}, folder / "step-1")
        [data] = (folder / "step-1" / "model").iterdir()
        data.rename(folder.parent / "outside.safetensors")
        make_it(data)
        return folder / "step-1"

    return make


def _socket(path: Path) -> None:
    bound = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)  # its name may be no longer than 100 bytes
    try:
        bound.bind(path.name)
    finally:
        os.chdir(here)
        bound.close()


ODD: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to a file outside": lambda path: path.symlink_to(path.parents[-1] / "etc" / "passwd"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


# Ours


def _saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "step-1"
    holdfast.save({"model": {"w": torch.ones(16)}, "lr": 0.1}, path, files={"config.json": b"{}"})
    told = json.loads((path / "manifest.json").read_text())
    told.pop("digest")
    return path, told


def _ours(change: Callable[[dict[str, Any]], Any], then: Callable[[Path], Any] = lambda path: None) -> Case:
    """A manifest that somebody changed and sealed again."""

    def make(folder: Path) -> Path:
        path, told = _saved(folder)
        change(told)
        (path / "manifest.json").write_bytes(seal(json.dumps(told, separators=(",", ":")).encode()))
        then(path)
        return path

    return make


def _file(path: str, *more: str) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told["files"].__setitem__(0, [path, *told["files"][0][1:], *more])


def _value(tag: str, inner: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told.update(version=2, values={"x": {"$": tag, "v": inner}})


def _note(note: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told.update(version=2, values={"x/a": 1}, containers={"x": note})


def _deep(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = {"$": "tuple", "v": [made]}
    return made


def _tensor(*record: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told["tensors"].__setitem__("model/w", list(record))


def _linked_out(path: Path) -> None:
    (path / "model").rename(path.parent.parent / "outside")
    (path / "model").symlink_to("../../outside")


def _linked_file(path: Path) -> None:
    [data] = (path / "model").iterdir()
    data.rename(path.parent.parent / data.name)
    data.symlink_to(path.parent.parent / data.name)


def _linked_attachment(path: Path) -> None:
    (path / "attachments" / "config.json").unlink()
    (path.parent.parent / "config.json").write_text("{}")
    (path / "attachments" / "config.json").symlink_to("../../../config.json")


def _sibling_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").mkdir()
    (path / "model").rename(path.parent.parent / "elsewhere" / "model")
    (path.parent / "step-0").symlink_to("../elsewhere")


def _cited(told: dict[str, Any]) -> None:
    row = told["files"][0]
    told["files"][0] = [f"../step-0/{row[0]}", *row[1:], "0" * 16]


def _attachment(path: str) -> Callable[[dict[str, Any]], Any]:
    return lambda told: told.__setitem__("attachments", [[path, 2, blocks.digest(b"{}")]])


OURS: dict[str, Case] = {
    "a file above": _ours(_file("../../outside.safetensors")),
    "a file above, as if cited": _ours(_file("../../x/outside.safetensors", "0" * 16)),
    "a file beside, as if cited": _ours(_file("../outside.safetensors", "0" * 16)),
    "a file of a sibling's parent": _ours(_file("../step-0/../../x", "0" * 16)),
    "an absolute file": _ours(_file("/etc/passwd")),
    "a device": _ours(_file("/dev/zero")),
    "a backslash": _ours(_file("model\\..\\..\\x")),
    "a NUL": _ours(_file("model\0x")),
    "an empty part": _ours(_file("model//x")),
    "a folder that leads out": _ours(lambda told: None, _linked_out),
    "a data file that leads out": _ours(lambda told: None, _linked_file),
    "an attachment that leads out": _ours(lambda told: None, _linked_attachment),
    "a sibling that leads out": _ours(_cited, _sibling_link),
    "an attachment above": _ours(_attachment("attachments/../../../secret.txt")),
    "an attachment elsewhere": _ours(_attachment("manifest.json")),
    "a save that is a path": _ours(lambda told: told.__setitem__("save", "../../../../tmp/x")),
    "a tensor of 2**40": _ours(_tensor("float32", [BIG], None, "0")),
    "a tensor that overflows": _ours(_tensor("float32", [1 << 62, 1 << 62], None, "0")),
    "a million axes": _ours(_tensor("float32", [1] * 1_000_000, None, "0")),
    "10**9 cells": _ours(_tensor("float32", [10**9], [1], "0-999999999")),
    "2**60 cells of few files": _ours(_tensor("bool", [1 << 60], [1], "0" + "+2x1" * 60)),
    "a grid of 10**12 cells": _ours(
        _tensor("bool", [10**4] * 3, {"cuts": [[*range(10**4 + 1)]] * 3}, "0-999999999999")
    ),
    "boxes that are each compared with each": _ours(
        _tensor("uint8", [2, 40_000], {"boxes": [[[0, n], [2, 1]] for n in range(39_998)] + [[[0, 39_998], [1, 2]],
                [[1, 39_998], [1, 1]], [[1, 39_999], [1, 1]]]}, "0" + ",0" * 40_000)
    ),
    "boxes that overlap": _ours(_tensor("float32", [16], {"boxes": [[[0], [9]], [[8], [8]]]}, "0,0")),
    "a file of 2**60 bytes": _ours(lambda told: told["files"][0].__setitem__(1, 1 << 60)),
    "a header of 2**50 bytes": _ours(lambda told: told["files"][0].__setitem__(slice(1, 3), [1 << 60, 1 << 50])),
    "2**40 ranks": _ours(lambda told: told.update(world_size=1 << 40, per_rank={"x": "0" + "+2x1" * 40})),
    "names ten thousand deep": _ours(lambda told: told["values"].__setitem__("a/" * 10_000, 1)),
    "a list of 10**12": _ours(lambda told: told.update(values={"a/1000000000000": 1}, containers={"a": "list"})),
    "a leaf below a leaf": _ours(lambda told: told["values"].__setitem__("lr/x", 1)),
    "an alias of itself": _ours(lambda told: told["aliases"].__setitem__("model/v", "model/v")),
    "a number of digits without end": _ours(lambda told: told["values"].__setitem__("n", {"$": "int", "v": "9" * 5000})),
    "JSON a hundred thousand deep": lambda folder: _written(folder, seal(b'{"format":"holdfast","version":1,"a":' + b"[" * 100_000)),
    "a manifest that is a pipe": lambda folder: _special(folder, os.mkfifo),
    "a manifest that is /dev/zero": lambda folder: _special(folder, lambda path: path.symlink_to("/dev/zero")),
    **{f"a data file that is {what}": _instead(how, foreign=False) for what, how in ODD.items()},
    "an array of 2**60 numbers": _ours(_value("array", ["<f8", [1 << 60], "AAAA"])),
    "an array that overflows": _ours(_value("array", ["|u1", [1 << 62, 1 << 62, 4], ""])),
    "an empty array of 2**62 rows": _ours(_value("array", ["<f8", [1 << 62, 0], ""])),
    "an array of a million axes": _ours(_value("array", ["|u1", [1] * 1_000_000, "AA=="])),
    "an array of objects": _ours(_value("array", ["|O", [1], "AAAAAAAAAAA="])),
    "an array of records": _ours(_value("array", ["|V8", [1], "AAAAAAAAAAA="])),
    "an array of texts of 2**30 letters": _ours(_value("array", ["<U999999999", [1 << 20], "AAAA"])),
    "an array of no Unicode": _ours(_value("array", ["<U1", [1], "/////w=="])),
    "a set of lists": _ours(_value("set", [[1]])),
    "a set that is a number": _ours(_value("frozenset", BIG)),
    "a key of tuples a hundred deep": _ours(_value("dict", [[_deep(100), 1]])),
    "a dict that is a text": _ours(_value("dict", "abc")),
    "a deque of more than it may hold": _ours(_value("deque", [1, [1, 2, 3]])),
    "a deque of up to 2**80": _ours(_value("deque", [1 << 80, []])),
    "a defaultdict of what is called": _ours(_value("defaultdict", ["eval", []])),
    "a defaultdict by a path": _ours(_value("defaultdict", ["os.system", [["x", 1]]])),
    "a counter of lists": _ours(_value("Counter", [[[1], 1]])),
    "a tree a hundred thousand deep": _ours(_value("tree", "[" * 100_000)),
    "a tree of tuples a thousand deep": _ours(_value("tree", '{"$":"tuple","v":[' * 1000 + "1" + "]}" * 1000)),
    "a tree that is no JSON": _ours(_value("tree", '{"$":')),
    "a tree that is a number": _ours(_value("tree", 7)),
    "a tree with a tensor": _ours(_value("tree", '[{"$":"tensor","v":"model/w"}]')),
    "a tree that names code": _ours(_value("tree", '[{"$":"builtins.eval","v":"1"}]')),
    "floats of five bytes": _ours(_value("floats", "AAAAAAA=")),
    "floats that are no text": _ours(_value("floats", [1, 2])),
    "a set in version 1": _ours(lambda told: told["values"].__setitem__("x", {"$": "set", "v": [1]})),
    "a deque in version 1": _ours(lambda told: told["containers"].__setitem__("x", {"kind": "deque"})),
    "a container of a class": _ours(_note({"kind": "os.system"})),
    "a container that makes its values by eval": _ours(_note({"kind": "defaultdict", "factory": "eval"})),
    "a container with code": _ours(_note({"kind": "dict", "code": "eval"})),
    "a deque of less than nothing": _ours(_note({"kind": "deque", "maxlen": -1})),
    "a deque of 10**12": _ours(lambda told: told.update(
        version=2, values={"a/1000000000000": 1}, containers={"a": {"kind": "deque"}})),
    "a list with keys": _ours(_note({"kind": "list", "keys": [["0", 1]]})),
    "a key that is there twice": _ours(_note({"kind": "dict", "keys": [["a", 1], ["b", 1]]})),
    "a key that is a set of lists": _ours(_note({"kind": "dict", "keys": [["a", {"$": "set", "v": [[]]}]]})),
}  # fmt: skip


def _written(folder: Path, data: bytes) -> Path:
    (folder / "manifest.json").write_bytes(data)
    return folder


def _special(folder: Path, make_it: Callable[[Path], Any]) -> Path:
    make_it(folder / "manifest.json")
    return folder


# Texts that other formats keep


def _text(path: str, data: bytes, *others: str) -> Case:
    def make(folder: Path) -> Path:
        for name in (path, *others):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data if name == path else b"")
        return folder

    return make


SNAPSHOTS: dict[str, Case] = {
    "a path above (torchsnapshot)": _text(
        ".snapshot_metadata",
        json.dumps({
            "version": "0.1.0", "world_size": 1,
            "manifest": {"0/w": {
                "type": "Tensor", "location": "../../secret.txt", "serializer": "buffer_protocol",
                "dtype": "torch.uint8", "shape": [4], "replicated": False, "byte_range": None,
            }},
        }).encode(),
    ),
    "lists without end (torchsnapshot)": _text(".snapshot_metadata", b'{"a": ' + b"[" * 100_000),
}  # fmt: skip


def cases() -> dict[str, Case]:
    """Every case of this file, by what it is of."""
    found: dict[str, Case] = {}
    found.update((f"zip: {label}", file_of(data)) for label, data in ZIPS.items())
    found.update((f"tar: {label}", _composer(data)) for label, data in TARS.items())
    packs: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    for ending, pack in packs.items():
        found[f"tar: 64 MiB of nothing as .{ending}"] = _bomb(pack, f"ep0-ba1-rank0.tar.{ending}")
    found.update((f"safetensors: {label}", file_of(data, "model.safetensors")) for label, data in SAFETENSORS.items())
    found.update((f"index: {label}", make) for label, make in INDEXES.items())
    found.update((f"odd file: {label}", _instead(how)) for label, how in ODD.items())
    found.update((f"snapshot: {label}", make) for label, make in SNAPSHOTS.items())
    found.update((f"ours: {label}", make) for label, make in OURS.items())
    return found
