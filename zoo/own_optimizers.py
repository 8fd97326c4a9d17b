"""Optimizers as people write them for themselves: wrappers, subclasses, hooks, state of their own.

The catalogue `zoo.optimizers` makes cases of them.
"""

from __future__ import annotations

from typing import Any

import torch


class Accumulating:
    """Steps every second time; counts in a ``state_dict()`` of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0

    def step(self) -> None:
        self.count += 1
        if self.count % 2 == 0:
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.inner.load_state_dict(state["inner"])


class Counting(torch.optim.Adam):
    """A subclass whose ``state_dict()`` has one more key."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        super().load_state_dict({k: v for k, v in state.items() if k != "count"})


class Hooked(torch.optim.Adam):
    """Its count travels in the hooks that torch has for that."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.count = 0
        self.register_state_dict_post_hook(lambda self, state: {**state, "count": self.count})
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _take(self: Any, state: dict[str, Any]) -> dict[str, Any]:
        self.count = state["count"]
        return {k: v for k, v in state.items() if k != "count"}

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count
        return super().step(closure)


class Global(torch.optim.Optimizer):
    """Keeps state beside the parameters': under a name, and lists, dicts and numbers for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        whole = self.state["whole"]
        whole["seen"] = whole.get("seen", 0) + 1
        whole["norm"] = whole.get("norm", torch.zeros(())) * 0.5 + whole["seen"]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("history", []).append(float(whole["norm"]))
                state.setdefault("tensors", [torch.zeros(3)])
                state["tensors"] = [t + len(state["history"]) for t in state["tensors"]]
                state["nested"] = {"a": {"b": sum(state["history"])}, 0: (1, "x")}
                scale = state["nested"]["a"]["b"] + float(state["tensors"][0].sum())
                parameter.add_(parameter.grad, alpha=-group["lr"] / (1 + scale))


class Float8(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits, with a scale."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            old = state["q"].float() * state["scale"] if "q" in state else torch.zeros_like(parameter)
            new = old * 0.9 + parameter.grad
            state["scale"] = new.abs().max().clamp(min=1e-8) / 400
            state["q"] = (new / state["scale"]).to(torch.float8_e4m3fn)
            parameter.sub_(new * self.param_groups[0]["lr"])
