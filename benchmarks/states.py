"""The states that are saved: one like a GPT model under FSDP2 with Adam, one of very many small tensors.

Called by the jobs. Every element is a function of its name and its place in the whole tensor, so that any rank of any
mesh knows what it must find after a load. Never random, never NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Shape = tuple[int, ...]
State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Sharded:
    """A GPT of this width, depth and vocabulary, with both Adam moments: float32, cut on axis 0 over all ranks."""

    width: int
    depth: int
    vocabulary: int

    def shapes(self) -> dict[str, Shape]:
        d = self.width
        block: dict[str, Shape] = {
            "ln_1.weight": (d,), "ln_1.bias": (d,), "ln_2.weight": (d,), "ln_2.bias": (d,),
            "attn.qkv.weight": (3 * d, d), "attn.qkv.bias": (3 * d,), "attn.out.weight": (d, d), "attn.out.bias": (d,),
            "mlp.up.weight": (4 * d, d), "mlp.up.bias": (4 * d,), "mlp.down.weight": (d, 4 * d), "mlp.down.bias": (d,),
        }  # fmt: skip
        found: dict[str, Shape] = {"wte.weight": (self.vocabulary, d), "wpe.weight": (1024, d)}
        for i in range(self.depth):
            found.update((f"blocks.{i}.{name}", shape) for name, shape in block.items())
        return {**found, "ln_f.weight": (d,), "ln_f.bias": (d,)}

    @property
    def tensors(self) -> int:
        return 3 * len(self.shapes())

    @property
    def nbytes(self) -> int:
        return 3 * 4 * sum(map(prod, self.shapes().values()))

    def build(self, rank: int, world: int) -> State:
        """This rank's state, as DTensors on a mesh of all ranks."""
        mesh = init_device_mesh("cpu", (world,))
        state: State = {}
        for part, suffix in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq")):
            for name, shape in self.shapes().items():
                rows = -(-shape[0] // world)
                first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
                row = prod(shape[1:])
                local = _content(f"{part}/{name}{suffix}", first * row, last * row).view(last - first, *shape[1:])
                stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
                state.setdefault(part, {})[name + suffix] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
                )
        return state


@dataclass(frozen=True)
class Replicated:
    """The same GPT with Adam under DDP: plain tensors, the same on every rank."""

    model: Sharded

    @property
    def tensors(self) -> int:
        return self.model.tensors

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def build(self, rank: int, world: int) -> State:
        state: State = {}
        for part, suffix in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq")):
            for name, shape in self.model.shapes().items():
                whole = _content(f"{part}/{name}{suffix}", 0, prod(shape)).view(shape)
                state.setdefault(part, {})[name + suffix] = whole
        return state


@dataclass(frozen=True)
class Small:
    """``tensors`` plain tensors of 4 KiB, as the parts of thousands of small layers."""

    tensors: int

    @property
    def nbytes(self) -> int:
        return 4096 * self.tensors

    def build(self, rank: int, world: int) -> State:
        names = [f"layers.{i // 10}.part{i % 10}.weight" for i in range(self.tensors)]
        return {"model": {name: _content(name, 0, 1024).view(32, 32) for name in names}}


Spec = Sharded | Replicated | Small


def _content(name: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``start:stop`` of a flat tensor: positive finite numbers that no other name or place has."""
    bits = torch.arange(start, stop, dtype=torch.int32).mul_(747796405)
    return bits.add_(zlib.crc32(name.encode()) & 0x3FFFFFFF).bitwise_and_(0x3FFFFFFF).view(torch.float32)


def local_tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Flat names and this rank's own memory of each tensor."""
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            yield f"{part}/{name}", tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(state: State) -> str:
    """One sum over all local bytes and names."""
    total: Any = xxhash.xxh3_128()
    for name, tensor in local_tensors(state):
        total.update(name.encode())
        total.update(tensor.view(-1).numpy())
    return str(total.hexdigest())


def poison(state: State) -> None:
    """Overwrite every element, so that what a load leaves out cannot look right."""
    for _, tensor in local_tensors(state):
        tensor.fill_(-1.0)


def local_bytes(state: State) -> int:
    """Bytes that this rank holds."""
    return sum(tensor.nbytes for _, tensor in local_tensors(state))
