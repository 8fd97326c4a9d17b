"""DeepSpeed's layouts, written here after its published code on any number of ranks; all padding is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch


@dataclass
class Run:
    """A training run as one process would hold it. ``groups``: names of the parameters of each param_group."""

    masters: dict[str, torch.Tensor]
    groups: list[list[str]]
    states: dict[str, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    step: float = 3.0
    client: list[dict[str, Any]] = field(default_factory=lambda: [{}])

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """What has to come out of it."""
        tied = {alias: self.masters[name] for alias, name in self.tied.items()}
        return {**self.masters, **self.frozen, **self.buffers, **tied}


def run_of(
    shapes: Sequence[tuple[int, ...]], groups: int = 1, seed: int = 0, keys: Sequence[str] = ("exp_avg", "exp_avg_sq")
) -> Run:
    """A run with parameters of these shapes, dealt to the groups in turn, filled with numbers."""
    generator = torch.Generator().manual_seed(seed)
    masters = {f"layer{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    names = list(masters)
    return Run(
        masters,
        [names[g::groups] for g in range(groups)],
        {name: {key: torch.randn(t.shape, generator=generator) for key in keys} for name, t in masters.items()},
    )


def nan(count: int) -> torch.Tensor:
    return torch.full((count,), float("nan"))


def param_groups(run: Run, ids: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"lr": 0.01 * (g + 1), "weight_decay": 0.1 * g, "params": held} for g, held in enumerate(ids)]


# ZeRO 1 and 2


def dealt(names: list[str], world: int) -> list[str]:
    """The order that round-robin gradients give a group."""
    return [name for rank in range(world) for name in names[rank::world]]


def flat_parts(tensors: Sequence[torch.Tensor], world: int) -> tuple[list[torch.Tensor], int]:
    """A group as one vector, padded and cut for the ranks; and how many elements it has without the padding."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)
    align = 2 * world
    padded = torch.cat([flat, nan(-len(flat) % align)])
    return list(padded.chunk(world)) if len(padded) else [padded] * world, len(flat)


def zero12(
    run: Run, world: int, *, stage: int = 2, round_robin: bool = False, old: bool = False, elastic: bool = False,
    wrapper: bool = True, step_in: str = "state",
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The files of ZeRO 1 or 2 (or, without ``wrapper``, of the BF16 optimizer) by name.

    ``old``: padding is stripped from the last rank alone, as until 0.17. ``step_in``: the optimizer that keeps its step
    in its state, in its groups, or not at all.
    """
    groups = [dealt(names, world) if round_robin else names for names in run.groups]
    cut = [flat_parts([run.masters[n] for n in names], world) for names in groups]
    keys = list(next(iter(run.states.values()), {}))
    files: dict[str, dict[str, Any]] = {}
    for rank in range(world):
        masters, states, paddings = [], {}, []
        for g, (parts, numel) in enumerate(cut):
            size = len(parts[rank])
            padding = min(size, max(0, (rank + 1) * size - numel))
            if old:
                padding = sum(map(len, parts)) - numel if rank == world - 1 else 0
            paddings.append(padding)
            masters.append(parts[rank].clone() if not wrapper else parts[rank][: size - padding].clone())
            state: dict[str, Any] = {"step": torch.tensor(run.step)} if step_in == "state" else {}
            for key in keys:
                part = flat_parts([run.states[n][key] for n in groups[g]], world)[0][rank]
                state[key] = part[: size - padding].clone() if elastic else part.clone()
            states[g] = state
        hyper = param_groups(run, [[g] for g in range(len(groups))])
        if step_in == "groups":
            hyper = [{**group, "step": int(run.step)} for group in hyper]
        optim: dict[str, Any] = {
            "base_optimizer_state": list(states.values()) if elastic else {"state": states, "param_groups": hyper},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings, "partition_count": [world] * len(groups), "ds_version": "0.19.8",
        }  # fmt: skip
        if wrapper:
            optim |= {"zero_stage": stage, "loss_scaler": {"cur_scale": 1.0}, "overflow": False}
        prefix = "" if wrapper and run.dtype == torch.float32 else "bf16_"
        files[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": optim}
    shapes = [{n: run.masters[n].shape for n in names} for names in groups]
    model = model_file(run, world, shapes, run.client[0])
    model["ds_config"] = {"zero_optimization": {"stage": stage, "round_robin_gradients": round_robin}}
    if stage == 2:
        model |= {
            "frozen_param_shapes": {n: t.shape for n, t in run.frozen.items()},
            "frozen_param_fragments": run.frozen,
        }
    files["mp_rank_00_model_states.pt"] = model
    return files


def model_file(run: Run, world: int, shapes: Any, client: dict[str, Any]) -> dict[str, Any]:
    module = {name: tensor.to(run.dtype) for name, tensor in run.masters.items()} | run.frozen | run.buffers
    module |= {alias: module[name].clone() for alias, name in run.tied.items()}
    return {
        "module": module, "buffer_names": list(run.buffers), "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": run.tied,
        "lr_scheduler": {"last_epoch": 3}, "global_steps": int(run.step), "skipped_steps": 0, "dp_world_size": world,
        "mp_world_size": 1, "ds_version": "0.19.8", "ds_config": {}, **client,
    }  # fmt: skip


# ZeRO 3


def shares(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Each rank's share of one parameter, padded."""
    flat = tensor.reshape(-1)
    size = ceil(len(flat) / world)
    flat = torch.cat([flat, nan(size * world - len(flat)).to(tensor.dtype)])
    return [flat[rank * size : (rank + 1) * size] for rank in range(world)]


def zero3(run: Run, world: int, *, sub_group: int = 10**9) -> dict[str, dict[str, Any]]:
    """The files of ZeRO 3 by name; a group is cut into sub-groups of at least ``sub_group`` elements."""
    subs: list[list[str]] = []
    ids: list[list[int]] = []
    for names in run.groups:
        ids.append([])
        room = 0
        for name in names:
            if room <= 0:
                ids[-1].append(len(subs))
                subs.append([])
                room = sub_group
            subs[-1].append(name)
            room -= run.masters[name].numel()
    keys = list(next(iter(run.states.values()), {}))
    files: dict[str, dict[str, Any]] = {}
    prefix = "" if run.dtype == torch.float32 else "bf16_"

    def flat(names: list[str], rank: int, key: str | None) -> torch.Tensor:
        held = [run.masters[n] if key is None else run.states[n][key] for n in names]
        return torch.cat([shares(t, world)[rank] for t in held]) if held else torch.empty(0)

    for rank in range(world):
        state = {
            k: {"step": torch.tensor(run.step), **{key: flat(names, rank, key) for key in keys}}
            for k, names in enumerate(subs)
        }
        files[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "zero_stage": 3, "partition_count": world, "loss_scaler": {"cur_scale": 1.0},
                "optimizer_state_dict": {"state": state, "param_groups": param_groups(run, ids)},
                "fp32_flat_groups": [flat(names, rank, None) for names in subs],
            }
        }  # fmt: skip
        shapes = [{n: run.masters[n].shape for n in names} for names in subs]
        model = model_file(run, world, shapes, run.client[rank % len(run.client)])
        for name in [*run.masters, *run.frozen, *run.tied]:
            model["module"][name] = torch.empty(0, dtype=run.dtype)
        model["shared_params"] = run.tied if rank == 0 else {}
        model["frozen_param_shapes"] = {n: t.shape for n, t in run.frozen.items()}
        model["frozen_param_fragments"] = {n: shares(t, world)[rank] for n, t in run.frozen.items()}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model
    return files


# Without ZeRO, in half precision


def half(run: Run, *, fused: bool) -> dict[str, dict[str, Any]]:
    """The file of DeepSpeed's own optimizers around one for fp16 or bf16: masters without names, flat if fused."""

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.reshape(-1) for t in tensors])

    keys = list(next(iter(run.states.values())))
    state: dict[int, dict[str, Any]] = {}
    ids: list[list[int]] = []
    for names in run.groups:
        each = [names] if fused else [[name] for name in names]
        ids.append(list(range(len(state), len(state) + len(each))))
        for id_, held in zip(ids[-1], each, strict=True):
            state[id_] = {"step": torch.tensor(run.step)}
            for key in keys:
                tensors = [run.states[name][key] for name in held]
                state[id_][key] = flat(tensors) if fused else tensors[0].clone()
    optimizer: dict[str, Any] = {"cur_scale": 8.0}
    optimizer["optimizer_state_dict"] = {"state": state, "param_groups": param_groups(run, ids)}
    if fused:
        optimizer["fp32_groups_flat"] = [flat([run.masters[name] for name in names]) for names in run.groups]
    else:
        optimizer["fp32_groups"] = [[run.masters[name].clone() for name in names] for names in run.groups]
    model = model_file(run, 2, None, {})
    return {"mp_rank_00_model_states.pt": model | {"optimizer": optimizer, "shared_params": None}}


# Universal checkpoints


def universal(run: Run, *, flat: bool, step_in: str = "folder") -> dict[str, Any]:
    """The files of a universal checkpoint, from ZeRO 3 (``flat``: bare elements) or ZeRO 1 and 2 (dicts)."""
    made = zero3(run, 2) if flat else zero12(run, 2)
    files = {name: found for name, found in made.items() if name.endswith("model_states.pt")}
    optim = next(v for k, v in made.items() if k.endswith("optim_states.pt"))["optimizer_state_dict"]
    base = optim.get("base_optimizer_state", optim.get("optimizer_state_dict"))
    common = {**optim, "param_groups": base["param_groups"]}
    common.pop("base_optimizer_state", None)
    if step_in == "groups":
        common["param_groups"] = [{**group, "step": int(run.step)} for group in base["param_groups"]]
        for state in common.get("optimizer_state_dict", {}).get("state", {}).values():
            del state["step"]
    files["zero/optimizer_state.pt"] = common
    for name, master in run.masters.items():
        for key, tensor in {"fp32": master, **run.states[name]}.items():
            files[f"zero/{name}/{key}.pt"] = tensor.reshape(-1) if flat else {"param": tensor, "cat_dim": 0}
        if step_in == "folder" and not flat:
            files[f"zero/{name}/step.pt"] = torch.tensor(run.step)
    if not flat:
        for name, tensor in {**run.buffers, **run.frozen}.items():
            files[f"zero/{name}/fp32.pt"] = {"param": tensor.float()}
    return files


def write(run_folder: Path, files: dict[str, Any], tag: str = "global_step3", latest: str = "latest") -> Path:
    """Save the files under a tag; returns the run folder."""
    for name, content in files.items():
        path = run_folder / tag / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    if latest:
        (run_folder / latest).write_text(tag)
    return run_folder
