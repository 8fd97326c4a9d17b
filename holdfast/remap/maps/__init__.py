"""Maps from the tensors of a hub folder to other frameworks' models, as tables of rules.

`holdfast.remap` exports them. Never reads a tensor.
"""

from holdfast.remap.maps.to_megatron import megatron
from holdfast.remap.maps.to_torchtitan import torchtitan

__all__ = ["megatron", "torchtitan"]
