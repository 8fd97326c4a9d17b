"""Every way to lay a small model over ranks, and its full state gathered by torch itself, never by holdfast.

Called on the ranks of a pool by the mesh tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

warnings.filterwarnings("ignore")

State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd sizes on purpose: 11 x 6 embeddings, a parameter of 3 elements, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.head = nn.Linear(6, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.randn(5))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.frozen.sum() * 0 + self.mix.mean()
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        return self.head(x)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if "weight" in n and "norm" not in n]
    others = [p for n, p in trained if not ("weight" in n and "norm" not in n)]
    if not matrices or not others:  # FSDP1 flat parameters
        return torch.optim.AdamW([p for _, p in trained], lr=1e-2, weight_decay=0.1)
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def _tensor_parallel(model: Model, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp2(model: Model, mesh: Any) -> Model:
    # FSDP wants whole modules trained or frozen together only for its groups, not for its parameters.
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def single(model: Model) -> nn.Module:
    return model


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Model) -> nn.Module:
    return _fsdp2(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: Model) -> nn.Module:
    return _fsdp2(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def tensor_parallel(model: Model) -> nn.Module:
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def fsdp_tp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    return _fsdp2(model, mesh["dp"])


def hsdp_tp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("r", "s", "tp"))
    _tensor_parallel(model, mesh["tp"])
    return _fsdp2(model, mesh["r", "s"])


def compiled_ddp(model: Model) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def _fsdp1(model: Model, strategy: ShardingStrategy, *, use_orig_params: bool) -> nn.Module:
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    # A flat parameter is trained or frozen as one.
    ignored = None if use_orig_params else [model.frozen]
    return FSDP1(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy, use_orig_params=use_orig_params,
        device_id=torch.device("cpu"), device_mesh=mesh, ignored_states=ignored,
    )  # fmt: skip


def fsdp1(model: Model) -> nn.Module:
    return _fsdp1(model, ShardingStrategy.FULL_SHARD, use_orig_params=True)


def fsdp1_flat(model: Model) -> nn.Module:
    return _fsdp1(model, ShardingStrategy.SHARD_GRAD_OP, use_orig_params=False)


def fsdp1_hybrid(model: Model) -> nn.Module:
    return _fsdp1(model, ShardingStrategy.HYBRID_SHARD, use_orig_params=True)


def fsdp1_unsharded(model: Model) -> nn.Module:
    return _fsdp1(model, ShardingStrategy.NO_SHARD, use_orig_params=True)


LAYOUTS: dict[str, tuple[int, Callable[[Model], nn.Module]]] = {
    "one process": (1, single),
    "DDP 2": (2, ddp),
    "FSDP2 2": (2, fsdp2),
    "FSDP2 3": (3, fsdp2),
    "FSDP2 4": (4, fsdp2),
    "HSDP 2x2": (4, hsdp),
    "TP 2": (2, tensor_parallel),
    "FSDP2 x TP 2x2": (4, fsdp_tp),
    "HSDP x TP 2x2x2": (8, hsdp_tp),
    "compiled DDP 3": (3, compiled_ddp),
    "FSDP1 2": (2, fsdp1),
    "FSDP1 flat 4": (4, fsdp1_flat),
    "FSDP1 hybrid 2x2": (4, fsdp1_hybrid),
    "FSDP1 unsharded 2": (2, fsdp1_unsharded),
}


def build(layout: str, seed: int, *, steps: int) -> dict[str, Any]:
    """A state on this rank: model and optimizer after ``steps`` real training steps."""
    torch.manual_seed(seed)
    model = LAYOUTS[layout][1](Model())
    optimizer = optimizer_of(model)
    for step in range(steps):
        torch.manual_seed(seed + step)
        model(torch.randint(0, 11, (4, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def gathered(state: dict[str, Any]) -> State:
    """The full state by plain names, on every rank."""
    model, optimizer = state["model"], state["optimizer"]
    full: State = {}
    if any(isinstance(m, FSDP1) for m in model.modules()):
        return _gathered_fsdp1(model, optimizer)
    name_of = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        plain = _plain(name)
        name_of[tensor] = plain
        if plain != "scratch":
            full[plain] = _full(tensor.detach())
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            full[f"{name_of[parameter]}/{key}"] = _full(value)
    return full


def _plain(name: str) -> str:
    drop = ("module", "_orig_mod", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in drop)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _gathered_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """By hand: torch 2.13 gathers FSDP1 optimizer state wrongly on the CPU."""
    full: State = {}
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if _plain(name) in ("seen", "scale", "frozen"):
            full[_plain(name)] = tensor.detach().clone()
    for prefix, wrapped in model.named_modules():
        handle = getattr(wrapped, "_handle", None) if isinstance(wrapped, FSDP1) else None
        if handle is None:
            continue
        flat, start = handle.flat_param, _plain(prefix) + "." if _plain(prefix) else ""
        names = [_plain(start + fqn) for fqn in flat._fqns]
        shard = getattr(flat, "_local_shard", flat.data) if handle.uses_sharded_strategy else flat.data
        for name, tensor in zip(names, _unflatten(handle, shard), strict=True):
            full[name] = tensor
        for key in ("exp_avg", "exp_avg_sq", "step"):
            if flat._params is None:
                whole = optimizer.state[flat][key]
                pieces = [whole] * len(names) if whole.dim() == 0 else _unflatten(handle, whole)
            else:
                pieces = _orig_state(handle, flat, optimizer, key)
            for name, tensor in zip(names, pieces, strict=True):
                if tensor is not None:
                    full[f"{name}/{key}"] = tensor.clone()
    return full


def _orig_state(handle: Any, flat: Any, optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor | None]:
    found = [optimizer.state[p][key] if p in optimizer.state else None for p in flat._params]
    if key == "step":
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        return [next((g[i] for g in gathered if g[i] is not None), None) for i in range(len(found))]
    if not handle.uses_sharded_strategy:
        return found
    shard = torch.zeros_like(getattr(flat, "_local_shard", flat.data))
    for value, info in zip(found, flat._shard_param_infos, strict=True):
        if value is not None and value.numel():
            shard[info.offset_in_shard : info.offset_in_shard + value.numel()] = value.flatten()
    whole = _unflatten(handle, shard)
    frozen = [not p.requires_grad for p in flat._params]
    return [None if f else w for f, w in zip(frozen, whole, strict=True)]


def _unflatten(handle: Any, shard: torch.Tensor) -> list[torch.Tensor]:
    flat = handle.flat_param
    whole = shard
    if handle.uses_sharded_strategy:
        parts = [torch.empty_like(shard) for _ in range(handle.process_group.size())]
        dist.all_gather(parts, shard.detach().contiguous(), group=handle.process_group)
        whole = torch.cat(parts)
    found, at = [], 0
    shapes = iter(flat._shapes)
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            found.append(whole[at : at + numel].view(next(shapes)).clone())
        at += numel
    return found


def save_one(layout: str, path: str, truth: str, steps: int = 2) -> None:
    """Train, save, and keep what torch says the state is."""
    state = build(layout, 7, steps=steps)
    for group in state["optimizer"].param_groups:
        group["lr"] = 0.25
    full = gathered(state)
    holdfast.save({**state, "step": steps}, path)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(full, truth)


def load_all(layout: str, pairs: list[tuple[str, str]], steps: int) -> list[list[str]]:
    """Load each (checkpoint, truth) into one target; the names that differ, for each pair."""
    problems = []
    for number, (path, truth) in enumerate(pairs):
        if number == 0 or steps == 0:
            state: dict[str, Any] = {**build(layout, 100, steps=steps), "step": 0}
        before = {n: id(p) for n, p in state["model"].named_parameters()}
        # One flat parameter is in one group; a checkpoint of two groups has no settings for it.
        only = ["model", "optimizer/state", "step"] if layout == "FSDP1 flat 4" else "*"
        loaded = holdfast.load(path, state, only=only)
        expected = torch.load(truth, weights_only=True)
        full = gathered(state)
        wrong = []
        for name in sorted({*full, *expected}):
            ours, theirs = full.get(name), expected.get(name)
            if ours is None or theirs is None or ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                wrong.append(name)
        if {n: id(p) for n, p in state["model"].named_parameters()} != before:
            wrong.append("a parameter changed its identity")
        if state["step"] != loaded.step or loaded.step != 2:
            wrong.append("step")
        if only == "*" and any(group["lr"] != 0.25 for group in state["optimizer"].param_groups):
            wrong.append("param_groups")
        problems.append(wrong)
    return problems
