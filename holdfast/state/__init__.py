"""A training state as leaves: the only room that knows torch's kinds of tensors, modules and optimizers.

`save` and `load` call `collect`; nothing after it knows what a DTensor is. What becomes of each kind of object is in
`table`. Never moves bytes and never talks to other ranks.
"""

from holdfast.state.leaves import Collected, Entry, Group, Saved, Target
from holdfast.state.per_rank import RNG, PerRank
from holdfast.state.recall import Recall
from holdfast.state.stepped import claim, extent, memory_of, note, plain_parts, tensors_of
from holdfast.state.table import collect
from holdfast.state.tensors import FlatShard, Shard

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
    "Target",
    "claim",
    "collect",
    "extent",
    "memory_of",
    "note",
    "plain_parts",
    "tensors_of",
]
