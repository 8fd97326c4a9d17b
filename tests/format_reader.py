"""A second reader of the format, written from its description alone: json, safetensors, xxhash, no holdfast.

`read` checks everything that the format promises and returns the whole state. Slow, strict, and simple on purpose.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import safetensors.torch
import torch
import xxhash

BLOCK = 8 << 20
CODES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

FIRST_TAGS = {"int", "float", "bytes", "complex", "dtype", "device", "size"}
FACTORIES = {
    "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool, "tuple": tuple,
    None: None,
}  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Read:
    """What a checkpoint holds. ``tensors`` by name, tied ones under each; ``per_rank[path][r]`` is rank r's value."""

    manifest: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, list[Any]] = field(default_factory=dict)
    attachments: dict[str, bytes] = field(default_factory=dict)


@dataclass
class DataFile:
    """One data file: for each key its torch dtype, and its bytes (one axis more than the piece: those of an item)."""

    metadata: dict[str, Any]
    pieces: dict[str, tuple[str, np.ndarray]]


def read(folder: Path) -> Read:
    """Everything in a checkpoint. Any break of the format is an AssertionError."""
    manifest = read_manifest(folder / "manifest.json")
    save = manifest["save"]
    files = [read_data_file(folder, row, row[4] if len(row) == 5 else save) for row in manifest["files"]]
    found = Read(manifest)
    used: set[tuple[int, str]] = set()
    for name, (dtype, shape, cells, text) in manifest["tensors"].items():
        found.tensors[name] = assemble(name, dtype, tuple(shape), cells, indices_of(text), files, used)
    for alias, name in manifest["aliases"].items():
        assert alias not in manifest["tensors"]
        found.tensors[alias] = found.tensors[name]
    for path, text in manifest["per_rank"].items():
        indices = indices_of(text)
        assert len(indices) == manifest["world_size"]
        found.per_rank[path] = [value_of_rank(files, i, path, rank, used) for rank, i in enumerate(indices)]
    for path, size, digest in manifest["attachments"]:
        data = (folder / path).read_bytes()
        assert path.startswith("attachments/") and len(data) == size and xxhash.xxh3_128_hexdigest(data) == digest
        found.attachments[path.removeprefix("attachments/").removeprefix(f"{save}/")] = data
    for index, (file, row) in enumerate(zip(files, manifest["files"], strict=True)):
        sizes = {key: data.size for key, (_, data) in file.pieces.items()}
        unused = {key: size for key, size in sizes.items() if size and (index, key) not in used}
        if len(row) == 5:  # borrowed from an earlier save: it may hold what has changed since
            assert row[4] != save and 2 * sum(unused.values()) <= sum(sizes.values()), f"too much of {row} is dead"
        else:
            assert not unused, f"{list(unused)} in file {index} belong to nothing"
    leaves = {**found.tensors, **{path: decoded(v) for path, v in manifest["values"].items()}}
    found.state = nested(leaves, manifest["containers"])
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    body, mark, tail = data.rpartition(b',"digest"')
    assert mark and json.loads(b"{" + mark[1:] + tail)["digest"] == xxhash.xxh3_128_hexdigest(body)
    manifest: dict[str, Any] = json.loads(data)
    assert manifest["format"] == "holdfast" and manifest["version"] in (1, 2)
    if manifest["version"] == 1:
        assert set(manifest["containers"].values()) <= {"dict", "list", "tuple"}
        assert {v["$"] for v in manifest["values"].values() if isinstance(v, dict)} <= FIRST_TAGS
    assert list(manifest) == [
        "format", "version", "save", "run", "step", "created", "producer", "world_size", "files", "tensors", "values",
        "containers", "aliases", "per_rank", "attachments", "digest",
    ]  # fmt: skip
    for key in ("save", "run"):
        assert len(manifest[key]) == 16 and int(manifest[key], 16) >= 0
    assert set(manifest["producer"]) - {"dropped", "lost", "modules", "rescued"} == {"holdfast", "torch", "python"}
    return manifest


def read_data_file(folder: Path, row: list[Any], save: str) -> DataFile:
    path, size, header_bytes, header_digest = row[:4]
    beside = path.split("/")[:2] if path.startswith("../") else []
    assert not beside or (len(row) == 5 and beside[1] not in ("", ".", "..", folder.name)), "only a sibling lends"
    assert len(path.split("/")) == len(beside) + 2
    data = (folder / path).read_bytes()
    assert len(data) == size and xxhash.xxh3_128_hexdigest(data[:header_bytes]) == header_digest
    assert path.endswith(f".{save}.safetensors")
    assert header_bytes % 4096 == 0 and struct.unpack("<Q", data[:8]) == (header_bytes - 8,)
    header = json.loads(data[8:header_bytes])
    metadata = header.pop("__metadata__")
    section, file = path.split("/")[-2:]
    assert metadata["holdfast"] == "1" and metadata["save"] == save and section == metadata["section"]
    assert file.startswith(f"{int(metadata['rank']):05d}-of-")
    named = json.loads(metadata["dtypes"])
    sums = metadata["sums"].split(",") if header else []
    assert len(sums) == len(header)
    found, end, widest = {}, 0, 1 << 20
    in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    for (key, entry), text in zip(in_order, sums, strict=True):
        begin, stop = entry["data_offsets"]
        assert begin == end, "no holes"
        end = stop
        piece = data[header_bytes + begin : header_bytes + stop]
        blocks = [piece[i : i + BLOCK] for i in range(0, len(piece), BLOCK)]
        assert text == "".join(xxhash.xxh3_64_hexdigest(block) for block in blocks)
        dtype = named.get(key.partition("[")[0]) or CODES[entry["dtype"]]
        width = itemsize(dtype)
        assert width <= widest and (header_bytes + begin) % width == 0, "wider dtypes first, aligned"
        widest = width
        shape = tuple(entry["shape"])
        if key.partition("[")[0] in named:
            assert entry["dtype"] == "U8"
            shape = (*shape[:-1], shape[-1] // width)
        found[key] = (dtype, np.frombuffer(piece, np.uint8).reshape(*shape, width))
    assert header_bytes + end == size
    metadata["shapes"] = json.loads(metadata["shapes"])
    same_as_safetensors(data, found)
    return DataFile(metadata, found)


def same_as_safetensors(data: bytes, found: dict[str, tuple[str, np.ndarray]]) -> None:
    """Any other reader of safetensors finds the same bytes."""
    other = safetensors.torch.load(data)
    assert set(other) == set(found)
    for key, (_, piece) in found.items():
        assert other[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes() == piece.tobytes()


def itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def indices_of(text: str) -> list[int]:
    """``"0,2,4-6"`` as 0, 2, 4, 5, 6; ``"1+2x1+3x4"`` as 1, 5, 9, 2, 6, 10."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, *axes = part.split("+")
        if axes:
            steps = [[int(step) * i for i in range(int(n))] for n, step in (axis.split("x") for axis in axes)]
            found += [int(first) + sum(at) for at in product(*steps)]
        else:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def cells_of(shape: tuple[int, ...], cells: Any) -> list[Box]:
    """The non-empty cells of a tensor in their order."""
    if 0 in shape:
        return []
    if cells is None:
        return [((0,) * len(shape), shape)]
    if isinstance(cells, list):
        cuts = [[*range(0, n, c), n] for n, c in zip(shape, cells, strict=True)]
    elif "cuts" in cells:
        cuts = cells["cuts"]
    else:
        return [(tuple(o), tuple(n)) for o, n in cells["boxes"]]
    spans = product(*(list(zip(c, c[1:])) for c in cuts))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in spans]


def key_of(name: str) -> str:
    """A name without its section."""
    _, slash, rest = name.partition("/")
    return rest if slash else name


def assemble(
    name: str, dtype: str, shape: tuple[int, ...], cells: Any, indices: list[int], files: list[DataFile],
    used: set[tuple[int, str]],
) -> torch.Tensor:  # fmt: skip
    """A whole tensor from its cells, each of which must fill what no other has filled."""
    width = itemsize(dtype)
    result = np.zeros((*shape, width), np.uint8)
    filled = np.zeros(shape, bool)
    for (offsets, lengths), index in zip(cells_of(shape, cells), indices, strict=True):
        key = key_of(name)
        if lengths != shape:
            key += "[" + ",".join(f"{o}:{o + n}" for o, n in zip(offsets, lengths, strict=True)) + "]"
            assert files[index].metadata["shapes"][key_of(name)] == list(shape)
        stored, piece = files[index].pieces[key]
        assert stored == dtype
        used.add((index, key))
        where = (*(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True)), ...)
        assert not filled[where].any(), f"{key} overlaps another cell"
        filled[where] = True
        result[where] = piece.reshape(*lengths, width)
    assert filled.all(), f"{name} has a hole"
    return torch_of(result, dtype, shape)


def torch_of(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(data.reshape(-1).copy()).view(getattr(torch, dtype)).view(shape)


def decoded(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """A leaf that is no tensor, or a nest of values; ``tensor`` fetches what a reference stands for."""
    if isinstance(value, list):
        return [decoded(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {k: decoded(v, tensor) for k, v in value.items()}
    assert set(value) == {"$", "v"}
    tag, inner = value["$"], value["v"]

    def pairs(items: list[Any]) -> dict[Any, Any]:
        return {decoded(k): decoded(v, tensor) for k, v in items}

    match tag:
        case "tensor":
            assert tensor is not None
            return tensor(inner)
        case "complex":
            return complex(float(inner[0]), float(inner[1]))
        case "tuple" | "set" | "frozenset":
            kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
            return kind(decoded(v, tensor) for v in inner)
        case "deque":
            return deque(decoded(inner[1], tensor), inner[0])
        case "dict":
            return pairs(inner)
        case "map":
            return dict(zip(decoded(inner[0]), decoded(inner[1], tensor), strict=True))
        case "OrderedDict":
            return OrderedDict(pairs(inner))
        case "Counter":
            return Counter(pairs(inner))
        case "defaultdict":
            return defaultdict(FACTORIES[inner[0]], pairs(inner[1]))
        case "array":
            dtype, shape, text = inner
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
        case "floats":
            return [number for (number,) in struct.iter_unpack("<d", base64.b64decode(inner))]
        case "tree":
            return decoded(json.loads(inner), tensor)
    readers = {
        "int": int, "float": float, "bytes": base64.b64decode, "dtype": lambda v: getattr(torch, v),
        "device": torch.device, "size": torch.Size, "bytearray": lambda v: bytearray(base64.b64decode(v)),
    }  # fmt: skip
    return readers[tag](inner)


def value_of_rank(files: list[DataFile], index: int, path: str, rank: int, used: set[tuple[int, str]]) -> Any:
    base = f"{key_of(path)}@{rank}"
    file = files[index]
    used.add((index, base))

    def tensor(reference: str) -> torch.Tensor:
        key = f"{base}/{reference}"
        used.add((index, key))
        dtype, piece = file.pieces[key]
        shape = tuple(file.metadata["shapes"].get(key, piece.shape[:-1]))
        return torch_of(piece, dtype, shape)

    dtype, data = file.pieces[base]
    assert dtype == "uint8"
    return decoded(json.loads(data.tobytes().decode()), tensor)


class Branch(dict[str, Any]):
    """What lies below a name; a leaf may be a dict too."""


def nested(leaves: dict[str, Any], containers: dict[str, Any]) -> dict[str, Any]:
    """Leaves by name as dicts, lists and other containers."""
    root = Branch()
    for path in [*leaves, *containers]:
        at = root
        *above, last = path.split("/")
        for key in above:
            at = at.setdefault(key, Branch())
        at[last] = leaves[path] if path in leaves else at.get(last, Branch())

    def shaped(node: Any, path: str) -> Any:
        if type(node) is not Branch:
            return node
        children = {unquote(key): shaped(child, f"{path}/{key}" if path else key) for key, child in node.items()}
        note = containers.get(path)
        told: dict[str, Any] = note if isinstance(note, dict) else {}
        kind = told.get("kind", note)
        if kind in ("list", "tuple", "deque"):
            items = [children[str(i)] for i in range(len(children))]
            return items if kind == "list" else tuple(items) if kind == "tuple" else deque(items, told.get("maxlen"))
        if note == "dict":  # noted although it is not empty: a dict with integers as keys
            return {int(k) if k.lstrip("-").isdecimal() else k: v for k, v in children.items()}
        keys = {name: decoded(key) for name, key in told.get("keys", [])}
        order = told.get("order", list(children))
        assert sorted(order) == sorted(children)
        found = {keys.get(name, name): children[name] for name in order}
        if kind == "defaultdict":
            return defaultdict(FACTORIES[told.get("factory")], found)
        return {None: dict, "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind](found)

    result: dict[str, Any] = shaped(root, "")
    return result
