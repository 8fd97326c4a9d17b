"""A checkpoint to convert: saved by two ranks, with everything that a state may hold; and how to compare states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.ondisk import names
from tests import pool

ROWS, WIDTH = 2501, 2003
"""20 MB of float32 whose rows end nowhere near a block."""


def wide(seed: int) -> torch.Tensor:
    return (torch.arange(ROWS * WIDTH, dtype=torch.float32) * (seed + 1)).reshape(ROWS, WIDTH) % 65521


def small() -> dict[str, Any]:
    """Tensors and values, the same on all ranks."""
    shared = torch.arange(700.0).reshape(70, 10)
    bits = torch.arange(64, dtype=torch.uint8) % 2
    return {
        "model": {
            "emb.weight": shared,
            "head.weight": shared,
            "norm.bias": torch.arange(77, dtype=torch.bfloat16),
            "none.weight": torch.empty(0, 3),
            "seen": torch.tensor(12),
        },
        "kinds": {
            str(d).removeprefix("torch."): bits.view(d).reshape(2, -1).clone()
            for d in (torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.float64, torch.int8)
        },
        "odd": torch.tensor(1 + 2j),
        "config": {"lr": 0.1, "betas": (0.9, 0.99), "tags": ["a", {"b": None}], "big": 2**80, "raw": b"\0x"},
        "numbers": {1: 2, 3: torch.ones(2)},
        "layers": [torch.ones(3), {"w": torch.zeros(2, 2)}],
        "dtype": torch.bfloat16,
        "nothing": {},
        "step": 7,
    }


def of_rank(rank: int) -> dict[str, Any]:
    """On each of two ranks: rows of one large tensor, columns of another, and values of its own."""
    random.seed(rank)
    state = small()
    rows, columns = (1300, 1201), (1000, 1003)
    at, across = rows[0] * rank, columns[0] * rank
    by_row = wide(0)[at : at + rows[rank]].clone()
    by_column = wide(1)[:, across : across + columns[rank]].clone()
    state["model"]["rows.weight"] = holdfast.Shard(by_row, (ROWS, WIDTH), (at, 0))
    state["optimizer"] = {"columns": holdfast.Shard(by_column, (ROWS, WIDTH), (0, across))}
    state["rng"] = holdfast.RNG()
    state["mine"] = holdfast.PerRank({"rank": rank, "seen": torch.arange(rank + 3), "pair": (rank, None)})
    return state


FILES = {"config.json": b'{"a": 1}', "tokenizer/merges.txt": b"a b"}


def save(path: str) -> None:
    """On each of two ranks: save its state."""
    holdfast.save(of_rank(dist.get_rank()), path, files=FILES)


def make(path: Path) -> Path:
    """The checkpoint, saved at ``path``."""
    pool.run(2, save, str(path))
    return path


def whole(checkpoint: holdfast.Checkpoint) -> dict[str, Any]:
    """Its state, with what differs by rank as lists by rank."""
    state = checkpoint.state_dict()
    for path in checkpoint.differing:
        *above, last = names.split(path)
        node = state
        for key in above:
            node = node.setdefault(key, {})
        node[last] = [checkpoint.per_rank(path, rank) for rank in range(checkpoint.world_size)]
    return state


def same(a: Any, b: Any, at: str = "") -> None:
    """Assert that two states are equal: kinds, dtypes, shapes, and every bit."""
    assert type(a) is type(b), f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert torch.equal(_bytes(a), _bytes(b)), at
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{at}: {set(a) ^ set(b)}"
        for key in a:
            same(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{at}/{i}")
    else:
        assert a == b or (a != a and b != b), f"{at}: {a!r} and {b!r}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def files(path: Path) -> dict[str, bytes]:
    """All bytes of a folder, or of a file."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
