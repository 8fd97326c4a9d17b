"""What else is saved beside a model: loaders, samplers, scalers, generators, objects and values of one's own.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.case import Case, Lay, Run
from zoo.modules import seen
from zoo.optimizers_of_libraries import module_of


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
    yield case(
        "StatefulDataLoader, shuffled",
        lambda: lib.StatefulDataLoader(rows, batch_size=3, shuffle=True, generator=seeded()),
    )
    yield case(
        "StatefulDataLoader with workers",
        lambda: lib.StatefulDataLoader(rows, batch_size=3, num_workers=2, shuffle=True, generator=seeded()),
    )
    yield case("StatefulDataLoader of a stream", lambda: lib.StatefulDataLoader(_Stream(), batch_size=3))
    if (samplers := module_of("torchdata.stateful_dataloader.sampler")) is not None:
        yield case(
            "StatefulDistributedSampler",
            lambda: lib.StatefulDataLoader(
                rows, batch_size=3, sampler=samplers.StatefulDistributedSampler(rows, num_replicas=2, rank=0)
            ),
        )
    if (nodes := module_of("torchdata.nodes")) is not None:
        yield case("nodes", lambda: nodes.Loader(nodes.Batcher(nodes.IterableWrapper(_Stream()), 3)))
        yield case(
            "nodes of a sampler", lambda: nodes.Loader(nodes.SamplerWrapper(torch.utils.data.SequentialSampler(rows)))
        )


class _Draws:
    """A stateful object of one's own that draws from a generator of its own."""

    def __init__(self) -> None:
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(), random.Random()

    def draw(self, number: int) -> Any:
        return [torch.rand(2, generator=self.torch), float(self.numpy.random()), self.python.random()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "torch": self.torch.get_state(),
            "numpy": self.numpy.bit_generator.state,
            "python": list(self.python.getstate()),
        }

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
            "number": number, "big": 2**70 + number, "float": number / 3, "infinite": float("inf"),
            "complex": 1j * number,
            "text": "ü\u2028\x00" * number, "bytes": bytes(range(number)), "none": None, "bool": number % 2 == 0,
            "list": [1, [2, (3, 4)], []], "tuple": (), "empty": {}, "integers": {1: "a", -2: "b"},
            "dtype": torch.bfloat16,
            "size": torch.Size([1, 2]), "device": torch.device("cpu"), "array": np.arange(number),
            "scalar": np.float32(number),
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
    state: dict[str, Any] = {
        "step": 0,
        "best": 0.0,
        "history": [],
        "names": {"a": 1},
        "tensor": torch.zeros(3),
        "pair": (1, "x"),
    }

    def step(number: int) -> Any:
        state["step"] += 1
        state["best"] = state["step"] / 7
        state["history"].append(state["best"])
        state["tensor"] += state["step"]
        return [
            state["step"],
            state["best"],
            list(state["history"]),
            state["tensor"].clone(),
            state["names"],
            state["pair"],
        ]

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
    if (lib := module_of("torchdata.stateful_dataloader")) is not None:
        yield from _loaders(lib)
    yield Case("torch: GradScaler", "torch", _scaler, sharded=False)
    yield Case("python: generators of one's own", "python", lambda lay: _stateful(_Draws(), "draw"), sharded=False)
    yield Case("python: objects of every kind", "python", lambda lay: _stateful(_Objects(), "step"), sharded=False)
    yield Case(
        "python: objects of every kind but NumPy's",
        "python",
        lambda lay: _stateful(_without("array", "scalar")(), "step"),
        sharded=False,
    )
    yield Case("python: values and tensors in the state itself", "python", _plain_values, sharded=False)


def _stateful(held: Any, method: str) -> Run:
    return Run({"object": held}, getattr(held, method))
