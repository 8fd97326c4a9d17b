"""Maps between layouts of one model: other names, other shapes, the same elements.

Give one to `holdfast.open`, `holdfast.load` or `holdfast.convert` as ``remap=``; docs/remap.md tells how to write one.
"""

from holdfast.remap.architecture import Transformers
from holdfast.remap.huggingface import transformers
from holdfast.remap.joining import Concatenate, Split, Stack, Unstack
from holdfast.remap.layouts import Cast, Crop, Flatten, Pad, PermuteBlocks, Transpose, Unflatten
from holdfast.remap.maps import megatron, torchtitan
from holdfast.remap.naming import Constant, Drop, Rename, Reorder, Tie, Untie
from holdfast.remap.proof import Proof
from holdfast.remap.remap import Remap
from holdfast.remap.rule import Rule

__all__ = [
    "Cast", "Concatenate", "Constant", "Crop", "Drop", "Flatten", "Pad", "PermuteBlocks", "Proof", "Remap", "Rename",
    "Reorder", "Rule", "Split", "Stack", "Tie", "Transformers", "Transpose", "Unflatten", "Unstack", "Untie",
    "megatron", "torchtitan", "transformers",
]  # fmt: skip
