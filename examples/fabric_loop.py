"""A loop with Lightning Fabric. The state takes what `fabric.setup` returns.

torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn

import holdfast

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = fabric.setup(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 10)

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": holdfast.RNG(), "step": 0}
manager = holdfast.CheckpointManager("runs/fabric", every=5)
restored = manager.restore(state)  # replaces fabric.load
if restored:
    fabric.print(f"resumes after step {state['step']}")
for step in range(state["step"] + 1, 11):
    optimizer.zero_grad()
    fabric.backward(model(torch.rand(2, 4, device=fabric.device)).square().mean())
    optimizer.step()
    scheduler.step()
    state["step"] = step
    manager.step(step, state)  # replaces fabric.save
    if manager.should_stop:
        break
manager.close()
