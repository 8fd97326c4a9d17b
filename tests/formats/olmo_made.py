"""OLMo's checkpoints of any world size, made in one process: torch's FSDP1 and ShardedTensor over a group that is none.

`test_olmo` writes with these. What torch lays out itself (flat parameters, shards) is torch's here too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""For each block (``""`` is the root) the shapes of its parameters."""


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))


def model_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same module each time: parameters ``p0``, … at the root, and one block for each other name."""
    torch.manual_seed(len(shapes))
    root = Block(shapes.get("", ()), dtype)
    for name, inner in shapes.items():
        if name:
            root.add_module(name, Block(inner, dtype))
    return root


def optimizer_truth(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """State of every parameter, whole."""
    torch.manual_seed(1)
    return {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(p.shape), "grad_norm_exp_avg": torch.tensor(0.25)}
        for name, p in model.named_parameters()
    }


def save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def trainer(rank: int, world: int, step: int = 5) -> dict[str, Any]:
    """A trainer's state as OLMo keeps it; random streams differ by rank."""
    return {
        "epoch": 1, "global_step": step, "world_size": world, "checkpoints": [Path("runs/step2")],
        "rng": {"python": (3, (*range(rank, rank + 9),), None), "torch": torch.full((9,), rank % 256).byte()},
    }  # fmt: skip


def write_local(folder: Path, shapes: Shapes, world: int, *, old: bool = False, dtype: torch.dtype) -> None:
    """What LocalShardedCheckpointer writes: flat parameters of FSDP1, or (``old``) as torch 2.0 laid them out."""
    truth = optimizer_truth(model_of(shapes))
    names = list(truth)
    for rank in range(world):
        modules = _old_modules(shapes, rank, world, dtype) if old else _modules(shapes, rank, world, dtype)
        held = _pieces(modules)
        state = {}
        for i, name in enumerate(names):
            state[i] = {"grad_norm_exp_avg": truth[name]["grad_norm_exp_avg"].clone()}
            if name in held:
                start, numel = held[name]
                piece = truth[name]["exp_avg"].flatten()[start : start + numel].clone()
                state[i] |= {"step": truth[name]["step"].clone(), "exp_avg": piece}
        groups = [
            {
                "lr": 0.1 * (half + 1),
                "params": [names.index(n) for n in part],
                "param_names": [_wrapped(n) for n in part],
            }
            for half, part in enumerate((names[::2], names[1::2]))
        ]
        save({"modules": modules}, folder / "model" / f"rank{rank}.pt")
        save({"state": state, "param_groups": groups}, folder / "optim" / f"rank{rank}.pt")
        save(trainer(rank, world), folder / "train" / f"rank{rank}.pt")
    (folder / "metadata.yaml").write_text(f"world_size: {world}\n")
    (folder / "config.yaml").write_text("run_name: made\n")


def _wrapped(name: str) -> str:
    return "_fsdp_wrapped_module." + name.replace(".", "._fsdp_wrapped_module.")


_KEPT = ("_fqns", "_shard_param_offsets", "_shard_indices", "_numels", "_numels_with_padding", "_shapes",
         "_shard_numel_padded", "_shard_param_infos")  # fmt: skip


def _modules(shapes: Shapes, rank: int, world: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    with rank_of(rank, world):
        wrapped = FullyShardedDataParallel(
            model_of(shapes, dtype), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        found = []
        for name, module in wrapped.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                handles = []
                if module._handle is not None:
                    flat = module._handle.flat_param
                    kept = {f"flat_param.{key}": getattr(flat, key) for key in _KEPT if hasattr(flat, key)}
                    handles.append({"flat_param.data": flat.detach().clone(), **kept})
                found.append({"handles": handles, "name": name})
        return found


def _old_modules(shapes: Shapes, rank: int, world: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    model = model_of(shapes, dtype)
    for block, inner in shapes.items():
        module = model.get_submodule(block)
        data = torch.cat([p.detach().flatten() for p in module.parameters(recurse=False)]) if inner else torch.empty(0)
        numels = [prod(shape) for shape in inner]
        size = -(-data.numel() // world)
        begin, end = size * rank, size * (rank + 1)
        mine = data[begin:end]
        spans, where = [], []
        for i, (start, stop) in enumerate(zip([0, *accumulate(numels)], accumulate(numels), strict=False)):
            if max(begin, start) < min(end, stop):
                spans.append((max(begin - start, 0), min(stop, end) - start - 1))
                where.append(i)
        handle = {
            "flat_param.data": torch.cat([mine, torch.zeros(size - mine.numel(), dtype=mine.dtype)]),
            "flat_param._fqns": [f"p{i}" for i in range(len(inner))],
            "flat_param._numels": tuple(numels),
            "flat_param._shapes": [torch.Size(shape) for shape in inner],
            "flat_param._shard_numel_padded": size - mine.numel(),
            "flat_param._shard_param_offsets": tuple(spans),
            "flat_param._shard_indices": (where[0], where[-1]) if where else (0, 0),
        }
        found.append({"handles": [handle] if inner else [], "name": f"_fsdp_wrapped_module.{block}" if block else ""})
    return found


def _pieces(modules: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """What a rank holds of each parameter, for the optimizer's state: as torch's own shard tables say."""
    held = {}
    for module in modules:
        block = module["name"].replace("_fsdp_wrapped_module.", "")
        for handle in module["handles"]:
            names = [f"{block}.{n}".lstrip(".") for n in handle["flat_param._fqns"]]
            if "flat_param._shard_param_infos" in handle:
                infos = zip(names, handle["flat_param._shard_param_infos"], strict=True)
                held.update({n: (i.intra_param_start_idx, i.numel_in_shard) for n, i in infos if i.in_shard})
            else:
                spans = handle["flat_param._shard_param_offsets"]
                names = names[handle["flat_param._shard_indices"][0] :][: len(spans)]
                held.update({n: (a, b - a + 1) for n, (a, b) in zip(names, spans, strict=True)})
    return held


def write_legacy(folder: Path, tensors: Mapping[str, torch.Tensor], world: int) -> None:
    """What TorchLegacyShardedCheckpointer writes: torch's own ShardedTensors, the step as a tensor of each rank."""
    for rank in range(world):
        with rank_of(rank, world):
            save(legacy_state(tensors, rank, world), folder / f"rank{rank}.pt")
    (folder / "config.yaml").write_text("run_name: made\n")


def legacy_state(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> dict[str, Any]:
    """One rank's file; the optimizer's ``exp_avg`` is the parameter plus one."""

    def shard(tensor: torch.Tensor) -> ShardedTensor:
        return _create_chunk_sharded_tensor(tensor, rank, world, 1, dist.group.WORLD, torch.device("cpu"))

    groups = [{"lr": 0.1, "params": list(tensors), "param_names": [_wrapped(n) for n in tensors]}]
    return {
        "model": {**{name: shard(t) for name, t in tensors.items()}, "seen": torch.tensor(3)},
        "optim": {
            "state": {n: {"exp_avg": shard(t + 1), "step": torch.tensor(7.0)} for n, t in tensors.items()},
            "param_groups": groups,
        },
        **trainer(rank, world),
    }
