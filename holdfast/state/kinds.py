"""torch's classes for sharded tensors and wrapped modules, recognised without importing them.

Called by the rest of this folder. A value can only be of a class whose module is loaded, so nothing here ever loads
one: torch.distributed.tensor takes longer to import than all of holdfast, and training on one GPU never needs it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.tensor import DTensor


def _loaded(module: str, name: str) -> Any:
    """The class, or what nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    return isinstance(value, _loaded("torch.distributed.tensor", "DTensor"))


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Whether ``value`` is a ShardedTensor, of which FSDP1's sharded state dicts were made."""
    return isinstance(value, _loaded("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"))


def is_flat_parameter(value: object) -> TypeGuard[FlatParameter]:
    return isinstance(value, _loaded("torch.distributed.fsdp._flat_param", "FlatParameter"))


def is_fsdp1(value: object) -> bool:
    return isinstance(value, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))


def is_checkpoint_wrapper(value: object) -> bool:
    of = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    return isinstance(value, _loaded(of, "CheckpointWrapper"))


def is_compiled(value: object) -> bool:
    """Whether ``value`` is what `torch.compile` made of a module."""
    return isinstance(value, _loaded("torch._dynamo.eval_frame", "OptimizedModule"))


def is_zero(value: object) -> bool:
    """Whether ``value`` is a ZeroRedundancyOptimizer, whose ranks each keep the state of some parameters."""
    return isinstance(value, _loaded("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"))


_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def is_fabric_module(value: object) -> bool:
    return any(isinstance(value, _loaded(of, "_FabricModule")) for of in _FABRIC)


def without_fabric(value: Any) -> Any:
    """The optimizer that Lightning Fabric has wrapped, or ``value`` itself.

    The wrapper's own `state_dict` is empty on all ranks but the first.
    """
    return value.optimizer if any(isinstance(value, _loaded(of, "_FabricOptimizer")) for of in _FABRIC) else value
