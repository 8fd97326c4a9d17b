"""A DeepSpeed engine (ZeRO 2, bfloat16) with holdfast: sharded saves beside training, any number of ranks later.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_engine.py

Kill it whenever you like and start it again.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.trainers.deepspeed import engine_state

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "steps_per_print": 1_000_000,
}


def main() -> None:
    # On a CPU DeepSpeed would compile an allreduce of its own first, for minutes; torch's does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)

    state = {**engine_state(engine), "rng": holdfast.RNG(), "step": 0}
    manager = holdfast.CheckpointManager(os.environ.get("ROOT", "runs/deepspeed"), every=5)
    manager.restore(state)
    for step in range(state["step"] + 1, 21):
        x = torch.sin(torch.arange(128.0).view(8, 16) * (step + 100 * rank))
        loss = (engine(x.bfloat16()).float() - x.sum(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        state["step"] = step
        manager.step(step, state)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.8f}", flush=True)
    manager.close()


if __name__ == "__main__":
    main()
