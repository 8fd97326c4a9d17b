"""A training state as leaves: the only room that knows torch's tensor kinds, modules and optimizers.

`save` and `load` call `collect`; nothing after it knows what a DTensor is.
Never moves bytes, never talks to other ranks.
"""

from holdfast.engine.state.leaves import Collected, Entry, Group, Saved, Slot
from holdfast.engine.state.per_rank import RNG, PerRank
from holdfast.engine.state.recall import Recall
from holdfast.engine.state.stepped import claim, extent, memory_of, note, plain_parts, tensors_of
from holdfast.engine.state.tensors import FlatShard, Shard
from holdfast.engine.state.walk import collect

__all__ = [
    "RNG",
    "Collected",
    "Entry",
    "FlatShard",
    "Group",
    "PerRank",
    "Recall",
    "Saved",
    "Shard",
    "Slot",
    "claim",
    "collect",
    "extent",
    "memory_of",
    "note",
    "plain_parts",
    "tensors_of",
]
