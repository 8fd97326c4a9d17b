"""What is saved beside a model and its optimizer: schedulers, loaders, samplers, scalers, generators.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
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
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": torch.tensor(0.05) if tensor_lr else 0.05}]
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
            return [[float(g["lr"]) for g in optimizer.param_groups], [g["momentum"] for g in optimizer.param_groups], seen(model)]

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
    return torch_schedulers.SequentialLR(optimizer, [warm, torch_schedulers.CosineAnnealingLR(optimizer, 10)], milestones=[4])


def _nested(optimizer: Any) -> Any:
    first = torch_schedulers.ChainedScheduler([torch_schedulers.ConstantLR(optimizer, 0.5, 4), torch_schedulers.ExponentialLR(optimizer, 0.9)])
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
    yield "CyclicLR with a function of its own", lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x), {}
    yield "OneCycleLR", lambda o: s.OneCycleLR(o, [0.2, 0.1], total_steps=20), {}
    yield "OneCycleLR in three phases", lambda o: s.OneCycleLR(o, 0.2, total_steps=20, three_phase=True, anneal_strategy="linear"), {}
    yield "ReduceLROnPlateau", lambda o: s.ReduceLROnPlateau(o, patience=1, cooldown=1), {"loss": True}
    yield "ReduceLROnPlateau with a floor for each group", lambda o: s.ReduceLROnPlateau(o, patience=0, min_lr=[0.01, 0.001]), {"loss": True}
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
    yield "cosine with restarts", lambda o: lib.get_cosine_with_hard_restarts_schedule_with_warmup(o, num_cycles=2, **given), {}
    yield "polynomial", lambda o: lib.get_polynomial_decay_schedule_with_warmup(o, lr_end=1e-4, **given), {}
    yield "inverse square root", lambda o: lib.get_inverse_sqrt_schedule(o, 2), {}
    yield "warm-up, stable, decay", lambda o: lib.get_wsd_schedule(o, num_warmup_steps=2, num_decay_steps=8, num_training_steps=20), {}
    if hasattr(lib, "GreedyLR"):
        yield "GreedyLR", lambda o: lib.GreedyLR(o, patience=1, warmup=0), {"loss": True}


def _loading(make: Callable[[], Any], take: Callable[[Any], Callable[[int], Any]]) -> Callable[[Lay], Run]:
    """A run that only reads; ``take`` makes of a loader what reads a batch."""

    def build(lay: Lay) -> Run:
        loader = make()
        return Run({"loader": loader}, take(loader))

    return build


def _batches(loader: Any) -> Callable[[int], Any]:
    iterator: list[Any] = []

    def step(number: int) -> Any:
        if not iterator:
            iterator.append(iter(loader))
        try:
            return next(iterator[0])
        except StopIteration:
            iterator[0] = iter(loader)
            return next(iterator[0])

    return step


class _Stream(torch.utils.data.IterableDataset):
    """A data set that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 40:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _loaders(lib: Any) -> Iterator[Case]:
    def case(name: str, make: Callable[[], Any]) -> Case:
        return Case(f"torchdata: {name}", "torchdata", _loading(make, _batches), sharded=False)

    rows = list(range(50))
    seeded = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    yield case("StatefulDataLoader", lambda: lib.StatefulDataLoader(rows, batch_size=3))
    yield case("StatefulDataLoader, shuffled", lambda: lib.StatefulDataLoader(rows, batch_size=3, shuffle=True, generator=seeded()))
    yield case("StatefulDataLoader with workers", lambda: lib.StatefulDataLoader(rows, batch_size=3, num_workers=2, shuffle=True, generator=seeded()))
    yield case("StatefulDataLoader of a stream", lambda: lib.StatefulDataLoader(_Stream(), batch_size=3))
    if (samplers := module_of("torchdata.stateful_dataloader.sampler")) is not None:
        yield case(
            "StatefulDistributedSampler",
            lambda: lib.StatefulDataLoader(rows, batch_size=3, sampler=samplers.StatefulDistributedSampler(rows, num_replicas=2, rank=0)),
        )
    if (nodes := module_of("torchdata.nodes")) is not None:
        yield case("nodes", lambda: nodes.Loader(nodes.Batcher(nodes.IterableWrapper(_Stream()), 3)))
        yield case("nodes of a sampler", lambda: nodes.Loader(nodes.SamplerWrapper(torch.utils.data.SequentialSampler(rows))))


class _Draws:
    """A stateful object of one's own that draws from a generator of its own."""

    def __init__(self) -> None:
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(), random.Random()

    def draw(self, number: int) -> Any:
        return [torch.rand(2, generator=self.torch), float(self.numpy.random()), self.python.random()]

    def state_dict(self) -> dict[str, Any]:
        return {"torch": self.torch.get_state(), "numpy": self.numpy.bit_generator.state, "python": list(self.python.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.torch.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        version, inner, gauss = state["python"]
        self.python.setstate((version, tuple(inner), gauss))


class _Objects:
    """A stateful object whose state is of every kind that Python has."""

    kinds: dict[str, Any]

    def __init__(self, kinds: dict[str, Any] | None = None) -> None:
        self.kinds = {}

    def step(self, number: int) -> Any:
        self.kinds = {
            "number": number, "big": 2**70 + number, "float": number / 3, "infinite": float("inf"), "complex": 1j * number,
            "text": "ü\u2028\x00" * number, "bytes": bytes(range(number)), "none": None, "bool": number % 2 == 0,
            "list": [1, [2, (3, 4)], []], "tuple": (), "empty": {}, "integers": {1: "a", -2: "b"}, "dtype": torch.bfloat16,
            "size": torch.Size([1, 2]), "device": torch.device("cpu"), "array": np.arange(number), "scalar": np.float32(number),
            "tensors": [torch.ones(number), {"deep": torch.tensor(number)}],
        }  # fmt: skip
        return self.kinds["number"]

    def state_dict(self) -> dict[str, Any]:
        return self.kinds

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kinds = state


def _without(*keys: str) -> type[_Objects]:
    def step(self: Any, number: int) -> Any:
        _Objects.step(self, number)
        for key in keys:
            del self.kinds[key]
        return number

    return type("Objects", (_Objects,), {"step": step})


def _plain_values(lay: Lay) -> Run:
    state: dict[str, Any] = {"step": 0, "best": 0.0, "history": [], "names": {"a": 1}, "tensor": torch.zeros(3), "pair": (1, "x")}

    def step(number: int) -> Any:
        state["step"] += 1
        state["best"] = state["step"] / 7
        state["history"].append(state["best"])
        state["tensor"] += state["step"]
        return [state["step"], state["best"], list(state["history"]), state["tensor"].clone(), state["names"], state["pair"]]

    return Run(state, step)


def _scaler(lay: Lay) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> Any:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        scaler.scale(model(x).square().mean() * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [scaler.get_scale(), seen(model)]

    return Run({"model": model, "optimizer": optimizer, "scaler": scaler}, step)


def cases() -> Iterator[Case]:
    """All of them."""
    for name, make, how in _of_torch():
        yield Case(f"torch: {name}", "torch", scheduled(make, **how))
    if (lib := module_of("transformers")) is not None:
        for name, make, how in _of_transformers(lib):
            yield Case(f"transformers: schedule, {name}", "transformers", scheduled(make, **how))
    if (lib := module_of("torchdata.stateful_dataloader")) is not None:
        yield from _loaders(lib)
    if (lib := module_of("pytorch_warmup")) is not None:
        yield Case("pytorch_warmup: LinearWarmup", "pytorch_warmup", scheduled(partial(_warm_up, lib.LinearWarmup, warmup_period=5)))
        yield Case("pytorch_warmup: UntunedLinearWarmup", "pytorch_warmup", _untuned(lib))
    yield Case("torch: GradScaler", "torch", _scaler, sharded=False)
    yield Case("python: generators of one's own", "python", lambda lay: _stateful(_Draws(), "draw"), sharded=False)
    yield Case("python: objects of every kind", "python", lambda lay: _stateful(_Objects(), "step"), sharded=False)
    yield Case("python: objects of every kind but NumPy's", "python", lambda lay: _stateful(_without("array", "scalar")(), "step"), sharded=False)
    yield Case("python: values and tensors in the state itself", "python", _plain_values, sharded=False)


def _stateful(held: Any, method: str) -> Run:
    return Run({"object": held}, getattr(held, method))


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

