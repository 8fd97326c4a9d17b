"""Optimizers of other libraries: every class that a library has, with the arguments that it cannot do without.

`zoo.__main__` collects `cases`. A library that is not installed, or a class that it has no more, makes no cases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo import training
from zoo.case import Case
from zoo.training import named, trained

_OF_MODEL = "model"
_NAMED = "named"

LIBRARIES: dict[str, tuple[str, dict[str, Any], frozenset[str]]] = {
    "torchao": ("torchao.optim", {"lr": 0.01}, frozenset({"CPUOffloadOptimizer", "_AdamW"})),
    "bitsandbytes": ("bitsandbytes.optim", {"lr": 0.01}, frozenset()),
    "pytorch_optimizer": ("pytorch_optimizer", {"lr": 0.01}, frozenset()),
    "schedulefree": ("schedulefree", {"lr": 0.01}, frozenset()),
    "prodigyopt": ("prodigyopt", {"lr": 1.0}, frozenset()),
    "heavyball": ("heavyball", {"lr": 0.01}, frozenset()),
    "lion_pytorch": ("lion_pytorch", {"lr": 0.01}, frozenset()),
    "adam_mini": ("adam_mini", {"lr": 0.01}, frozenset()),
    "torch_optimizer": ("torch_optimizer", {"lr": 0.01}, frozenset()),
    "pytorch_ranger": ("pytorch_ranger", {"lr": 0.01}, frozenset()),
    "came_pytorch": ("came_pytorch", {"lr": 0.01}, frozenset()),
    "dadaptation": ("dadaptation", {"lr": 1.0}, frozenset()),
    "madgrad": ("madgrad", {"lr": 0.01}, frozenset()),
    "adan_pytorch": ("adan_pytorch", {"lr": 0.01}, frozenset()),
    "galore_torch": ("galore_torch", {"lr": 0.01}, frozenset()),
    "apollo_torch": ("apollo_torch", {"lr": 0.01}, frozenset()),
    "adam_atan2_pytorch": ("adam_atan2_pytorch", {"lr": 0.01}, frozenset()),
    "adabelief_pytorch": ("adabelief_pytorch", {"lr": 0.01}, frozenset()),
    "muon_fsdp2": ("muon_fsdp2", {"lr": 0.01}, frozenset()),
    "muon": ("muon", {"lr": 0.01}, frozenset()),
    "optimi": ("optimi", {"lr": 0.01}, frozenset()),
    "torchastic": ("torchastic", {"lr": 0.01}, frozenset()),
    "kron_torch": ("kron_torch", {"lr": 0.01}, frozenset()),
    "sgd_sai": ("sgd_sai", {"lr": 0.01}, frozenset()),
    "grokadamw": ("grokadamw", {"lr": 0.01}, frozenset()),
    "lomo_optim": ("lomo_optim", {"lr": 0.01}, frozenset()),
    "transformers": ("transformers.optimization", {"lr": 0.01}, frozenset()),
}
"""By the name that rows are given: the module, the arguments of all of its optimizers, and the classes left out."""


def cases() -> Iterator[Case]:
    """All optimizers of all libraries that are here."""
    for library, (module, options, left_out) in LIBRARIES.items():
        found = module_of(module)
        for name in sorted(vars(found)) if found is not None else ():
            kind = getattr(found, name)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind.__module__.split(".")[0] != "torch" and name not in left_out:
                yield Case(f"{library}: {name}", library, _build(kind, options))


def module_of(name: str) -> Any:
    """The module, or None where its library is not installed."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def _build(kind: type, options: dict[str, Any]) -> Callable[..., Any]:
    make: Callable[[nn.Module], Any] = lambda model: kind(trained(model), **options)  # noqa: E731
    return lambda lay: training.training(make, lay)


_ = named
