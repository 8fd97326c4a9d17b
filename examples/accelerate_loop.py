"""A training loop with Hugging Face Accelerate, on as many processes as you like, with DDP, or FSDP2 on GPUs.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --root runs/loop --kill-at 7
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --root runs/loop

The first command loses its processes in the middle of an epoch, as to a power cut; the second goes on after the last
whole checkpoint, and ends with the same bits as a run that nothing had interrupted. What holdfast adds is marked with
[1] to [6]. Needs no network: the data are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from digest import digest_of_rank  # a check for the tests; your own code does not need it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast  # [1]
from holdfast.trainers.accelerate import epoch_of, state_of


def noisy(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """A collator that draws: other noise each time."""
    x = torch.stack([row[0] for row in rows])
    return x + 0.1 * torch.randn(x.shape)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder of this run")
    parser.add_argument("--every", type=int, default=2, help="save every so many steps")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--fsdp", action="store_true", help="shard the model (FSDP2); needs GPUs")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="die without a word after this step")
    args = parser.parse_args(argv)
    if args.fsdp and not torch.cuda.is_available():
        parser.error("--fsdp needs GPUs: on CPUs accelerate would take DDP in its place, without a word")

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if args.fsdp else None,
    )
    set_seed(0, device_specific=False)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = TensorDataset(torch.arange(320.0).view(40, 8) / 320)
    loader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=noisy, num_workers=args.workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    state = state_of(accelerator, also={"step": 0})  # [2]
    manager = holdfast.CheckpointManager(args.root, every=args.every)  # [3]
    loaded = manager.restore(state)  # [4]

    losses = {}
    for epoch in range(epoch_of(loader), args.epochs):  # [5]
        for x in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), x)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state["step"] += 1
                losses[state["step"]] = loss.item()
                manager.step(state["step"], state)  # [6]
                if state["step"] == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            if manager.should_stop:
                break
        accelerator.print(f"epoch {epoch} ends")
        if manager.should_stop:
            break
    manager.close()

    told = {
        "resumed": loaded.step if loaded is not None else 0,
        "losses": losses,
        "digest": digest_of_rank(model, optimizer.optimizer),
    }
    accelerator.print(json.dumps(told), flush=True)
    accelerator.end_training()
    return told


if __name__ == "__main__":
    main()
