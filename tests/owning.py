"""Training over bare tensors whose owners share them, change and go, beside saves; and what of it was torn.

Used by the tests of saves of bare tensors. Never gives a save a module or an optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.state import stepped
from tests.tearing import differences

Optimizer = torch.optim.Optimizer


class Owning:
    """Parameters, the optimizers that own them at the moment, and tensors that nobody owns.

    Parameter 2 has two owners at first. Parameters 5 and 6 are parts of one ``buffer`` of which the rest is free, and
    ``turned`` is not contiguous.
    """

    def __init__(self, seed: int, kind: type[Optimizer]) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.buffer = torch.randn(900)
        parts = [self.buffer.data[:300], self.buffer.data[300:350]]  # of which torch counts the changes apart
        sizes = [(40, 30), (700,), (11, 3), (), (2000,)]
        self.parameters = [*(nn.Parameter(torch.randn(size)) for size in sizes), *map(nn.Parameter, parts)]
        self.turned = nn.Parameter(torch.randn(20, 50).t())
        self.parameters.append(self.turned)
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizers = [self._made([0, 1, 2]), self._made([2, 3, 4]), self._made([5, 6]), self._made([7])]
        self.by_hand: list[nn.Parameter] = []
        self.steps = 0
        self.step_all()

    def _made(self, numbers: list[int]) -> Optimizer:
        return self.kind([self.parameters[number] for number in numbers], lr=0.01)

    def state(self) -> dict[str, Any]:
        """What there is now, as bare tensors: whole parameters, views of them, their state, and what nobody owns."""
        return {
            "parameters": [parameter.detach() for parameter in self.parameters],
            "data": [parameter.data for parameter in self.parameters],
            "views": {
                "rows": self.parameters[0].detach()[3:7],
                "column": self.parameters[0].detach()[:, 2],
                "every third": self.parameters[4].detach()[::3],
                "turned": self.parameters[0].detach().t(),
                "bits": self.parameters[1].detach().view(torch.int32),
                "beyond a parameter": self.buffer[280:360],
            },
            "kept": {
                str(i): {str(j): dict(kept) for j, kept in enumerate(o.state.values())}
                for i, o in enumerate(self.optimizers)
            },
            "rest": self.buffer[350:],
            "buffer": self.buffer,
            "ema": self.ema,
            "steps": self.steps,
        }

    def saved(self) -> None:
        """A save has begun: from now on parameters that nobody owns may be changed by hand."""
        owned = {id(p) for optimizer in stepped._seen for group in optimizer.param_groups for p in group["params"]}
        self.by_hand = [p for p in self.parameters if id(p) not in owned]

    # What training may do at any moment

    def step(self, number: int) -> None:
        optimizer = self.optimizers[number % len(self.optimizers)]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        self.steps += 1

    def step_all(self) -> None:
        for number in range(len(self.optimizers)):
            self.step(number)

    def step_with_closure(self) -> None:
        def closure() -> float:
            for parameter in self.parameters:
                parameter.grad = torch.ones_like(parameter)
            return 0.0

        self.optimizers[0].step(closure)

    def change_what_nobody_owns(self) -> None:
        with torch.no_grad():
            for ema in self.ema:
                ema.add_(1)
            for parameter in self.by_hand:
                parameter.add_(1)
            self.buffer[350:].mul_(-2)

    def replace(self) -> None:
        """A new optimizer, which has never made a step, has the parameters of the first one, and steps at once."""
        self.optimizers[0] = self._made([0, 1, 2])
        self.step(0)

    def hand_over(self) -> None:
        """An optimizer that steps already gets parameters of another one, which goes."""
        if len(self.optimizers) > 2:
            groups = self.optimizers.pop(0).param_groups
            ours = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
            more = [p for group in groups for p in group["params"] if id(p) not in ours]
            if more:
                self.optimizers[0].add_param_group({"params": more})
            if self.kind is torch.optim.Adagrad:  # up to torch 2.10 it has state only for what it was made with
                for p in more:
                    self.optimizers[0].state[p] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(p)}
            self.step(0)

    def free(self) -> None:
        """An optimizer goes, with its state; nobody owns its parameters any more."""
        if len(self.optimizers) > 1:
            self.optimizers.pop()
        gc.collect()


ACTS: dict[str, Callable[[Owning], object]] = {
    "step": lambda owning: owning.step(0),
    "step another": lambda owning: owning.step(1),
    "step all": Owning.step_all,
    "step with closure": Owning.step_with_closure,
    "change by hand": Owning.change_what_nobody_owns,
    "replace": Owning.replace,
    "hand over": Owning.hand_over,
    "free": Owning.free,
}


def cloned(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, dict):
        return {key: cloned(value) for key, value in node.items()}
    return [cloned(value) for value in node] if isinstance(node, list) else node


def run(
    root: Path, kind: type[Optimizer], worker: Any, slots: int, limit: int | None, acts: list[list[str]]
) -> list[str]:
    """Save and then do these acts, time after time; every difference between what was saved and what was there."""
    owning, expected, savings = Owning(1, kind), [], []
    with holdfast.Saver(worker=worker, slots=slots, memory_limit=None if limit is None else limit * slots) as saver:
        for then in acts:
            expected.append(cloned(owning.state()))
            savings.append(saver.save(owning.state(), root / str(len(savings))))
            owning.saved()
            for act in then:
                ACTS[act](owning)
    found = []
    for saving, there in zip(savings, expected, strict=True):
        assert saving.failed is None, saving.failed
        found += differences(holdfast.open(saving.path).state_dict(), there, saving.path.name)
    return found
