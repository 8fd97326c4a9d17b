"""States of devices: tensors of every kind in which one may lie, and a small training with what it needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import holdfast

_TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def noise(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """Random bits of a type: for floats also infinities and NaNs with whatever is in them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype).to(kind)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator, device="cpu")
    return data.view(dtype).reshape(shape).to(kind)


def every_kind(kind: str, seed: int, *, large: int = 5_000_001) -> dict[str, torch.Tensor]:
    """Tensors of every type, laid out in every way, small and larger than a window."""
    state = {}
    for number, dtype in enumerate(_TYPES):
        name = str(dtype).removeprefix("torch.")
        state[f"{name} plain"] = noise((37, 23), dtype, kind, seed + number)
        state[f"{name} turned"] = noise((37, 23), dtype, kind, seed + number).t()
        state[f"{name} number"] = noise((), dtype, kind, seed + number)
        state[f"{name} none"] = noise((0, 5), dtype, kind, seed)
        state[f"{name} odd"] = noise((1001,), dtype, kind, seed + number)[1:]  # begins anywhere
        state[f"{name} every third"] = noise((300, 9), dtype, kind, seed + number)[::3, ::2]
    for number in range(300):
        state[f"small {number}"] = noise((number + 1,), torch.uint8, kind, seed + number)
    # Of numbers: what becomes of a NaN's bits when it changes its sign is the device's own affair.
    numbers = torch.randn(2, 40, 30, generator=torch.Generator().manual_seed(seed), device="cpu")
    turned = torch.complex(*numbers).to(kind)
    state["conjugate"], state["minus"] = turned.conj(), turned.conj().imag
    state["wide"] = noise((7, 1), torch.float32, kind, seed).expand(7, 50)
    state["picture"] = noise((3, 4, 20, 20), torch.float32, kind, seed).to(memory_format=torch.channels_last)
    state["large"] = noise((large,), torch.float32, kind, seed)
    state["large bytes"] = noise((large,), torch.uint8, kind, seed)[3:]
    state["large turned"] = noise((large // 1000, 1000), torch.bfloat16, kind, seed).t()
    return state


class Learner(nn.Module):
    """A small network in which a device's random numbers and half precision take part."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.norm(torch.relu(self.up(x)))))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}

CAPTURABLE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=True),
    "AdamW fused capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, fused=True),
    "Adam with a rate in a tensor": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01, device=p[0].device), capturable=True, foreach=True
    ),
    "NAdam capturable": lambda p: torch.optim.NAdam(p, lr=0.01, capturable=True),
}
"""Their count of steps lies on the device; torch makes them for devices alone."""


class Training:
    """A model, an optimizer, a scaler if wanted, and all that belongs into its state."""

    def __init__(
        self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], kind: str, seed: int, *,
        dtype: torch.dtype = torch.float32, scaled: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.kind, self.dtype, self.count = kind, dtype, 0
        self.model = Learner().to(kind, dtype)
        self.optimizer = make(list(self.model.parameters()))
        self.scaler = torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=2) if scaled else None
        data = torch.randn(40, 8, 16, generator=torch.Generator().manual_seed(5), device="cpu")
        self.data = data.to(kind, dtype)

    @property
    def state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer, "rng": holdfast.RNG(), "step": self.count}
        return state | ({"scaler": self.scaler} if self.scaler is not None else {})

    def learn(self) -> torch.Tensor:
        """Forward and backward."""
        x = self.data[self.count % len(self.data)]
        half = torch.float16 if self.kind == "cuda" else torch.bfloat16
        with torch.autocast(self.kind, half, enabled=self.scaler is not None):
            loss = (self.model(x) - x).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def update(self) -> None:
        """Step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.count += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.learn()
            self.update()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and state of the optimizer, as torch has them."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}/{key}", value

    def copy(self) -> dict[str, torch.Tensor]:
        """All of `tensors`, copied by torch."""
        return {name: tensor.cpu().clone() for name, tensor in self.tensors()}
