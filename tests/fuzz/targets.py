"""What is fuzzed: for each target whole checkpoints as bytes by path, and what is done with one that was made wrong.

Ours are made when they are first asked for; those of others are the golden ones, by the libraries that they are named
after. `trial` calls `use`; it never says whether what it found was right.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

import holdfast
from holdfast.ondisk import blocks, part
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import Manifest, seal
from holdfast.storage.cloud.facts import answer_in
from holdfast.storage.urls import location
from tests.formats.truth import GOLDEN
from tests.fuzz.mutate import mutated, once, strange, tree

Tree = dict[str, bytes]
"""A checkpoint: what is in each file, by its path in the folder."""

FOREIGN = {
    "dcp": ("dcp_filepertensor", "dcp_hf_sharded_2r", "dcp_fsdp1_2r", "dcp_fsdp2_zstd_2r"),
    "megatron": ("megatron_flat_tp2", "megatron_stacked_bf16_tp2"),
    "olmo": ("olmo_local_2r", "olmo_safetensors_2r", "olmo_olmocore_2r", "olmo_torch_legacy_2r"),
    "deepspeed": ("ds_zero1_fp32_tied_2r", "ds_zero3_fp32_2r", "ds_zero2_universal_2r"),
    "torchsnapshot": ("torchsnapshot_single_unbatched", "torchsnapshot_ddp_chunked_2r", "torchsnapshot_fsdp1_2r"),
    "torch_checkpointing": ("torchckpt_plain", "torchckpt_single", "torchckpt_safetensors_fsdp2_2r"),
    "composer": ("composer_tar_2r", "composer_targz_2r", "composer_pt", "composer_tarbz2_weights"),
    "hfai": ("hfai_3r",),
    "huggingface": ("hf_safetensors_bf16_sharded", "hf_safetensors_single_tied", "dcp_hf_consolidated_2r"),
    "full": ("torchsave_legacy_views", "torchsave_legacy_tied", "torchsave_zip_tied_views", "fsdp1_full_2r"),
}  # fmt: skip
"""Golden checkpoints of each foreign reader; those that come first are small."""

NATIVE = ("manifest", "values", "datafile", "part")
TEXTS = ("url",)
TARGETS = (*NATIVE, *FOREIGN, *TEXTS)


@cache
def seeds(target: str) -> tuple[tuple[str, Tree], ...]:
    """The sound checkpoints of a target, each with its name."""
    if target in FOREIGN:
        return tuple((name, tree_of(GOLDEN / name / "ckpt")) for name in FOREIGN[target])
    if target == "url":
        return tuple((f"url{n}", {"url": text.encode()}) for n, text in enumerate(URLS))
    with tempfile.TemporaryDirectory() as folder:
        made = _of_version_2(Path(folder)) if target == "values" else _native(Path(folder))
    return ((target, _as_parts(made) if target == "part" else made),)


def tree_of(folder: Path) -> Tree:
    """A folder as bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


URLS = (
    "s3://bucket/run/step-100?region=eu-west-1", "gs://bucket/a", "az://container@account.dfs.core.windows.net/x",
    "abfss://c@a.blob.core.windows.net/x?anonymous=true", "http://[::1]:9000/a%20b", "file:///tmp/x", "/tmp/x", "~/x",
    "https://user:secret@host/x?sig=secret", "s3:/bucket/x", "r2://b/x?account=a", "a/{rank}.pt",
)  # fmt: skip


def _native(folder: Path) -> Tree:
    weight = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = {
        "model": {"w": weight, "tied": weight, "b": torch.ones(7, dtype=torch.bfloat16), "empty": torch.empty(0, 3)},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(3), "odd": torch.ones(2, dtype=torch.complex64)}},
            "lr": 0.1,
        },
        "notes": [1, (2.5, None), {"é": float("nan"), "raw": b"\0x"}, torch.float16, 1 << 90],
        "mine": holdfast.PerRank({"seed": 7, "t": torch.ones(3)}),
    }
    return _saved(state, folder)


def _of_version_2(folder: Path) -> Tree:
    state = {
        "kinds": [{1, (2, "x")}, frozenset({None}), deque([1, {}], 3), Counter(a=2), OrderedDict(b=1), bytearray(b"x")],
        "by": defaultdict(list, {(1, None): [1], 2.5: 2, "2.5": 3, -1: {}}), "array": np.arange(6.0).reshape(2, 3),
        "log": [{"step": i, "at": (i, {i})} for i in range(600)], "loss": [i / 7 for i in range(1100)],
        "live": deque([torch.ones(2), 1]), "mine": holdfast.PerRank([{1: {2}}, deque([torch.ones(3)])]),
    }  # fmt: skip
    return _saved(state, folder)


def _saved(state: dict[str, Any], folder: Path) -> Tree:
    target = folder / "step-000000001"
    holdfast.save(state, target, step=1, files={"config.json": b'{"a": 1}'})
    return tree_of(target)


def _as_parts(made: Tree) -> Tree:
    """The same save as it lies before its commit."""
    told = json.loads(made["manifest.json"])
    record = Manifest(
        **{
            **{k: v for k, v in told.items() if k not in ("digest", "tensors", "attachments")},
            "tensors": {k: TensorRecord(d, tuple(s), c, f) for k, (d, s, c, f) in told["tensors"].items()},
            "attachments": [tuple(row) for row in told["attachments"]],
        }
    )
    rows: list[Any] = [tuple(row) for row in told["files"]]
    one = part.Part(save=record.save, rank=0, world_size=1, files=rows, manifest=record)
    rest = {path: data for path, data in made.items() if path != "manifest.json"}
    return {**rest, part.file_name(0, record.save): part.encode(one)}


# Made wrong


def changed(target: str, sound: Tree, seed: int) -> Tree:
    """``sound`` with something wrong in it: a function of the seed alone."""
    rng = Random(seed)
    if target in NATIVE and rng.random() < 0.9:
        with suppress(ValueError, RecursionError):  # a former change left what is not JSON, or is nested too deep
            return _NATIVE_CHANGES[target](dict(sound), rng)
    paths = sorted(sound, key=lambda path: (_weight(path), path))
    told = [path for path in paths if _weight(path) == 0]
    path = rng.choice(told) if told and rng.random() < 0.6 else rng.choice(paths)
    kind = rng.random()
    made = dict(sound)
    if kind < 0.03 and len(sound) > 1:
        del made[path]
    elif kind < 0.06:
        made[path] = made[rng.choice(paths)]
    else:
        made[path] = mutated(made[path], rng.getrandbits(48))
    return made


def _weight(path: str) -> int:
    """0 for what tells of the rest: metadata, indexes."""
    name = path.rpartition("/")[2]
    return 0 if name.startswith(".") or name.endswith((".json", ".yaml", ".pkl", ".metadata")) or "." not in name else 1


def _changed_manifest(made: Tree, rng: Random) -> Tree:
    told = json.loads(made["manifest.json"])
    told.pop("digest")
    for _ in range(rng.choice((1, 1, 2, 3))):
        told = tree(told, rng)
    made["manifest.json"] = _sealed(told)
    return made


_TAGS = (
    "int", "float", "bytes", "complex", "dtype", "device", "size", "set", "frozenset", "deque", "dict", "OrderedDict",
    "Counter", "defaultdict", "bytearray", "array", "floats", "tree", "tuple", "tensor",
)  # fmt: skip
_INNER = (
    [],
    [[1, 2]],
    [None, []],
    ["list", []],
    ["<f8", [1 << 40], ""],
    [1, [2, 3]],
    "[]",
    "AAAAAAAAAAA=",
    {"$": "set"},
)


def _changed_values(made: Tree, rng: Random) -> Tree:
    """What is said of values and their containers, also inside of the text of a long one."""
    told = json.loads(made["manifest.json"])
    told.pop("digest")
    for _ in range(rng.choice((1, 1, 2, 3))):
        path, kind = rng.choice(list(told["values"])), rng.random()
        value = told["values"][path]
        if kind < 0.3:
            told["containers"] = tree(told["containers"], rng)
        elif kind < 0.6:
            told["values"][path] = {"$": rng.choice(_TAGS), "v": rng.choice(_INNER)}
        elif isinstance(value, dict) and value.get("$") == "tree" and isinstance(value.get("v"), str):
            value["v"] = json.dumps(tree(json.loads(value["v"]), rng)) if kind < 0.8 else mutated(
                value["v"].encode(), rng.getrandbits(48)).decode("utf-8", "replace")  # fmt: skip
        elif isinstance(value, dict):
            told["values"][path] = tree(value, rng)
    made["manifest.json"] = _sealed(told)
    return made


def _sealed(told: Any) -> bytes:
    try:
        return seal(json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return b"{}"


def _changed_data_file(made: Tree, rng: Random) -> Tree:
    """Another header, or other bytes, and a manifest that bears it out."""
    told = json.loads(made["manifest.json"])
    told.pop("digest")
    row = rng.choice(told["files"])
    data = made[row[0]]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    meta = header.get("__metadata__", {})
    inner = [key for key in ("shapes", "dtypes") if key in meta]
    kind = rng.random()
    if kind < 0.2 and inner:
        key = rng.choice(inner)
        meta[key] = json.dumps(tree(json.loads(meta[key]), rng))
    elif kind < 0.35:
        meta[rng.choice([*meta, "sums"])] = str(strange(rng))[:9000]
    elif kind < 0.5:
        one = header[rng.choice([key for key in header if key != "__metadata__"])]
        one[rng.choice(("shape", "data_offsets"))] = [
            rng.choice((0, 1, 2, 5, 60, 1 << 40, -1)) for _ in range(rng.randrange(4))
        ]
    else:
        header = tree(header, rng)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    if rng.random() < 0.15:
        data = once(data, rng)
    made[row[0]] = data
    header_bytes = rng.choice((8 + len(text), 8 + len(text), 8 + len(text), 8, len(data), 1 << 50))
    row[1:4] = rng.choice((len(data), len(data), len(data), 1 << 60)), header_bytes, blocks.digest(data[:header_bytes])
    made["manifest.json"] = _sealed(told)
    return made


def _changed_part(made: Tree, rng: Random) -> Tree:
    path = next(path for path in made if path.startswith("parts/"))
    told = json.loads(made[path])
    told.pop("digest")
    told = tree(told, rng)
    made[path] = _sealed(told)
    if rng.random() < 0.1:
        made["parts/00001." + path.rpartition("/")[2].split(".")[1] + ".json"] = made[path]
    return made


_NATIVE_CHANGES: dict[str, Callable[[Tree, Random], Tree]] = {
    "manifest": _changed_manifest, "values": _changed_values, "datafile": _changed_data_file, "part": _changed_part,
}  # fmt: skip


# Used


@dataclass
class Took:
    """How far a use came: the checkpoint was opened, and so many tensors read."""

    opened: bool = False
    tensors: int = 0


class Use(NamedTuple):
    """A checkpoint on disk and what is done with it."""

    target: str
    path: Path


def use(target: str, path: Path, took: Took) -> None:
    """Open, list, read some of each, verify. Raises what the library raises."""
    checkpoint = holdfast.tools.recover(path) if target == "part" else holdfast.open(path)
    took.opened = True
    names = list(checkpoint.tensors)
    for info in checkpoint.tensors.values():
        str(info.boxes[:3])
    checkpoint.values  # noqa: B018
    for name in dict.fromkeys([*names[:3], *names[len(names) // 2 : len(names) // 2 + 2], *names[-2:]]):
        checkpoint.read(name)
        took.tensors += 1
    for name in checkpoint.differing[:3]:
        checkpoint.per_rank(name, 0)
    for name, nbytes in [*checkpoint.attachments.items()][:2]:
        if nbytes < 1 << 20:
            checkpoint.attachment(name)
    checkpoint.verify()


def use_text(data: bytes) -> None:
    """A URL that somebody made up, or an answer of a store."""
    text = data.decode("utf-8", "surrogateescape")
    answer_in(OSError(text), ("secret",))
    str(location(text))
