"""Modules that take part in their own state dict: hooks, extra state, methods of their own.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zoo.case import Case
from zoo.modules import case, features


class Counting(nn.Module):
    """A base: a layer, and a count that changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) * (1 + 0.1 * self.count)


class ExtraNumber(Counting):
    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


class ExtraTensor(ExtraNumber):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


class ExtraTree(ExtraNumber):
    def get_extra_state(self) -> Any:
        return {
            "count": self.count,
            "tensors": [torch.full((2,), float(self.count))],
            "by": {0: (1, "x")},
            "none": None,
        }

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert type(state["tensors"]) is list and int(state["tensors"][0][0]) == self.count
        assert state["by"] == {0: (1, "x")} and state["none"] is None


class ExtraBytes(ExtraNumber):
    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(str(self.count).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(bytes(state.tolist()).decode())


class ExtraOfOtherShape(ExtraNumber):
    """Its extra state is a tensor that grows."""

    def get_extra_state(self) -> Any:
        return torch.ones(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = len(state)


class ExtraObject(ExtraNumber):
    def get_extra_state(self) -> Any:
        return {"names": {"a", "b"}, "count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class SavesMore(Counting):
    """Writes a key in ``_save_to_state_dict``, takes it in ``_load_from_state_dict``."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = torch.tensor(self.count)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.count = int(state_dict.pop(prefix + "count"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SavesLess(Counting):
    """Leaves its bias out; it is made from the weight when that is loaded."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self._leave_out)
        self._register_load_state_dict_pre_hook(self._put_in)

    @staticmethod
    def _leave_out(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        del state[prefix + "layer.bias"]

    def _put_in(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "layer.bias"] = state[prefix + "layer.weight"].sum(1)
        self.count = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Renames(nn.Module):
    """Its state dict has other names than its parameters, by hooks that turn them round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self._register_state_dict_hook(self._out)
        self._register_load_state_dict_pre_hook(self._in)

    @staticmethod
    def _out(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for key in [k for k in state if k.startswith(prefix + "layer.")]:
            state[prefix + "old." + key.removeprefix(prefix + "layer.")] = state.pop(key)

    @staticmethod
    def _in(state: Any, prefix: str, *rest: Any) -> None:
        for key in [k for k in state if k.startswith(prefix + "old.")]:
            state[prefix + "layer." + key.removeprefix(prefix + "old.")] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Transposes(nn.Module):
    """Keeps its weight the other way round in its state dict, as some fused layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"].t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class SplitsFused(nn.Module):
    """One fused parameter, saved as two."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(10, 6))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "up"], destination[prefix + "down"] = self.fused.detach().chunk(2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.fused.copy_(torch.cat([state_dict[prefix + "up"], state_dict[prefix + "down"]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.fused)


class OwnMethods(Counting):
    """``state_dict`` and ``load_state_dict`` of its own, at the top."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"weights": super().state_dict(*args, **kwargs), "count": self.count}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.count = state_dict["count"]
        return super().load_state_dict(state_dict["weights"], *args, **kwargs)


class OwnFlatMethods(Counting):
    """The same, but the count is one more tensor among the others."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict = dict(state_dict)
        self.count = int(state_dict.pop("count"))
        return super().load_state_dict(state_dict, *args, **kwargs)


class OnlyTrained(nn.Module):
    """Keeps its trained part alone, as adapters do; the base is the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(30.0).view(5, 6) / 30
        self.base = nn.Parameter(base, requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(5, 6))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "adapter" in k}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict, strict=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.base + self.adapter)


class Deaf(Counting):
    """Its ``load_state_dict`` takes nothing: what was saved does not arrive."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return None


class Refusing(nn.Module):
    """Has a child whose ``set_extra_state`` raises, after its parameters were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = _Raises()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class _Raises(ExtraNumber):
    def set_extra_state(self, state: Any) -> None:
        raise ValueError("this state is of another version")


class Afterwards(Counting):
    """Works out a cache after a load, in a hook; the cache is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", self.layer.weight.detach().sum(1), persistent=False)
        self.register_load_state_dict_post_hook(self._recompute)

    @staticmethod
    def _recompute(module: Any, incompatible: Any) -> None:
        module.cache.copy_(module.layer.weight.detach().sum(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.cache
        self.cache = self.layer.weight.detach().sum(1)
        return out


class Before(Counting):
    """Writes its count into a buffer when it is asked for its state, and reads it after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.kept.fill_(module.count))
        self.register_load_state_dict_post_hook(self._read)

    @staticmethod
    def _read(module: Any, incompatible: Any) -> None:
        module.count = int(module.kept)


class Versioned(Counting):
    """Looks at the version that travels in the metadata of its state dict."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        self.count = 3 if local_metadata.get("version") == 2 else 100


def cases() -> Iterator[Case]:
    """All of them."""
    rows = features(4, 6)
    for name, kind in {
        "an attribute that no state dict has": Counting, "a number as extra state": ExtraNumber,
        "a tensor as extra state": ExtraTensor, "a tree as extra state": ExtraTree, "bytes as extra state": ExtraBytes,
        "a tensor that grows as extra state": ExtraOfOtherShape, "a set as extra state": ExtraObject,
        "one more key by _save_to_state_dict": SavesMore, "a key left out by hooks": SavesLess,
        "other names by hooks": Renames, "a transposed weight in the state dict": Transposes,
        "one parameter saved as two": SplitsFused, "a state_dict of its own, nested": OwnMethods,
        "a state_dict of its own, with one more tensor": OwnFlatMethods,
        "a state_dict of the trained part alone": OnlyTrained, "a load_state_dict that takes nothing": Deaf,
        "a child that refuses its extra state": Refusing, "a cache worked out after a load": Afterwards,
        "a buffer written before a save": Before, "a version in the metadata": Versioned,
    }.items():  # fmt: skip
        yield case(name, kind, rows)
        if kind in (OwnMethods, OwnFlatMethods, Renames, ExtraTree, SavesMore, Transposes, OnlyTrained, Deaf):
            yield case(f"{name}, of a child", lambda kind=kind: nn.Sequential(nn.Linear(6, 6), kind()), rows)
    yield case(
        "a nest of modules in the state",
        lambda: nn.Linear(6, 5),
        rows,
        more=lambda m: {"others": {"a": ExtraNumber(), "b": [nn.Linear(2, 2)]}},
    )
