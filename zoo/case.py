"""What a case of the zoo is: how to build a run of training, and what one step of it does.

The catalogues make cases; the judge builds several runs of each. A run knows nothing of checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Lay = Callable[[nn.Module], nn.Module]
"""Puts a model onto the ranks: as it is, or sharded."""


@dataclass
class Run:
    """A training run: what of it is saved, and a step. ``step(n)`` depends on ``n`` and on ``state`` alone."""

    state: dict[str, Any]
    step: Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """One row of the zoo. ``build`` makes a run; ``sharded`` says whether it makes sense on several ranks."""

    name: str
    library: str
    build: Callable[[Lay], Run]
    sharded: bool = True


def plain(model: nn.Module) -> nn.Module:
    """One process: the model as it is."""
    return model


def seed_all(seed: int) -> None:
    """Everything that a library may draw from; and the mode that a step may leave when it raises."""
    torch.set_grad_enabled(True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def built(case: Case, lay: Lay, seed: int) -> Run:
    """A fresh run of a case."""
    seed_all(seed)
    return case.build(lay)


def steps(run: Run, first: int, count: int) -> list[Any]:
    """What each of ``count`` steps gave; a step draws the same numbers whenever it is taken."""
    outcomes = []
    for number in range(first, first + count):
        seed_all(7000 + number)
        outcomes.append(run.step(number))
    return outcomes
