"""Trains a small network under DDP and saves it with `torch.save`; ddp_after.py is the same script on holdfast.

    torchrun --standalone --nproc-per-node 2 examples/ddp_before.py

Training waits for each save, dropout goes on with other numbers after a restart, and a kill at the wrong moment
leaves half a file in the place of the checkpoint before.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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

    done = 0
    path = ROOT / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["epoch"]
    for epoch in range(done + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0:
            parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, path)
            print(f"epoch {epoch}: loss {loss.item():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
