"""What a trial is, drawn from its number: a model, its optimizer, two meshes, and how it is saved.

The same on every rank. Nothing here makes a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BUFFERS = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8)


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer: where it is, and what. ``tied``: the name of the one that it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "parameter"
    tied: str = ""


@dataclass(frozen=True)
class Recipe:
    """All that is drawn; the same on every rank. ``blocks`` are prefixes of modules that are sharded by themselves."""

    seed: int
    leaves: tuple[Leaf, ...]
    blocks: tuple[str, ...]
    optimizer: str
    groups: tuple[tuple[str, ...], ...]
    steps: int
    before: int
    how: str
    wrapped: str
    source: str
    target: str
    split: bool = False
    turned: bool = False


def draw(seed: int) -> Recipe:
    """Everything about one trial, from its number."""
    chance = random.Random(seed)
    blocks = tuple(f"blocks.{i}" for i in range(chance.randint(0, 3)))
    leaves: list[Leaf] = []
    for prefix in ("", *blocks):
        dtype = chance.choices(DTYPES, (5, 2, 1))[0]
        for number in range(chance.randint(1, 4)):
            leaves.append(_leaf(chance, prefix, number, dtype))
        for number in range(chance.choice((0, 0, 1, 2))):
            leaves.append(_buffer(chance, prefix, number))
        own = [leaf for leaf in leaves if leaf.kind == "parameter" and _block_of(leaf.name, blocks) == prefix]
        if chance.random() < 0.3 and own:
            first = chance.choice(own)
            leaves.append(Leaf(_join(prefix, "last.again"), first.shape, first.dtype, "parameter", first.name))
    parameters = [leaf for leaf in leaves if leaf.kind == "parameter" and not leaf.tied]
    if not parameters:
        leaves.append(Leaf("one", (3, 2), torch.float32))
        parameters = leaves[-1:]
    groups = _groups(chance, [leaf.name for leaf in parameters])
    steps = chance.choice((0, 1, 1, 2, 3))
    return Recipe(
        seed, tuple(leaves), blocks, chance.choice(list(OPTIMIZERS)), groups, steps,
        before=chance.choice((0, 0, 1, 2)) if steps else 0, how=chance.choice(("save", "save", "thread", "process")),
        wrapped=chance.choice(("", "", "compiled")), source=chance.choice(list(WORLDS)),
        target=chance.choice(list(WORLDS)), split=chance.random() < 0.2 and len(groups) > 1,
        turned=chance.random() < 0.3,
    )  # fmt: skip


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _leaf(chance: random.Random, prefix: str, number: int, dtype: torch.dtype) -> Leaf:
    shape = tuple(chance.choice((1, 2, 3, 4, 5, 7, 8, 12)) for _ in range(chance.choice((1, 1, 2, 2, 2, 3))))
    place = chance.choice(("", "", "deep", "deep.er", "list.0", "with space", "0"))
    kind = "parameter" if chance.random() < 0.85 else "frozen"
    return Leaf(_join(prefix, _join(place, f"p{number}")), shape, dtype, kind)


def _buffer(chance: random.Random, prefix: str, number: int) -> Leaf:
    shape = tuple(chance.choice((0, 1, 2, 5)) for _ in range(chance.choice((0, 1, 1, 2))))
    kind = chance.choice(("buffer", "buffer", "scratch"))
    return Leaf(_join(prefix, f"b{number}"), shape, chance.choice(BUFFERS), kind)


def _groups(chance: random.Random, names: list[str]) -> tuple[tuple[str, ...], ...]:
    count = chance.choice((1, 1, 2, 3))
    found: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        chance.choice(found).append(name)
    return tuple(tuple(group) for group in found if group)


def _block_of(name: str, blocks: tuple[str, ...]) -> str:
    return next((block for block in blocks if name.startswith(block + ".")), "")


WORLDS = {
    "one process": 1, "DDP 2": 2, "FSDP2 2": 2, "FSDP2 3": 3, "FSDP2 4": 4,
    "HSDP 2x2": 4, "TP 2": 2, "TP 3": 3, "DTensors 2x2": 4, "FSDP2 x TP 2x2": 4,
}  # fmt: skip
"""The meshes, and how many ranks each needs."""

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.01), "Adam amsgrad": lambda g: torch.optim.Adam(g, lr=0.01,
    amsgrad=True),
    "Adam without foreach": lambda g: torch.optim.Adam(g, lr=0.01, foreach=False),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1), "SGD momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    "RMSprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1), "NAdam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "Adadelta": lambda g: torch.optim.Adadelta(g, lr=0.5),
    "ASGD": lambda g: torch.optim.ASGD(g, lr=0.1),
}  # fmt: skip
