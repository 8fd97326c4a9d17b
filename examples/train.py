"""Train a small GPT on the source code of Python's standard library, with FSDP2, on as many processes as you like.

    torchrun --standalone --nproc-per-node 4 examples/train.py --root runs/first

Stop it however you want (Ctrl-C, SIGTERM, SIGKILL, a power cut) and start it again with the same ``--root``: it goes
on where the last checkpoint is. The number of processes and the mesh may be others than before:

    torchrun --standalone --nproc-per-node 2 examples/train.py --root runs/first --mesh 2x1

This is ordinary training code. What checkpointing adds to it is marked with [1] to [7].
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digest import digest_of_run  # a check for the demo and the tests; your own code does not need it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast  # [1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--root", required=True, help="the folder of this run: its checkpoints and its log")
    add("--steps", type=int, default=200, help="train until this step")
    add("--every", type=int, default=20, help="save every so many steps")
    add("--mesh", default="", metavar="RxS", help="R replicas of S shards each (HSDP); default: shards over all ranks")
    add("--layers", type=int, default=3)
    add("--width", type=int, default=256)
    add("--context", type=int, default=64, help="tokens of a sample; a token is a byte")
    add("--batch", type=int, default=8, help="samples of a step, over all ranks together")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--deadline", type=float, default=600, help="seconds to wait for a rank in a save before giving it up")
    add("--digest", action="store_true", help="log a digest of the whole state at every regular save and restore")
    return parser.parse_args()


# The model: a plain GPT. Nothing in it knows about ranks or checkpoints.


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# The data.


def read_text() -> torch.Tensor:
    """The standard library of the Python that runs this, as one long tensor of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


class Loader:
    """Cuts a text into samples, shuffles them anew for each epoch, and deals every batch out to the ranks.

    Its whole state is one number: how many samples the run has seen, all ranks together. That number means the same on
    any number of ranks, so a run can go on with more or fewer of them and still see every sample once an epoch.
    """

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if batch % self.world_size:
            raise SystemExit(f"--batch {batch} cannot be dealt out evenly to {self.world_size} ranks")
        self.text, self.batch, self.context, self.seed = text, batch, context, seed
        self.samples = (len(text) - 1) // context
        self.seen = 0
        self.order, self.epoch = torch.empty(0), -1

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the next batch: the tokens, and for each of them the one that follows it."""
        mine = [self.sample(i) for i in range(self.seen + self.rank, self.seen + self.batch, self.world_size)]
        self.seen += self.batch
        rows = torch.stack(mine).long()
        return rows[:, :-1], rows[:, 1:]

    def sample(self, number: int) -> torch.Tensor:
        epoch, position = divmod(number, self.samples)
        if epoch != self.epoch:
            self.order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + epoch))
            self.epoch = epoch
        start = int(self.order[position]) * self.context
        return self.text[start : start + self.context + 1]

    # With these two methods any object can be part of the state of a run.

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


# The mesh, the learning rate, and what rank 0 alone does.


def make_mesh(device: str, text: str) -> DeviceMesh:
    if not text:
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    replicas, shards = map(int, text.split("x"))
    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def warm_up_and_decay(step: int) -> float:
    return min((step + 1) / 20, (20 / (step + 1)) ** 0.5)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def write_log(root: str, **entry: object) -> None:
    """Add one line of JSON to the run's log. It lies beside the checkpoints, which does not disturb them."""
    if dist.get_rank() == 0:
        Path(root).mkdir(parents=True, exist_ok=True)
        with open(Path(root, "log.jsonl"), "a") as file:
            file.write(json.dumps(entry) + "\n")


def tell_saved(saving: holdfast.Saving, root: str, **entry: object) -> None:
    """Say how a save ended. Called beside training, in the thread that learns of it."""
    if saving.failed is not None:
        say(f"step {saving.step:5d}   not saved: {saving.failed}")
    elif dist.get_rank() == 0:
        nbytes, took = holdfast.open(saving.path).nbytes, saving.timing
        text = f"{nbytes / 1e6:.1f} MB in {took.total:.2f} s, of which training waited {took.stall:.3f} s"
        say(f"step {saving.step:5d}   saved {text}")
        write_log(root, saved=saving.step, bytes=nbytes, seconds=took.total, waited=took.stall, **entry)


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Every rank builds the same model from the same seed; fully_shard then leaves it its own part of every parameter.
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.context, args.dropout).to(device)
    mesh = make_mesh(device, args.mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(args.seed + 1 + rank)  # from here on every rank drops out other activations

    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay)
    loader = Loader(read_text(), args.batch, args.context, args.seed)

    # [2] Everything that the run must not lose, under names of your choice: the objects themselves, not their state
    # dicts. Tensors are saved from where they lie, each rank its own part. RNG is the only value that differs by rank.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "rng": holdfast.RNG(),
        "step": 0,
    }
    # [3] When to save and what to keep: here the last three checkpoints, and the one with the least loss.
    manager = holdfast.CheckpointManager(
        args.root, every=args.every, keep=holdfast.Keep(last=3, best=1), deadline=args.deadline
    )
    # [4] The newest whole checkpoint goes into these same objects, on whatever mesh they live now. In a new folder
    # there is none: then nothing happens and the run starts at step 0.
    restored = manager.restore(state)

    # [5] Agree on the plan and take memory now, while nothing runs: the first save then costs what any other costs.
    manager.prepare(state)

    say(f"{world_size} ranks, {mesh}, {sum(p.numel() for p in model.parameters()):,} parameters")
    if restored is not None:
        say(f"goes on after step {state['step']}, saved by {restored.checkpoint.world_size} ranks")
        digest = digest_of_run(model, optimizer, state) if args.digest else None
        write_log(
            args.root, restored=state["step"], ranks=world_size, saved_by=restored.checkpoint.world_size,
            seen=loader.seen, seconds=restored.seconds, digest=digest,
        )  # fmt: skip

    model.train()
    for step in range(state["step"] + 1, args.steps + 1):
        tokens, targets = loader.next()
        logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        mean = loss.detach()
        dist.all_reduce(mean)
        mean_loss = mean.item() / world_size
        write_log(args.root, step=step, loss=mean_loss, ranks=world_size, seen=loader.seen)
        if step % 10 == 0:
            say(f"step {step:5d}   loss {mean_loss:.4f}")

        # [6] Begins to save when it is time, and goes on at once: the next optimizer.step() waits until its tensors
        # are copied. If a save fails, a later call raises it on every rank; the checkpoints before it are whole.
        state["step"] = step
        if args.digest and step % args.every == 0:  # first: the demo kills ranks in the middle of a save
            write_log(args.root, saving=step, digest=digest_of_run(model, optimizer, state))
        saving = manager.step(step, state, metric=mean_loss)
        if saving is not None and saving.step == step:
            saving.add_done_callback(partial(tell_saved, root=args.root, ranks=world_size, loss=mean_loss))
        # A scheduler's SIGTERM or SIGUSR1 to any rank: all have the same last step on disk and leave together.
        if manager.should_stop:
            say(f"asked to stop after step {step}; on disk are {manager.steps()}")
            break
    manager.close()  # [7] waits for the last save
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
