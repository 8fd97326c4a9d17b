"""Schedulers of learning rates, of torch and of other libraries.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim import swa_utils

from zoo.case import Case, Lay, Run
from zoo.modules import seen
from zoo.optimizers_of_libraries import module_of

Make = Callable[[Any], Any]
"""From an optimizer of two groups to a scheduler."""


def scheduled(make: Make, *, loss: bool = False, tensor_lr: bool = False) -> Callable[[Lay], Run]:
    """A run whose learning rates are scheduled; what a step gives has the rates in it."""

    def build(lay: Lay) -> Run:
        model = lay(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
        parameters = list(model.parameters())
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        groups = [
            {"params": parameters[:2]},
            {"params": parameters[2:], "lr": torch.tensor(0.05) if tensor_lr else 0.05},
        ]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        scheduler = make(optimizer)

        def step(number: int) -> Any:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            out = model(x).square().mean()
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step(round(out.item(), 1)) if loss else scheduler.step()
            return [
                [float(g["lr"]) for g in optimizer.param_groups],
                [g["momentum"] for g in optimizer.param_groups],
                seen(model),
            ]

        return Run({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    return build


class Halving:
    """A callable of a class of one's own, whose attributes `LambdaLR` saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5 ** (epoch / 3) + self.calls * 0.001


def _sequential(optimizer: Any) -> Any:
    warm = torch_schedulers.LinearLR(optimizer, 0.1, total_iters=4)
    return torch_schedulers.SequentialLR(
        optimizer, [warm, torch_schedulers.CosineAnnealingLR(optimizer, 10)], milestones=[4]
    )


def _nested(optimizer: Any) -> Any:
    first = torch_schedulers.ChainedScheduler(
        [torch_schedulers.ConstantLR(optimizer, 0.5, 4), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    )
    return torch_schedulers.SequentialLR(optimizer, [first, torch_schedulers.StepLR(optimizer, 2)], milestones=[5])


def _of_torch() -> Iterator[tuple[str, Make, dict[str, Any]]]:
    s = torch_schedulers
    yield "LambdaLR", lambda o: s.LambdaLR(o, lambda epoch: 0.9**epoch), {}
    yield "LambdaLR of callables with state", lambda o: s.LambdaLR(o, [Halving(), Halving()]), {}
    yield "MultiplicativeLR", lambda o: s.MultiplicativeLR(o, lambda epoch: 0.9), {}
    yield "StepLR", lambda o: s.StepLR(o, 3), {}
    yield "MultiStepLR", lambda o: s.MultiStepLR(o, [2, 4, 9]), {}
    yield "ConstantLR", lambda o: s.ConstantLR(o, 0.5, total_iters=5), {}
    yield "LinearLR", lambda o: s.LinearLR(o, 0.1, total_iters=8), {}
    yield "ExponentialLR", lambda o: s.ExponentialLR(o, 0.9), {}
    yield "ExponentialLR of tensor rates", lambda o: s.ExponentialLR(o, 0.9), {"tensor_lr": True}
    yield "PolynomialLR", lambda o: s.PolynomialLR(o, 10, 2.0), {}
    yield "CosineAnnealingLR", lambda o: s.CosineAnnealingLR(o, 10), {}
    yield "CosineAnnealingWarmRestarts", lambda o: s.CosineAnnealingWarmRestarts(o, 4, 2), {}
    yield "CyclicLR", lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3), {}
    yield (
        "CyclicLR with a function of its own",
        lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x),
        {},
    )
    yield "OneCycleLR", lambda o: s.OneCycleLR(o, [0.2, 0.1], total_steps=20), {}
    yield (
        "OneCycleLR in three phases",
        lambda o: s.OneCycleLR(o, 0.2, total_steps=20, three_phase=True, anneal_strategy="linear"),
        {},
    )
    yield "ReduceLROnPlateau", lambda o: s.ReduceLROnPlateau(o, patience=1, cooldown=1), {"loss": True}
    yield (
        "ReduceLROnPlateau with a floor for each group",
        lambda o: s.ReduceLROnPlateau(o, patience=0, min_lr=[0.01, 0.001]),
        {"loss": True},
    )
    yield "SequentialLR", _sequential, {}
    yield "ChainedScheduler", lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.5, 4), s.ExponentialLR(o, 0.9)]), {}
    yield "schedulers in each other", _nested, {}
    yield "SWALR", lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6), {}


def _of_transformers(lib: Any) -> Iterator[tuple[str, Make, dict[str, Any]]]:
    given = {"num_warmup_steps": 2, "num_training_steps": 20}
    yield "constant", lambda o: lib.get_constant_schedule(o), {}
    yield "constant with warm-up", lambda o: lib.get_constant_schedule_with_warmup(o, 2), {}
    yield "linear", lambda o: lib.get_linear_schedule_with_warmup(o, **given), {}
    yield "cosine", lambda o: lib.get_cosine_schedule_with_warmup(o, **given), {}
    yield (
        "cosine with restarts",
        lambda o: lib.get_cosine_with_hard_restarts_schedule_with_warmup(o, num_cycles=2, **given),
        {},
    )
    yield "polynomial", lambda o: lib.get_polynomial_decay_schedule_with_warmup(o, lr_end=1e-4, **given), {}
    yield "inverse square root", lambda o: lib.get_inverse_sqrt_schedule(o, 2), {}
    yield (
        "warm-up, stable, decay",
        lambda o: lib.get_wsd_schedule(o, num_warmup_steps=2, num_decay_steps=8, num_training_steps=20),
        {},
    )
    if hasattr(lib, "GreedyLR"):
        yield "GreedyLR", lambda o: lib.GreedyLR(o, patience=1, warmup=0), {"loss": True}


def cases() -> Iterator[Case]:
    """All of them."""
    for name, make, how in _of_torch():
        yield Case(f"torch: {name}", "torch", scheduled(make, **how))
    if (lib := module_of("transformers")) is not None:
        for name, make, how in _of_transformers(lib):
            yield Case(f"transformers: schedule, {name}", "transformers", scheduled(make, **how))
    if (lib := module_of("pytorch_warmup")) is not None:
        yield Case(
            "pytorch_warmup: LinearWarmup",
            "pytorch_warmup",
            scheduled(partial(_warm_up, lib.LinearWarmup, warmup_period=5)),
        )
        yield Case("pytorch_warmup: UntunedLinearWarmup", "pytorch_warmup", _untuned(lib))


class _WarmedUp:
    """A warm-up around a schedule, as its library says to use it; both are saved."""

    def __init__(self, warm: Any, inner: Any) -> None:
        self.warm, self.inner = warm, inner

    def step(self) -> None:
        with self.warm.dampening():
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"warm": self.warm.state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.warm.load_state_dict(state["warm"])
        self.inner.load_state_dict(state["inner"])


def _warm_up(kind: Any, optimizer: Any, **options: Any) -> Any:
    inner = torch_schedulers.CosineAnnealingLR(optimizer, 20)
    return _WarmedUp(kind(optimizer, **options), inner)


def _untuned(lib: Any) -> Callable[[Lay], Run]:
    def build(lay: Lay) -> Run:
        model = lay(nn.Linear(6, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        warm = _warm_up(lib.UntunedLinearWarmup, optimizer)

        def step(number: int) -> Any:
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            warm.step()
            return [optimizer.param_groups[0]["lr"], seen(model)]

        return Run({"model": model, "optimizer": optimizer, "scheduler": warm}, step)

    return build
