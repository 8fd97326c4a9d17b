"""The planner of torch.distributed.checkpoint on the same state and ranks, its coordinator's work included.

Called by the simulator for as many ranks as time allows. One process stands for all ranks: DTensors on the meta device
and a process group that sends nothing; only the mesh's idea of which rank asks is changed from one to the next.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale_states import World
from holdfast.buffers.memory import no_collection
from holdfast.ondisk.dtypes import torch_dtype
from holdfast.plan.spread import coordinate


@dataclass
class DcpCost:
    """CPU seconds of one rank's local plan and of the global plan; bytes of a rank's plan and of the metadata."""

    local_s: float
    global_s: float
    plan_bytes: int
    metadata_bytes: int


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _state(world: World, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for parameter in world.model.parameters:
        spread = world.sharding.placed(parameter, 0)
        placements = [Replicate() if split is None else Shard(split.dim) for split in spread.splits]
        shape = parameter.shape
        lengths = world.sharding.extents(parameter, 0)
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))

        def sharded(dtype: torch.dtype) -> DTensor:
            local = torch.empty(lengths, dtype=dtype, device="meta")
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

        at = f"optimizer.state.{parameter.name}"
        found[f"model.{parameter.name}"] = sharded(torch_dtype(world.model.dtype))
        found[f"{at}.step"] = torch.tensor(1.0)
        found[f"{at}.exp_avg"], found[f"{at}.exp_avg_sq"] = sharded(torch.float32), sharded(torch.float32)
    return found


def plan(world: World) -> DcpCost:
    """Every rank's plan, one after the other, and what the coordinator makes of them; FSDP or HSDP alone."""
    sharding = world.sharding
    spread = sharding.placed(world.model.parameters[0], 0)
    with _fake_group(sharding.world), no_collection():
        mesh = init_device_mesh("cpu", spread.shape)
        state = _state(world, mesh)
        plans, local = [], []
        for rank in range(sharding.world):
            mesh._coordinate_on_dim = coordinate(spread.shape, rank)  # type: ignore[assignment]
            planner: Any = DefaultSavePlanner()
            planner.set_up_planner(state, is_coordinator=rank == 0)
            began = process_time()
            plans.append(planner.create_local_plan())
            local.append(process_time() - began)
            if rank == 0:
                coordinator = planner
        began = process_time()
        _, metadata = coordinator.create_global_plan(plans)
        took = process_time() - began
        found = DcpCost(sorted(local)[len(local) // 2], took, len(pickle.dumps(plans[0])), len(pickle.dumps(metadata)))
        del plans, metadata, coordinator, planner
    gc.collect()
    return found
