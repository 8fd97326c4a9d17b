"""A training script as the pages take it for granted: DDP, six steps, a save at each."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
root = parser.parse_args().root

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "step": 0}
with holdfast.CheckpointManager(root, every=1, deadline=2) as manager:
    manager.restore(state)
    for step in range(state["step"] + 1, 7):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        manager.step(step, state)
dist.destroy_process_group()
