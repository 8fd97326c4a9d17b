"""What was saved at and below the path of a target: the names, and the values nested as they were.

The comparison of a load checks it, and `hand_back` hands it over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.ondisk import values
from holdfast.read.nested import nest
from holdfast.state import Saved, Target


def names_below(target: Target, saved: Saved) -> Sequence[str]:
    """The names that a target takes, of all that was saved at or below its path."""
    return target.names if target.names is not None else (target.path, *saved.below(target.path))


def leaves_of(target: Target, saved: Saved) -> list[str]:
    """What the checkpoint has of a target: values, containers, and for a whole target tensors too."""
    names = names_below(target, saved)
    held = [n for n in names if n in saved.values or (target.whole and n in saved.tensors)]
    empty = [n for n in names if n in saved.containers]
    return [*held, *empty] if held or any(saved.asked(n) for n in empty) else []


def tree_of(target: Target, saved: Saved, fresh: Mapping[str, Any], where: object) -> Any:
    """What was saved at a target, nested as it was; ``fresh`` has its tensors by name."""
    below = names_below(target, saved)
    leaves: dict[str, Any] = {}
    if target.maker is not None:
        leaves.update((name, fresh[name]) for name in below if name in fresh)
        target.maker.assemble(leaves)
    leaves.update((n, values.decoded(saved.values[n], n, where)) for n in below if n in saved.values)
    notes = {n: saved.containers[n] for n in below if n in saved.containers and n not in leaves}
    root, cut = "r", len(target.path)
    tree = nest({root + n[cut:]: v for n, v in leaves.items()}, {root + n[cut:]: note for n, note in notes.items()})
    return tree[root]
