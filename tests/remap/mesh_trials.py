"""What the ranks of a pool do for tests of maps: the two layouts of one model on meshes, loaded and compared.

Gradients are a tenth of the parameters, and nothing is learned: each moment follows from its parameter's elements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.meshes import _full, _plain
from tests.read.share_trials import eager
from tests.remap import models
from tests.remap.models import HUB_TO_NATIVE, Hub, Native, translated

warnings.filterwarnings("ignore")

State = dict[str, torch.Tensor]

SMALL: dict[str, int] = {}
WIDE = {"WIDTH": 2304, "HIDDEN": 256, "VOCABULARY": 501, "LAYERS": 1}
"""Rows so long that half a row is farther from the next half than what is read through."""


def _mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "ep")[: len(sizes)])


def _fsdp2(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(model: nn.Module) -> nn.Module:
    return _fsdp2(model, _mesh(dist.get_world_size()))


def hsdp(model: nn.Module) -> nn.Module:
    return _fsdp2(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})


def fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = _mesh(dist.get_world_size() // 2, 2)
    _tensor_parallel(model, mesh["tp"])
    return _fsdp2(model, mesh["dp"])


def fsdp_tp_ep(model: nn.Module) -> nn.Module:
    """Experts lie over the ranks of tensor parallelism, and FSDP cuts each of them on another axis."""
    mesh = _mesh(dist.get_world_size() // 2, 2)
    _tensor_parallel(model, mesh["tp"])
    for layer in model.layers:
        for name, parameter in [*layer.experts.named_parameters()]:
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])))
        fully_shard(layer.experts, mesh=mesh["dp"], shard_placement_fn=lambda parameter: Shard(1))
    return _fsdp2(model, mesh["dp"])


def fsdp1(model: nn.Module) -> nn.Module:
    return FSDP1(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_flat(model: nn.Module) -> nn.Module:
    return FSDP1(model, use_orig_params=False, device_id=torch.device("cpu"))


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {
    "one process": (1, lambda model: model),
    "FSDP2 2": (2, fsdp2),
    "FSDP2 3": (3, fsdp2),
    "FSDP2 4": (4, fsdp2),
    "FSDP2 x TP 2x2": (4, fsdp_tp),
    "FSDP2 x TP x EP 2x2": (4, fsdp_tp_ep),
    "FSDP1 2": (2, fsdp1),
    "FSDP1 flat 2": (2, fsdp1_flat),
    "DDP 2": (2, DistributedDataParallel),
    "HSDP 2x2": (4, hsdp),
}


@contextmanager
def sized(sizes: dict[str, int]) -> Iterator[None]:
    with patch.multiple(models, **sizes) if sizes else nullcontext():
        yield


def map_of(kind: str, sizes: dict[str, int]) -> holdfast.remap.Remap:
    """The map into the layout of that kind."""
    to_native = holdfast.remap.Remap(HUB_TO_NATIVE.rules, {"heads": models.HEADS, "width": sizes.get("WIDTH", 32)})
    return to_native if kind == "Native" else to_native.inverse()


def build(kind: str, layout: str, seed: int, *, trained: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = LAYOUTS[layout][1](Native() if kind == "Native" else Hub())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    if trained:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1 if parameter.numel() else None
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


def full_of(state: dict[str, Any]) -> State:
    """The model's tensors by plain names, gathered."""
    model = state["model"]
    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, writeback=False):
            return {_plain(name): tensor.detach().clone() for name, tensor in model.named_parameters()}
    return {_plain(name): _full(tensor) for name, tensor in model.state_dict().items()}


def moment_faults(state: dict[str, Any]) -> list[str]:
    """Parameters whose moments are not what follows from them."""
    wrong = []
    for parameter, entry in state["optim"].state.items():
        if not parameter.numel():
            continue
        gradient = parameter.detach() * 0.1
        first = torch.lerp(torch.zeros_like(gradient), gradient, 0.1)
        second = torch.zeros_like(gradient).addcmul_(gradient, gradient, value=1 - 0.999)
        good = torch.equal(_local(entry["exp_avg"]), _local(first))
        good = good and torch.equal(_local(entry["exp_avg_sq"]), _local(second)) and float(entry["step"]) == 1
        wrong += [] if good and entry["exp_avg"].shape == parameter.shape else [f"{list(parameter.shape)}"]
    return wrong


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards, as torch has them."""
    return sum(_local(parameter.detach()).nbytes for parameter in model.parameters())


def save(kind: str, layout: str, path: str, truth: str, sizes: dict[str, int]) -> None:
    """Save a trained model in one layout, and what torch says it is."""
    with sized(sizes):
        state = build(kind, layout, 7, trained=True)
        full = full_of(state)
        holdfast.save({**state, "step": 7}, path)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(full, truth)


def load(
    kind: str, layout: str, path: str, truth: str, sizes: dict[str, int], options: dict[str, Any], shared: bool = False
) -> tuple[list[str], dict[str, int]]:
    """Load under the map what has the other layout; what differs, and the bytes that it took."""
    with sized(sizes), eager() if shared else nullcontext():
        expected = load_file(truth) if truth.endswith(".safetensors") else torch.load(truth, weights_only=True)
        trained = Path(path, "manifest.json").exists() and options.get("only") != "model"
        state = build(kind, layout, 100, trained=trained)
        into = {**state, "step": 0} if trained else {"model": state["model"]}
        loaded = holdfast.load(path, into, remap=map_of(kind, sizes), **options)
        wanted = translated(expected) if kind == "Native" else expected
        full = full_of(state)
        if kind == "Hub":
            full = translated(full)
        wrong = [n for n in wanted if n != "head.weight" and not torch.equal(full.get(n, torch.empty(0)), wanted[n])]
        wrong += moment_faults(state) if trained else []
        sizes_of = {"needed": loaded.bytes_needed, "read": loaded.bytes_read, "received": loaded.bytes_received}
        return wrong, sizes_of | {"own": own_bytes(state["model"])}
