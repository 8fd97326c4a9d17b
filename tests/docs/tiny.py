"""What the pages take for granted: a model, its optimizer, a state, a training step; small, and the same every time.

Imported by the hidden set-up of pages (`from tests.docs.tiny import …`). A page runs in a process of its own, so what
is made here is made anew for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["GPT", "Loader", "loader", "make", "model", "optimizer", "scheduler", "state", "steps", "train"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class GPT(nn.Module):
    """A model with the names of one, 30 thousand parameters, in which tokens do not see each other."""

    def __init__(self, *, tokens: int = 128, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class Loader:
    """Batches of random tokens; its state is how many it has given."""

    def __init__(self) -> None:
        self.seen = 0

    def next(self) -> torch.Tensor:
        self.seen += 1
        return torch.randint(0, 128, (4, 8), generator=torch.Generator().manual_seed(self.seen))

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def make() -> dict[str, Any]:
    """A state as the first pages show it."""
    import holdfast

    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(),
        "rng": holdfast.RNG(),
        "step": 0,
    }


state = make()
model: GPT = state["model"]
optimizer: torch.optim.Optimizer = state["optimizer"]
scheduler: Any = state["scheduler"]
loader: Loader = state["loader"]
steps = 6


def train(step: int = 0) -> float:
    """One step, with its loss."""
    tokens = loader.next()
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()
