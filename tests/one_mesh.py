"""One mesh for each shape and names in a rank of a pool: imported first there, `init_device_mesh` is this one.

Each process group of gloo has a thread that wakes up a hundred times a second, and meshes are never taken down: with
new ones for each test, ranks that wait took a third of the machine.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

_new = device_mesh.init_device_mesh
_meshes: dict[Any, Any] = {}


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None, **more: Any
) -> Any:
    """The mesh that was made for these arguments before, in the same world."""
    if more or not dist.is_initialized():
        return _new(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **more)
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    key = device_type, tuple(mesh_shape), names, dist.group.WORLD
    if key not in _meshes:
        _meshes[key] = _new(device_type, mesh_shape, mesh_dim_names=names)
    return _meshes[key]


device_mesh.init_device_mesh = dist.init_device_mesh = init_device_mesh
