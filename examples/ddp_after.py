"""Trains a small network under DDP and saves it with holdfast; ddp_before.py is the same script on `torch.save`.

    torchrun --standalone --nproc-per-node 2 examples/ddp_after.py

Kill it whenever you like and start it again, on as many processes as you like: it goes on after the last epoch that
was saved, on the same number of processes with the same bits.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

EPOCHS = int(os.environ.get("EPOCHS", "5"))
ROOT = Path(os.environ.get("ROOT", "runs/ddp"))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = torch.randn(256, 16)
    data = TensorDataset(samples, samples.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    torch.manual_seed(dist.get_rank())

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": holdfast.RNG(), "epoch": 0}
    manager = holdfast.CheckpointManager(ROOT, every=1)
    manager.restore(state)
    for epoch in range(state["epoch"] + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        state["epoch"] = epoch
        manager.step(epoch, state)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.8f}", flush=True)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
