"""The tiny model of the golden checkpoints that are made here, its training, and its tensors after it.

The scripts `make_torch`, `make_dcp` and `make_deepspeed` use it; the tests do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SEED, STEPS = 11, 3
VOCABULARY, CONTEXT, WIDTH, HIDDEN = 13, 7, 9, 10
"""Odd sizes: no dimension but the hidden one divides by 2, and none by 4."""

PREFIXES = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.ln(x))


class Tiny(nn.Module):
    """Embeddings of tokens and positions, a block, a head; `mix` has fewer elements than there are ranks at times."""

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.9, 1.1]))
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("pos_scale", torch.linspace(0.5, 1.5, CONTEXT))
        self.register_buffer("seen", torch.tensor(0))
        if tied:
            self.head.weight = self.tok.weight
        self.pos.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        places = self.pos(torch.arange(CONTEXT)) * self.pos_scale[:, None]
        x = self.mix[0] * self.tok(tokens) + self.mix[1] * places
        for block in self.blocks:
            x = block(x)
        return self.head(self.mix[2] * x)


SHAPES = {name: param.shape for name, param in Tiny().named_parameters()}


def groups_of(model: nn.Module, *, one: bool = False) -> list[dict[str, Any]]:
    """Matrices with weight decay, then vectors without; or all in one group, in the order of the model."""
    named = [(plain(name), param) for name, param in model.named_parameters() if param.requires_grad]
    if one:
        return [{"params": [param for _, param in named], "weight_decay": 0.1}]
    wide = {name for name, shape in SHAPES.items() if len(shape) > 1}  # FSDP1 has flat pieces of them
    return [
        {"params": [param for name, param in named if (name in wide) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]


def optimizer_of(
    model: nn.Module, *, one: bool = False, amsgrad: bool = False
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """An AdamW and its schedule."""
    optimizer = torch.optim.AdamW(groups_of(model, one=one), lr=0.01, betas=(0.9, 0.95), amsgrad=amsgrad)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and the tokens that follow them: the same for all ranks."""
    chance = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, CONTEXT + 1), generator=chance)
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Three steps."""
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        schedule.step()


def plain(name: str) -> str:
    """A parameter's name without those of wrappers."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def truth_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    buffers: bool = True,
) -> dict[str, torch.Tensor]:
    """The tensors of the live objects, each made whole from what this rank has; all ranks call it."""
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found[f"model.{plain(name)}"] = whole(param.detach()).clone()
    for name, buffer in model.named_buffers() if buffers else ():
        found[f"model.{plain(name)}"] = buffer.clone()
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items() if optimizer is not None and param.requires_grad else ():
            found[f"optim.{plain(name)}.{key}"] = whole(value).clone()
    return found
