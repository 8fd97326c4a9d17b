"""What is written beside a golden checkpoint that is made here: the sums of its tensors, and its facts."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import platform
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import nn

from tests.formats.expected import SUMS, write_sums
from tests.golden.tiny import SEED, STEPS, plain


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, system: str, api: str, layout: str, world: int = 1
) -> dict[str, Any]:
    """What `expected.json` says of every checkpoint."""
    params = {plain(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    names = {id(param): name for name, param in reversed(params.items())}
    tied = params["head.weight"] is params["tok.weight"]
    facts: dict[str, Any] = {
        "system": system, "api": api, "layout": layout, "world_size": world, "seed": SEED, "step": STEPS,
        "frozen": [name for name, param in params.items() if not param.requires_grad],
        "tied": [["tok.weight", "head.weight"]] if tied else [],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    if optimizer is not None:
        facts["param_groups"] = [
            {**group, "betas": list(group["betas"]), "params": [names[id(param)] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
    return facts


def write(folder: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Write the truth beside a checkpoint."""
    facts["pickle_globals"] = sorted(globals_below(folder / "ckpt"))
    write_sums(folder / SUMS, tensors)
    (folder / "expected.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def globals_below(folder: Path) -> set[str]:
    """Every name that the pickles of a checkpoint refer to."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {name for path in files for pickled in pickles_in(path) for name in globals_in(pickled)}


def pickles_in(path: Path) -> Iterator[bytes]:
    """The pickles of a file: of each archive of torch.save in it, or those that it begins with."""
    data = path.read_bytes()
    if path.suffix == ".distcp":
        for piece in pieces_of(path):
            yield from archived(piece)
    elif zipfile.is_zipfile(path):
        yield from archived(data)
    elif path.suffix != ".safetensors":
        yield data


def pieces_of(path: Path) -> Iterator[bytes]:
    """What a file of DCP holds, piece by piece."""
    data = path.read_bytes()
    for metadata in path.parent.glob("*.metadata"):
        for info in pickle.loads(metadata.read_bytes()).storage_data.values():
            if info.relative_path == path.name:
                piece = data[info.offset : info.offset + info.length]
                if info.transform_descriptors:
                    piece = zstandard.ZstdDecompressor().decompressobj().decompress(piece)
                yield piece


def archived(data: bytes) -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        yield from (archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


def globals_in(data: bytes) -> set[str]:
    """The names in the pickles that these bytes begin with."""
    found, rest = set(), io.BytesIO(data)
    while rest.read(1) == b"\x80":
        rest.seek(-1, io.SEEK_CUR)
        texts: list[str] = []
        memo: dict[int, str] = {}
        last = ""
        try:
            for op, arg, _ in pickletools.genops(rest):
                if op.name == "GLOBAL":
                    found.add(arg.replace(" ", "."))
                elif op.name == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif "UNICODE" in op.name:
                    texts.append(arg)
                elif op.name == "MEMOIZE" or "PUT" in op.name:
                    memo[len(memo) if arg is None else arg] = last
                elif "GET" in op.name:
                    texts.append(memo[arg])
                last = arg if "UNICODE" in op.name else ""
        except ValueError:
            break  # the tensors that follow the pickles of an old torch.save
    return found
