"""Gradients as a part of the state, for saves in the middle of an accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import Unsupported
from holdfast.state.modules import flat_parameters, holds_gradients_back, parameter_names


class Gradients:
    """The gradients of a module's parameters, as a thing with a state: what was accumulated is saved and comes back.

    Without it a save between two micro-batches of one optimizer step loses what the first have added. Under FSDP2 and
    tensor parallelism gradients are sharded as their parameters are, and go on on any mesh:

        state["gradients"] = Gradients(model)

    Where every rank accumulates on its own, as under DDP's ``no_sync()``, each has its own:

        state["gradients"] = holdfast.PerRank(Gradients(model), elsewhere=Gradients.mean)

    A gradient that is not there yet is saved as zeros, and comes back as None: so a save takes the bytes of all
    gradients, also right after ``zero_grad()``. Raises Unsupported for FSDP1, and for FSDP2 while
    ``set_requires_gradient_sync(False)`` holds sums back, since torch keeps those where they cannot be had.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """By parameter name; ``absent`` names those that are None."""
        parameters = self._parameters()
        return {
            "gradients": {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
                for name, parameter in parameters.items()
            },
            "absent": [name for name, parameter in parameters.items() if parameter.grad is None],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every gradient. Raises KeyError for a parameter that the state lacks."""
        absent = set(state["absent"])
        for name, parameter in self._parameters().items():
            saved = state["gradients"][name]
            if name in absent:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = saved.to(parameter.device)
            else:
                parameter.grad.copy_(saved)

    @staticmethod
    def mean(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """What each rank gets on another world size: the mean of all, which DDP's own mean then leaves as it is."""
        first = states[0]
        return {
            "gradients": {
                name: sum(state["gradients"][name] for state in states) / len(states) for name in first["gradients"]
            },
            "absent": [name for name in first["absent"] if all(name in state["absent"] for state in states)],
        }

    def _parameters(self) -> dict[str, nn.Parameter]:
        if flat_parameters(self.module):
            raise Unsupported("FSDP1 keeps its gradients in flat ones of its own: save when an accumulation is done")
        if holds_gradients_back(self.module):
            raise Unsupported(
                "set_requires_gradient_sync(False) has left sums that torch does not hand out: save when an "
                "accumulation is done, or accumulate with gradient sync on"
            )
        named = parameter_names(self.module).values()
        return {name: parameter for name, parameter in named if parameter.requires_grad}
