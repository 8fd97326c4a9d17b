"""Trains with FSDP2 on any mesh, and resumes on any other: arguments are replicas, shards, and the last step.

torchrun --standalone --nproc-per-node 4 examples/resume_elsewhere.py 2 2 5
torchrun --standalone --nproc-per-node 2 examples/resume_elsewhere.py 1 2 10
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

if len(sys.argv) != 4:
    sys.exit(__doc__)
replicas, shards, until = map(int, sys.argv[1:])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

state = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG(), "step": 0}
manager = holdfast.CheckpointManager("runs/mesh", every=5)
restored = manager.restore(state)
if restored and dist.get_rank() == 0:
    print(f"step {restored.step}, saved by {restored.checkpoint.world_size} ranks")
for step in range(state["step"] + 1, until + 1):
    x = torch.randn(8, 64)
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step
    manager.step(step, state)
manager.close()
dist.destroy_process_group()
