"""Copies of what a rank would write for others, made while its tensors still are as they were at the save.

The policies make them before a background save is staged, and `failover` writes from them. Never outlive the save.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.stage import as_integers
from holdfast.errors import HoldfastError
from holdfast.ondisk import names
from holdfast.ondisk.box import Box
from holdfast.plan.degraded import Key, kept_by
from holdfast.plan.plan import Plan
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected
from holdfast.write.datafiles import memory_of


class Spares:
    """Copies in host memory of what this rank keeps for other ranks, for a save during which its tensors change."""

    def __init__(self) -> None:
        self._copies: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def keep(
        self, plan: Plan, state: Collected, ranks: Ranks, sections: Collection[str] | None, after: Moments
    ) -> None:
        """Copy what this rank keeps for others, of these ``sections`` (None: of all), unless that is done; waits."""
        copier = Copier(after)
        for name, box in _kept(plan, ranks):
            if (name, box) not in self._copies and (sections is None or names.section_of(name) in sections):
                tensor = memory_of(state, name, box)
                with copier.on(tensor.device):
                    same = as_integers(tensor.resolve_conj().resolve_neg())
                    copy = same.to("cpu", copy=True, memory_format=torch.contiguous_format)
                self._copies[name, box] = copy.view(tensor.dtype)

    def source(self, state: Collected, name: str, box: Box) -> torch.Tensor:
        """The copy of a piece. Raises HoldfastError if there is none."""
        copy = self._copies.get((name, box))
        if copy is None:
            raise HoldfastError(
                f"this rank was to keep a copy of {name}{box} and has none; this is a fault of holdfast"
            )
        return copy

    def clear(self) -> None:
        """Let the memory go."""
        self._copies.clear()


def _kept(plan: Plan, ranks: Ranks) -> list[Key]:
    """`kept_by`, remembered while saves follow one plan: of a million tensors it takes seconds."""
    known: tuple[Plan, list[Key]] | None = ranks.remembered.get("spares")
    if known is None or known[0] is not plan:
        known = ranks.remembered["spares"] = plan, [(name, box) for name, _, box in kept_by(plan, ranks.rank)]
    return known[1]
