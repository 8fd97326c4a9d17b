"""Lightning's `Trainer` with holdfast: one callback, and `fit` goes on where it was killed.

    torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py

Kill it whenever you like, also inside of an epoch, and start it again.
"""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast.trainers.lightning import HoldfastCheckpoint


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: loss {loss.item():.8f}", flush=True)
        return loss

    def train_dataloader(self) -> StatefulDataLoader:
        samples = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(samples, samples.sum(dim=1, keepdim=True))
        sampler = StatefulDistributedSampler(data, num_replicas=self.trainer.world_size, rank=self.global_rank)
        return StatefulDataLoader(data, batch_size=16, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=3,
        use_distributed_sampler=False, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[HoldfastCheckpoint(os.environ.get("ROOT", "runs/lightning"), every=5)],
    )  # fmt: skip
    trainer.fit(Net())


if __name__ == "__main__":
    main()
