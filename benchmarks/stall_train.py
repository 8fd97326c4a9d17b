"""A training run under way: a GPT, AdamW, and steps that one can look between.

Built by the stall benches on each rank: sharded by FSDP2 over all ranks, or plain on one device.
Never saves anything, and knows no system that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

HEAD = 64


@dataclass(frozen=True)
class Size:
    """Of the model, and of what each rank learns in a step: ``parts`` batches, one after another."""

    width: int
    depth: int
    vocabulary: int
    context: int = 32
    batch: int = 1
    parts: int = 1

    @property
    def parameters(self) -> int:
        d = self.width
        return (self.vocabulary + self.context + 2) * d + self.depth * (12 * d * d + 13 * d)

    @property
    def nbytes(self) -> int:
        """Of the parameters and both moments, float32."""
        return 12 * self.parameters


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Its output head is its token embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Training:
    """A model and its optimizer, somewhere in the middle of a run."""

    def __init__(self, size: Size, device: str = "cpu") -> None:
        torch.manual_seed(0)  # the same model on every rank, before it is cut
        with torch.device(device):
            self.model = GPT(size)
        self.sharded = dist.get_world_size() > 1
        if self.sharded:
            _shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.size, self.device, self.steps = size, device, 0
        self.step()  # from here on there is optimizer state

    def learn(self) -> None:
        """Forward and backward of a step."""
        shape = (self.size.batch, self.size.context + 1)
        for _ in range(self.size.parts):
            tokens = torch.randint(self.size.vocabulary, shape, device=self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=not self.sharded):
                scores = self.model(tokens[:, :-1])
            F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    def update(self) -> None:
        """The rest of a step, in which parameters and optimizer state change."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def step(self) -> None:
        self.learn()
        self.update()

    def local_tensors(self) -> Iterator[torch.Tensor]:
        """This rank's own memory of everything that a save takes."""
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), *self.optimizer.state[parameter].values()):
                yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @property
    def local_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local_tensors())

    def synchronize(self) -> None:
        """Wait until the device has done all it was told."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def _shard(model: GPT) -> None:
    # Gloo is slow beside the arithmetic: half as many bytes in every transfer, and parameters sent once a step.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
