"""A hub folder loaded into another layout by a map, beside a plain load of the same bytes, in one process.

Run as `python -m benchmarks.remap [--quick]`; prints the seconds, their ratio, and writes JSON. The two take turns with
a warm source, and the tensors are compared. Never compares figures of two runs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
from rich.console import Console
from safetensors.torch import save_file

import holdfast
from benchmarks.bar import Bar
from benchmarks.cache import make_warm
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.report import show_bars
from holdfast.remap import Concatenate, PermuteBlocks, Remap, Rename, Stack, Transpose

WIDTH, HEADS, EXPERTS, TURNS = 1024, 16, 8, 5
Tensors = dict[str, torch.Tensor]

REMAP = Remap(
    [
        PermuteBlocks("layers.{i}.{p}_proj", 0, (HEADS, 2, -1), (0, 2, 1)),
        Concatenate(["layers.{i}.q_proj", "layers.{i}.k_proj", "layers.{i}.v"], "layers.{i}.qkv"),
        Stack("layers.{i}.experts.{e}.w1", "layers.{i}.gate"),
        Stack("layers.{i}.experts.{e}.w3", "layers.{i}.up"),
        Concatenate(["layers.{i}.gate", "layers.{i}.up"], "layers.{i}.gate_up", dim=1),
        Stack("layers.{i}.experts.{e}.w2", "layers.{i}.down"),
        Transpose("layers.{i}.down", 1, 2),
        Rename("embed", "tok"),
    ]
)
"""Rotary halves to pairs, three projections as one, lists of experts as one tensor, one of them transposed."""


def hub(layers: int) -> Tensors:
    tensors = {"embed": torch.randn(32 * WIDTH, WIDTH)}
    for i in range(layers):
        tensors |= {f"layers.{i}.{p}": torch.randn(WIDTH, WIDTH) for p in ("q_proj", "k_proj", "v")}
        for e in range(EXPERTS):
            tensors |= {f"layers.{i}.experts.{e}.{w}": torch.randn(WIDTH, WIDTH) for w in ("w1", "w2", "w3")}
    return tensors


def loaded(source: Path, target: Tensors, remap: Remap | None) -> float:
    """Seconds of one load into tensors that are there."""
    make_warm(source)
    began = time.monotonic()
    holdfast.load(source, {"model": target}, remap=remap)
    return time.monotonic() - began


def run(work: Path, layers: int, turns: int) -> tuple[int, list[float], list[float]]:
    """Bytes, and the seconds of each turn: plain, and under the map."""
    source, tensors = work / "hub", hub(layers)
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    names = {name: torch.empty(node.shape) for name, node in REMAP.resolve(tensors).items()}
    same = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    plain, mapped = [], []
    for turn in range(turns + 1):
        pair = loaded(source, same, None), loaded(source, names, REMAP)
        if turn:  # in the first, pages of the targets are touched for the first time
            plain.append(pair[0])
            mapped.append(pair[1])
            say(f"plain {pair[0]:.2f} s, under the map {pair[1]:.2f} s")
    compare(tensors, names)
    return sum(tensor.nbytes for tensor in tensors.values()), plain, mapped


def compare(tensors: Tensors, made: Tensors) -> None:
    """Raise if the tensors of the first layer are not what the map says."""
    q, k = (tensors[f"layers.0.{p}_proj"].view(HEADS, 2, -1, WIDTH).transpose(1, 2).reshape(-1, WIDTH) for p in "qk")
    experts = {
        w: torch.stack([tensors[f"layers.0.experts.{e}.{w}"] for e in range(EXPERTS)]) for w in ("w1", "w2", "w3")
    }
    wanted = {
        "qkv": torch.cat([q, k, tensors["layers.0.v"]]), "gate_up": torch.cat([experts["w1"], experts["w3"]], 1),
        "down": experts["w2"].transpose(1, 2),
    }  # fmt: skip
    for name, tensor in wanted.items():
        if not torch.equal(made[f"layers.0.{name}"], tensor):
            raise ValueError(f"layers.0.{name} is not what the map makes")


def main() -> int:
    """The command."""
    options = options_of("remap", __doc__, quick="a fifth of the bytes and three turns").parse_args()
    layers, turns = (1, 3) if options.quick else (8, TURNS)
    with folder(options.dir, "remap") as work:
        nbytes, plain, mapped = run(work, layers, turns)
    print(f"\n{nbytes / 1e9:.2f} GB: plain {median(plain):.2f} s, under the map {median(mapped):.2f} s")
    bars = [Bar("seconds, map over plain", median(mapped) / median(plain), min(mapped) / min(plain), most=2.0)]
    show_bars(Console(), bars)
    rows = [{"load": "plain", "seconds": plain}, {"load": "map", "seconds": mapped}]
    write(options.out, {"bytes": nbytes, **machine()}, rows, bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
