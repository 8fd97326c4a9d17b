"""The model and optimizer of a recipe on a mesh, by torch alone, and full values laid out as torch lays them out.

Gradients are made up, a number for each element of each name and step, so that no layout changes a bit of them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.any_state.recipe import OPTIMIZERS, Leaf, Recipe


class Refused(Exception):
    """torch itself cannot lay this state out like this."""


def build(recipe: Recipe, layout: str, values: dict[str, torch.Tensor] | None = None, seed: int = 0) -> nn.Module:
    """The model of a recipe on a layout, with these full values, or random ones."""
    torch.manual_seed(recipe.seed * 7 + seed)
    root = nn.Module()
    made: dict[str, nn.Parameter] = {}
    for leaf in recipe.leaves:
        owner = _owner(root, leaf.name)
        key = leaf.name.rpartition(".")[2]
        if leaf.tied:
            owner.register_parameter(key, made[leaf.tied])
            continue
        value = _random(leaf) if values is None or leaf.name not in values else values[leaf.name].clone()
        if leaf.kind in ("parameter", "frozen"):
            made[leaf.name] = nn.Parameter(value, requires_grad=leaf.kind == "parameter")
            owner.register_parameter(key, made[leaf.name])
        else:
            owner.register_buffer(key, value, persistent=leaf.kind == "buffer")
    why, model = "", root
    try:
        model = _LAYOUTS[layout](root, recipe)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        why = f"{layout}: {type(error).__name__}: {error}"
    if dist.is_initialized():  # torch may refuse on one rank alone
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, why)
        why = next(filter(None, everyone), "")
    if why:
        raise Refused(why)
    return model


def _owner(root: nn.Module, name: str) -> nn.Module:
    for key in name.split(".")[:-1]:
        if key not in root._modules:
            root.add_module(key, nn.Module())
        root = root._modules[key]
    return root


def _random(leaf: Leaf) -> torch.Tensor:
    return (
        (torch.randn(leaf.shape) * 3).abs().to(leaf.dtype)
        if leaf.kind in ("buffer", "scratch")
        else torch.randn(leaf.shape).to(leaf.dtype)
    )


def _one(model: nn.Module, recipe: Recipe) -> nn.Module:
    return model


def _ddp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return DistributedDataParallel(model)


def _shard(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> nn.Module:
    for block in recipe.blocks:
        fully_shard(model.get_submodule(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _shard(model, recipe, init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _shard(model, recipe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))


def _tensor_parallel(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _distributed(model, recipe, init_device_mesh("cpu", (dist.get_world_size(),)))


def _two_dimensional(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _distributed(model, recipe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def _fsdp_tp(model: nn.Module, recipe: Recipe) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _shard(_distributed(model, recipe, mesh["tp"], under_fsdp=True), recipe, mesh["dp"])


def _distributed(model: nn.Module, recipe: Recipe, mesh: DeviceMesh, *, under_fsdp: bool = False) -> nn.Module:
    """Each parameter a DTensor with placements of its own, uneven or with nothing on some ranks.

    What FSDP2 cuts once more is cut with more care: torch cannot gather strided shards that are uneven or empty.
    """
    placed: dict[int, nn.Parameter] = {}
    for leaf in recipe.leaves:
        if leaf.kind not in ("parameter", "frozen"):
            continue
        owner, key = _owner(model, leaf.name), leaf.name.rpartition(".")[2]
        old = owner._parameters[key]
        if id(old) not in placed:
            chance = random.Random(f"{recipe.seed}/{leaf.name}/{mesh.ndim}")
            dims = range(old.dim())
            if under_fsdp:
                dims = [d for d, size in enumerate(old.shape) if (size % 4 == 0 if d == 0 else size >= mesh.size())]
            ways = [Replicate(), *(Shard(d) for d in dims)]
            where = [chance.choice(ways) for _ in range(mesh.ndim)]
            new = distribute_tensor(old.detach(), mesh, where, src_data_rank=None)
            placed[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
        owner._parameters[key] = placed[id(old)]
    return model


_LAYOUTS: dict[str, Callable[[nn.Module, Recipe], nn.Module]] = {
    "one process": _one, "DDP 2": _ddp, "FSDP2 2": _fsdp, "FSDP2 3": _fsdp, "FSDP2 4": _fsdp, "HSDP 2x2": _hsdp,
    "TP 2": _tensor_parallel, "TP 3": _tensor_parallel, "DTensors 2x2": _two_dimensional, "FSDP2 x TP 2x2": _fsdp_tp,
}  # fmt: skip


@dataclass
class Trainer:
    """What is saved of a trial, and how it steps."""

    recipe: Recipe
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    extra: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        wrapped = torch.compile(self.model, backend="eager") if self.recipe.wrapped == "compiled" else self.model
        optimizer = self.optimizers if self.recipe.split else self.optimizers[0]
        return {"model": wrapped, "optimizer": optimizer, "extra": self.extra}

    def named(self) -> Iterator[tuple[Leaf, torch.Tensor]]:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        for leaf in self.recipe.leaves:
            owner, key = _owner(inner, leaf.name), leaf.name.rpartition(".")[2]
            yield leaf, getattr(owner, key)

    def step(self, number: int) -> None:
        for leaf, tensor in self.named():
            if leaf.kind == "parameter" and not leaf.tied:
                tensor.grad = alike(_gradient(leaf, number), tensor)
            elif leaf.kind in ("buffer", "scratch") and leaf.dtype in (torch.float32, torch.int64):
                tensor += number
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.extra["count"] += 1
        self.extra["nested"][0]["tensor"] += number


def trainer(
    recipe: Recipe, layout: str, values: dict[str, torch.Tensor] | None = None, *, seed: int = 0, turned: bool = False
) -> Trainer:
    """A trainer on a layout; ``turned`` has its groups, and the parameters in them, in another order."""
    model = build(recipe, layout, values, seed)
    made = Trainer(
        recipe, model, [], {"count": seed, "nested": [{"tensor": torch.full((3,), float(seed))}, "text"], "none": None}
    )
    of = {leaf.name: tensor for leaf, tensor in made.named()}
    groups = [
        {"params": [of[name] for name in group], "lr": 0.01 * (index + 1 + seed)}
        for index, group in enumerate(recipe.groups)
    ]
    if turned and not recipe.split:
        groups = [{**group, "params": group["params"][::-1]} for group in reversed(groups)]
    make = OPTIMIZERS[recipe.optimizer]
    made.optimizers = [make([group]) for group in groups] if recipe.split else [make(groups)]
    return made


def _gradient(leaf: Leaf, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{leaf.name}/{number}".encode()))
    return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)


def alike(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This full value, laid out as a tensor is."""
    if not isinstance(tensor, DTensor):
        return full.clone()
    made = torch.empty_like(tensor.detach(), dtype=full.dtype)
    assert made.placements == tensor.placements
    index = _indices(tensor)
    made.to_local().copy_(full.reshape(-1)[index.reshape(-1)].reshape(index.shape))
    return made


_known: dict[Any, torch.Tensor] = {}


def _indices(tensor: DTensor) -> torch.Tensor:
    """Which elements of the whole this rank has, as torch tells it: by gathering ranks and positions laid out alike."""
    mesh, order = tensor.device_mesh.mesh, getattr(tensor._spec, "shard_order", None)
    key = (tuple(tensor.shape), tuple(tensor.placements), str(order), tuple(mesh.flatten().tolist()), tuple(mesh.shape))
    if key not in _known:
        positions, owners = (torch.empty_like(tensor.detach(), dtype=torch.int64) for _ in range(2))
        here = positions.to_local()
        here.copy_(torch.arange(here.numel()).reshape(here.shape))
        owners.to_local().fill_(dist.get_rank())
        own = owners.full_tensor() == dist.get_rank()
        found = torch.empty(here.numel(), dtype=torch.int64)
        found[positions.full_tensor()[own]] = torch.arange(tensor.numel()).reshape(tensor.shape)[own]
        _known[key] = found.reshape(here.shape)
    return _known[key]
