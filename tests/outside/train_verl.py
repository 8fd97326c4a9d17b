"""One rank that trains a model as verl's workers do, with verl's checkpoint manager for FSDP, on CPUs.

`python train_verl.py FOLDER FSDP FIRST LAST`: FSDP is 1 or 2; training goes on after step FIRST, or begins if it is 0.
examples/holdfast_in_verl.py comes in by verl's own VERL_USE_EXTERNAL_MODULES. Prints each step's loss, and at the end a
digest of weights and random generators.
"""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl.workers.engine.fsdp.transformer_impl import FSDPCheckpointManager


def main(folder: str, fsdp: int, first: int, last: int) -> None:
    dist.init_process_group("gloo")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1)
    model: nn.Module = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if fsdp == 2:
        fully_shard(model, mesh=mesh)
    else:
        model = FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    if first:
        manager.load_checkpoint(f"{folder}/global_step_{first}/actor")
    for step in range(first + 1, last + 1):
        words = (torch.arange(16).view(2, 8) * step + dist.get_rank()) % 64
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.9f}", flush=True)
        manager.save_checkpoint(f"{folder}/global_step_{step}/actor", global_step=step, max_ckpt_to_keep=3)
    numpy_words = np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    sha = hashlib.sha256(repr(random.getstate()).encode() + torch.get_rng_state().numpy().tobytes() + numpy_words)
    for tensor in model.parameters():
        sha.update((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().numpy().tobytes())
    print("end", dist.get_rank(), type(manager).__name__, sha.hexdigest(), *scheduler.get_last_lr(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
