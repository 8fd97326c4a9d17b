"""Modules with buffers and parameters of every dtype, layout and habit: some grow, some are made anew in every step.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zoo.case import Case
from zoo.modules import case, features


class Buffers(nn.Module):
    """Buffers of every dtype and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        kinds = (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
        for kind in kinds:
            name = f"of_{str(kind).removeprefix('torch.')}"
            self.register_buffer(name, torch.randn(3).abs().mul(10).to(torch.float32).to(kind))
        self.register_buffer("none", None)
        self.register_buffer("scalar", torch.zeros(()))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scalar += 1
        self.of_int64 += 1
        return self.layer(x) * self.scalar * self.of_int64.sum() + self.of_float64.sum().float()


class Unsigned(nn.Module):
    """Buffers of the dtypes that torch hardly computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        for kind in (torch.uint16, torch.uint32, torch.uint64):
            self.register_buffer(f"of_{str(kind).removeprefix('torch.')}", torch.randint(0, 9, (3,)).to(kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.of_uint16.to(torch.int64).sum()


class Expanded(nn.Module):
    """A buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("wide", torch.randn(1, 5).expand(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.wide


class Replaced(nn.Module):
    """Sets its buffer anew in every step, and one of its parameters' memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) - self.mean
        self.mean = out.detach().mean(0) * 0.1 + self.mean * 0.9
        self.layer.bias.data = self.layer.bias.data.clone() * 0.99
        return out


class Grown(nn.Module):
    """A buffer that a fresh one has not: None at first, a tensor after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.mean = out.detach().mean(0) if self.mean is None else self.mean * 0.9 + out.detach().mean(0) * 0.1
        return out - self.mean


class Lengthened(nn.Module):
    """A queue, longer after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("queue", torch.zeros(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.queue = torch.cat([self.queue, out.detach()[:1]])
        return out + self.queue.mean(0)


class LengthenedWithHook(Lengthened):
    """The same, with a hook that makes room when it is loaded, as torch's docs say."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.queue = torch.zeros_like(state_dict[prefix + "queue"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Sparse(nn.Module):
    """Buffers of layouts that are not strided."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        dense = torch.randn(5, 6) * (torch.rand(5, 6) > 0.5)
        kinds = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr}
        if layout == "quantised":
            made = torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8)
        elif layout == "conjugate":
            made = torch.randn(5, 6, dtype=torch.complex64).conj()
        elif layout == "meta":
            made = torch.empty(5, 6, device="meta")
        else:
            made = kinds[layout]()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("odd", made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd.is_meta:
            return self.layer(x)
        dense = self.odd.dequantize() if self.odd.is_quantized else self.odd.to_dense()
        return self.layer(x) + x @ dense.abs().float().t()


class Float8Parameter(nn.Module):
    """A frozen parameter of 8 bits beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.quantised = nn.Parameter(torch.randn(5, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.quantised.float() * self.scale).t()


def cases() -> Iterator[Case]:
    """All of them."""
    rows = features(4, 6)
    for name, kind in {
        "buffers of every dtype": Buffers, "buffers of unsigned integers": Unsigned, "an expanded buffer": Expanded,
        "a buffer set anew in every step": Replaced, "a buffer that is None at first": Grown,
        "a buffer that grows": Lengthened, "a buffer that grows, and makes room in a load": LengthenedWithHook,
        "a float8 parameter": Float8Parameter,
    }.items():  # fmt: skip
        yield case(name, kind, rows)
    for layout in ("coo", "csr", "quantised", "conjugate", "meta"):
        yield case(f"a {layout} buffer", lambda layout=layout: Sparse(layout), rows)
