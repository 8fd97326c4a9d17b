"""Modules that something was put around: parametrizations, pruning, TorchScript, compilers, data parallelism.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from zoo.case import Case
from zoo.modules import case, features


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _parametrized()
    yield from _wrapped()


class Positive(nn.Module):
    """A parametrization with a way back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(x)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.expm1(x.abs() + 0.1))


def _parametrized() -> Iterator[Case]:
    rows = features(4, 6)
    square = lambda: nn.Linear(6, 6)  # noqa: E731
    yield case("weight_norm", lambda: parametrizations.weight_norm(square()), rows)
    yield case("spectral_norm", lambda: parametrizations.spectral_norm(square()), rows)
    yield case("orthogonal", lambda: parametrizations.orthogonal(square()), rows)
    yield case("orthogonal by Cayley", lambda: parametrizations.orthogonal(square(), orthogonal_map="cayley"), rows)
    yield case("weight_norm of old", lambda: nn.utils.weight_norm(square()), rows)
    yield case("spectral_norm of old", lambda: nn.utils.spectral_norm(square()), rows)
    yield case("a parametrization with a way back", _positive, rows)
    yield case("two parametrizations, one after the other", lambda: _positive(twice=True), rows)
    yield case("pruned weights", lambda: _pruned(square()), rows)


def _positive(*, twice: bool = False) -> nn.Module:
    model = parametrizations.orthogonal(nn.Linear(6, 6)) if twice else nn.Linear(6, 6)
    parametrize.register_parametrization(model, "weight", Positive())
    return model


def _pruned(model: nn.Module) -> nn.Module:
    prune.random_unstructured(model, "weight", amount=0.5)
    return model


class Script(nn.Module):
    """Small enough for TorchScript, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) * self.count


class _Compiled(nn.Module):
    """A compiled module inside of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Script(), backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _wrapped() -> Iterator[Case]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    rows = features(4, 6)
    yield case("torch.jit.script", lambda: torch.jit.script(Script()), rows, sharded=False)
    yield case("torch.jit.trace", lambda: torch.jit.trace(nn.Linear(6, 5), torch.randn(4, 6)), rows, sharded=False)
    yield case("torch.compile", lambda: torch.compile(Script(), backend="eager"), rows, sharded=False)
    yield case("torch.compile further in", _Compiled, rows)
    yield case("torch.fx", lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))), rows)
    yield case(
        "torch.export", lambda: torch.export.export(nn.Linear(6, 5), (torch.randn(4, 6),)).module(), rows, sharded=False
    )
    yield case("DataParallel", lambda: nn.DataParallel(Script()), rows, sharded=False)
    yield case("DistributedDataParallel", _ddp, rows, sharded=False)
    yield case(
        "a checkpoint wrapper", lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(6, 6)), nn.Linear(6, 5)), rows
    )


def _ddp() -> nn.Module:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Script())
