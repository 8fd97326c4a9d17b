"""Resumes inside an epoch with torch's own DataLoader, on any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/epochs.py

The run counts the samples of the epoch that all ranks together have had. `DistributedSampler` deals one shuffled list
out to the ranks, so these are the first samples of the list. The batch of all ranks together stays the same size.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


class Sampler(DistributedSampler):
    seen = 0  # samples of this epoch that training has had, of all ranks together

    def __iter__(self):
        return iter(list(super().__iter__())[self.seen // self.num_replicas :])


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.arange(96.0).view(96, 1) / 96)
sampler = Sampler(data)
# With a generator of its own, making an iterator draws nothing from the generators that the state keeps.
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler, generator=torch.Generator())
model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

state = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG(), "step": 0, "epoch": 0, "seen": 0}
manager = holdfast.CheckpointManager("runs/epochs", every=5)
restored = manager.restore(state)
if restored and dist.get_rank() == 0:
    ranks = restored.checkpoint.world_size
    print(f"resumes in epoch {state['epoch']} after {state['seen']} samples, saved by {ranks} ranks")


def train() -> None:
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        sampler.set_epoch(epoch)
        sampler.seen = state["seen"]
        for (x,) in loader:
            (model(x) - 2 * x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            state["seen"] += len(x) * dist.get_world_size()
            manager.step(state["step"], state)
            if manager.should_stop:  # a signal: out of both loops
                return
        state["seen"] = 0


train()
manager.close()
dist.destroy_process_group()
