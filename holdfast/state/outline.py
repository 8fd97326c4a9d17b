"""What a rank sends the others of its collected state: its layout, and the values that they may lack.

Called before the ranks agree on a plan. Never talks to another rank itself.
"""

from __future__ import annotations

from holdfast.ondisk.values import version_of_tree
from holdfast.plan.layout import Layout, OwnedValues, TensorLayout, digest_of
from holdfast.plan.spread import Spread
from holdfast.state.leaves import Collected


def layout_of(state: Collected) -> Layout:
    """The layout of a collected state."""
    table: dict[int, int] = {}
    spreads: list[Spread] = []
    known: dict[Spread, int] = {}
    tensors = []
    for entry in state.entries.values():
        index = table.get(id(entry.spread))
        if index is None:
            index = known.setdefault(entry.spread, len(spreads))
            if index == len(spreads):
                spreads.append(entry.spread)
            table[id(entry.spread)] = index
        alias = state.aliases.get(entry.name)
        empty = not entry.views and 0 not in entry.shape
        # A rank without elements leaves this to others, so that its layout equals that of its mesh neighbours.
        lone = empty and alias is None
        buffer = entry.name in state.changes.buffers
        tensors.append(TensorLayout(entry.name, entry.dtype, entry.shape, index, alias, lone, buffer))
    unheld = {a: n for a, n in state.aliases.items() if a not in state.entries}
    params = {path: [g.params for g in groups] for path, groups in state.groups.items()}
    version = max((version_of_tree(leaf.encoded) for leaf in state.per_rank.values()), default=1)
    return Layout(tensors, spreads, unheld, dict(state.containers), list(state.per_rank), params, version)


def owned_digest(state: Collected) -> str:
    """A digest of the owned values and of the parameters of each group: pipeline stages may differ in either."""
    return digest_of([owned_values(state), {path: [g.params for g in groups] for path, groups in state.groups.items()}])


def owned_values(state: Collected) -> OwnedValues:
    """The values that may be missing on other ranks."""
    settings = {path: [g.settings for g in groups] for path, groups in state.groups.items()}
    return OwnedValues(dict(state.owned), settings)
