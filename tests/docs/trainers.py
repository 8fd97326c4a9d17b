"""The modules of the pages about trainers: a LightningModule, a small Llama. Imported by the hidden set-up of pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def small_model() -> Any:
    """A model of transformers with a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def samples() -> list[dict[str, torch.Tensor]]:
    """A dataset for `small_model`."""
    return [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]


def net() -> Any:
    """The class of a LightningModule with a loader for training and one for validation."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.net(batch).square().mean())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Net
