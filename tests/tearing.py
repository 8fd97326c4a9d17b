"""Training that changes everything at every moment that it may, beside saves; and what of it was torn.

Used by the tests of background saves, on the CPU and on devices. Never imports more than torch and pytest.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.buffers import stable
from holdfast.write import buffer as buffers
from holdfast.write import filling, pool

WINDOW = 8192  # small, so that a small memory limit means waves

SLOW = filling.copy_bytes


def slowly(*args: Any) -> None:
    SLOW(*args)
    time.sleep(0.0003)


@contextmanager
def patched(
    *, hold: int = stable.HOLD, small: int = stable.SMALL, copy: Callable[..., None] = slowly
) -> Iterator[None]:
    """Copy slowly in small strides, through small windows, and hold no more than ``hold`` bytes aside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stable, "HOLD", hold)
        patch.setattr(stable, "SMALL", small)
        patch.setattr(filling, "STRIDE", 1024)
        patch.setattr(filling, "copy_bytes", copy)
        patch.setattr(pool, "CHUNK", WINDOW)
        patch.setattr(pool, "StagingBuffer", partial(buffers.StagingBuffer, chunk_bytes=WINDOW))
        yield


class Net(nn.Module):
    """Tied weights, a frozen parameter, buffers that every forward pass changes, one not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.BatchNorm1d(16)
        self.wide = nn.Linear(16, 300)
        self.back = nn.Linear(300, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.back(self.wide(self.norm(self.embed(tokens)))))


class Sampler:
    """An object with a state of its own: a tensor that is its live memory, and a value."""

    def __init__(self) -> None:
        self.order, self.at = torch.randperm(500), 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


OPTIMIZERS: dict[str, Callable[[Net], Any]] = {
    "SGD": lambda net: torch.optim.SGD(_trained(net), lr=0.01, momentum=0.9),
    "AdamW": lambda net: torch.optim.AdamW(_trained(net), lr=0.01, foreach=False),
    "AdamW foreach": lambda net: torch.optim.AdamW(_trained(net), lr=0.01, foreach=True),
    "AdamW fused": lambda net: torch.optim.AdamW(_trained(net), lr=0.01, fused=True),
    "two": lambda net: {
        "a": torch.optim.SGD(_trained(net)[:3], lr=0.01, momentum=0.9),
        "b": torch.optim.Adam(_trained(net)[3:], lr=0.01),
    },
    "list": lambda net: [torch.optim.AdamW(_trained(net)[:2]), torch.optim.AdamW(_trained(net)[2:])],
    "none": lambda net: {},
}


def _trained(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _optimizers(state: dict[str, Any]) -> list[torch.optim.Optimizer]:
    found = state["optimizer"]
    return list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else [found]


def build(kind: str, seed: int, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net().to(device)
    return {
        "net": net,
        "optimizer": OPTIMIZERS[kind](net),
        "ema": copy.deepcopy(net),
        "bare": {
            "small": torch.randn(5, device=device),
            "large": torch.randn(3000, device=device),
            "turned": torch.randn(40, 30, device=device).t(),
        },
        "sampler": Sampler(),
        "mine": holdfast.PerRank({"t": torch.randn(6, device=device), "n": [seed]}),
        "rng": holdfast.RNG(),
        "list": [1, {"two": 2}],
        "step": 0,
    }


def train(state: dict[str, Any]) -> None:
    """A forward and a backward pass: buffers and gradients change."""
    net = state["net"]
    loss = net(torch.randint(0, 11, (8,), device=net.frozen.device)).square().mean()
    loss.backward()


def step(state: dict[str, Any]) -> None:
    for optimizer in _optimizers(state):
        optimizer.step()


@torch.no_grad()
def change_what_may_change(state: dict[str, Any]) -> None:
    """Everything but what an optimizer of the state steps."""
    net, ema = state["net"], state["ema"]
    for ours, theirs in zip(ema.state_dict().values(), net.state_dict().values(), strict=True):
        ours.copy_(ours * 0.5 + theirs) if ours.is_floating_point() else ours.copy_(theirs)
    for buffer in net.buffers():
        buffer.add_(1)
    net.frozen.mul_(-2)
    if not _optimizers(state):
        for parameter in net.parameters():
            parameter.add_(1)
    for optimizer in _optimizers(state):
        optimizer.param_groups[0]["lr"] *= 0.5
    for tensor in state["bare"].values():
        tensor.add_(1)
    state["sampler"].order.add_(1)
    state["sampler"].at += 1
    state["mine"].value["t"].add_(1)
    state["mine"].value["n"].append(5)
    state["list"][1]["two"] += 1
    state["step"] += 1
    torch.rand(3), random.random()


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of all that a state is, found without holdfast."""
    net = state["net"]
    named = {p: n for n, p in net.named_parameters()}
    return copy.deepcopy({
        "net": net.state_dict(),
        "ema": state["ema"].state_dict(),
        "optimizers": [
            (
                {f"{named[p]}/{k}": v for p, kept in o.state.items() for k, v in kept.items()},
                [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups],
            )
            for o in _optimizers(state)
        ],
        "bare": state["bare"], "sampler": state["sampler"].state_dict(), "mine": state["mine"].value,
        "rng": (torch.get_rng_state(), random.getstate(), [torch.cuda.get_rng_state()] if net.frozen.is_cuda else []),
        "list": state["list"], "step": state["step"],
    })  # fmt: skip


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return [] if alike and _bytes(a) == _bytes(b) else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: length"]
        return [f for i, (x, y) in enumerate(zip(a, b, strict=True)) for f in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a!r} != {b!r}"]


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def what_was_saved(path: Path, kind: str, device: str = "cpu") -> dict[str, Any]:
    target = build(kind, 999, device)
    holdfast.load(path, target, verify="blocks")
    return snapshot(target)


MOMENTS = ["before forward", "after forward", "after step", "twice after step"]
HOLDS = [(stable.HOLD, stable.SMALL), (2000, 300), (0, 0)]


def run(
    root: Path, kind: str, worker: Any, slots: int, limit: int | None, when: list[str], *, device: str = "cpu",
    delay: Callable[[], None] = lambda: None,
) -> list[str]:  # fmt: skip
    """Train and save at these moments; every difference between what was saved and what was there.

    ``delay`` is called before each save: it may keep a device from copying for a while.
    """
    state, expected, savings = build(kind, 1, device), [], []
    for _ in range(2):
        train(state)
        step(state)
    with holdfast.Saver(worker=worker, slots=slots, memory_limit=None if limit is None else limit * slots) as saver:

        def save() -> None:
            expected.append(snapshot(state))
            delay()
            savings.append(saver.save(state, root / str(len(savings))))
            change_what_may_change(state)

        for moment in when:
            save() if moment == "before forward" else None
            train(state)
            save() if moment == "after forward" else None
            step(state)
            save() if moment.endswith("after step") else None
            save() if moment.startswith("twice") else None
            step(state)
    found = []
    for saving, there in zip(savings, expected, strict=True):
        assert saving.failed is None, saving.failed
        found += differences(what_was_saved(saving.path, kind, device), there, saving.path.name)
    return found
