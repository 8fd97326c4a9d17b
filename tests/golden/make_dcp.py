"""How the golden checkpoints `dcp_*` are made, on real ranks: ``python -m tests.golden.make_dcp [name …]``."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests import pool
from tests.golden import beside, tiny

HERE = Path(__file__).parent
NOTES = {"words": ["a", "b"], "pi": 3.14159, "flag": True, "none": None}

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Made:
    """How one checkpoint is made."""

    world: int
    wrap: str
    api: str
    save: Save
    layout: str = "model.<fqn>, optim.state.<fqn>.<key>, optim.param_groups"
    state: str = "model and optimizer by name"
    tied: bool = False
    frozen: bool = False


# Wrapping


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    """The model in the wrapper that these words name."""
    if wrap == "DDP":
        return DistributedDataParallel(model)
    if wrap == "FSDP1":
        policy = ModuleWrapPolicy({tiny.Block})
        return FSDP1(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = None
    if wrap.startswith("FSDP2 over tensor parallel"):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "blocks.0.mlp.fc1": ColwiseParallel(), "blocks.0.mlp.fc2": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }  # fmt: skip
        parallelize_module(model, grid["tp"], plan)
        mesh = grid["dp"]
    elif wrap.startswith("FSDP2, replicated"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if wrap.startswith("FSDP2"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this rank may have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_of_fsdp1(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors, from what each rank has of them: FSDP1 cuts the flattened ones by rank."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    tensors = {}
    for key in {key for rank in ranks for key in rank}:
        item, _, name = key.partition(".")
        shape = tiny.SHAPES.get(name.rpartition(".")[0] if item == "optim" else name)
        pieces = [rank[key] for rank in ranks if key in rank]
        is_cut = shape is not None and pieces[0].dim() > 0
        tensors[key] = torch.cat([piece.flatten() for piece in pieces]).view(shape) if is_cut else pieces[0]
    return tensors


# Saving


def synchronous(state: dict[str, Any], **options: Any) -> None:
    writer = dcp.FileSystemWriter("ckpt", **options) if options else None
    dcp.save(state, checkpoint_id=None if writer else "ckpt", storage_writer=writer)


def without_collectives(state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id="ckpt", use_collectives=False)


def asynchronous(state: dict[str, Any]) -> None:
    dcp.async_save(state, checkpoint_id="ckpt").result()


def compressed(state: dict[str, Any]) -> None:
    synchronous(state, _extensions=[ZStandard()])


def two_files(state: dict[str, Any]) -> dict[str, int]:
    return {name: 1 + (2 * i >= len(state)) for i, name in enumerate(state)}


def to_huggingface(state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter("ckpt", **options))


def consolidated(state: dict[str, Any]) -> None:
    files = two_files(state)
    to_huggingface(state, save_distributed=True, enable_consolidation=True, fqn_to_index_mapping=files)


def from_rank_0(state: dict[str, Any]) -> None:
    full = {name: whole(tensor) for name, tensor in state.items()}
    if dist.get_rank() == 0:
        writer = dcp.HuggingFaceStorageWriter("ckpt", fqn_to_index_mapping=two_files(full))
        dcp.save(full, storage_writer=writer, no_dist=True)


BY_NUMBER = "model.module.<fqn>, optimizer.state.<int>.<key>, optimizer.param_groups (torch.optim integer ids)"
APP = "app.model.<fqn>, app.optim.state.<fqn>.<key>, app.optim.param_groups"
HF = "safetensors: <fqn> (model only)"
WRITER = "dcp.save + HuggingFaceStorageWriter"

MADE = {
    "dcp_ddp_2r": Made(2, "DDP", "dcp.save", synchronous, BY_NUMBER, "by number", frozen=True),
    "dcp_filepertensor": Made(
        1, "none", "dcp.save, one process, FileSystemWriter(single_file_per_rank=False)",
        partial(synchronous, single_file_per_rank=False), "model.<fqn>; one file per tensor", "model and train",
        frozen=True,
    ),
    "dcp_fsdp1_2r": Made(
        2, "FSDP1", "dcp.save", synchronous,
        "model.<fqn>, optim.state.<fqn>.<key>, optim.param_groups; values were ShardedTensor",
    ),
    "dcp_fsdp2_4r": Made(4, "FSDP2", "dcp.save", synchronous, APP, "in app"),
    "dcp_fsdp2_async_2r": Made(2, "FSDP2", "dcp.async_save", asynchronous),
    "dcp_fsdp2_hsdp_2x2": Made(4, "FSDP2, replicated 2 times over 2 shards", "dcp.save", synchronous),
    "dcp_fsdp2_nocoll_2r": Made(2, "FSDP2", "dcp.save(use_collectives=False)", without_collectives),
    "dcp_fsdp2_tied_2r": Made(2, "FSDP2", "dcp.save", synchronous, APP, "in app", tied=True),
    "dcp_fsdp2_tp_2x2": Made(
        4, "FSDP2 over tensor parallel, mesh (2, 2)", "dcp.save", synchronous,
        "model.<fqn>, optim.state.<fqn>.<key>, optim.param_groups.<fqn>.<hyper> (flattened optimizer)", "flat",
    ),
    "dcp_fsdp2_zstd_2r": Made(2, "FSDP2", "dcp.save with FileSystemWriter(_extensions=[ZStandard()])", compressed),
    "dcp_hf_consolidated_2r": Made(
        2, "FSDP2", f"{WRITER}(save_distributed, enable_consolidation, 2 output files)", consolidated, HF, "parameters",
    ),
    "dcp_hf_rank0_2r": Made(
        2, "FSDP2", f"{WRITER} on rank 0 with the full state dict, 2 output files", from_rank_0, HF, "the model",
    ),
    "dcp_hf_sharded_2r": Made(
        2, "FSDP2", f"{WRITER}(save_distributed)", partial(to_huggingface, save_distributed=True), HF, "the model",
    ),
    "dcp_single": Made(
        1, "none", "dcp.save, one process, FileSystemWriter(thread_count=3)", partial(synchronous, thread_count=3),
        BY_NUMBER.replace("module.", ""), "by number", frozen=True,
    ),
}  # fmt: skip


def state_of(made: Made, model: nn.Module, optimizer: torch.optim.Optimizer, more: dict[str, Any]) -> dict[str, Any]:
    """What is saved."""
    if made.state == "by number":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}
    options = StateDictOptions(flatten_optimizer_state_dict=made.state == "flat")
    weights, moments = get_state_dict(model, optimizer, options=options)
    if made.state == "parameters":
        params = {tiny.plain(name) for name, _ in model.named_parameters()}
        return {name: tensor for name, tensor in weights.items() if name in params}
    if made.state == "the model":
        return weights
    if made.state == "model and train":
        return {"model": weights, "train": more["train"]}
    if made.state == "in app":
        return {"app": {"model": weights, "optim": moments}, **more}
    return {"model": weights, "optim": moments, **more}


def make(name: str, folder: str) -> None:
    """Train and save, on each rank."""
    made = MADE[name]
    os.chdir(folder)  # DCP pickles the path that it is given
    warnings.simplefilter("ignore")
    model = wrapped(tiny.Tiny(tied=made.tied, frozen=made.frozen), made.wrap)
    optimizer, schedule = tiny.optimizer_of(model, one=made.frozen)
    tiny.train(model, optimizer, schedule)
    objects = {"train": {"step": tiny.STEPS, "lr_sched": schedule.state_dict(), "run": "tiny"}, "notes": NOTES}
    rng = torch.get_rng_state()
    made.save(state_of(made, model, optimizer, {"train": objects["train"], "rng": rng, "notes": NOTES}))
    only_model = made.state in ("the model", "parameters", "model and train")
    saved = None if only_model else optimizer
    truth = tiny.truth_of(model, saved, whole, buffers=made.state != "parameters")
    if made.wrap == "FSDP1":
        truth = whole_of_fsdp1(truth)
    if dist.is_initialized() and dist.get_rank():
        return
    system = "torch.distributed.checkpoint"
    facts = beside.facts_of(model, saved, system=system, api=made.api, layout=made.layout, world=made.world)
    facts["wrapping"] = made.wrap
    sharded = {tiny.plain(name): param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    facts["placements"] = {name: str(param.placements) for name, param in sharded.items()}
    if not only_model:
        facts["objects"] = objects
        facts["rng"] = {"torch_cpu_sha256": sha256(rng.numpy()).hexdigest(), "torch_cpu_len": rng.numel()}
    elif made.state == "model and train":
        facts["objects"] = {"train": objects["train"]}
    else:
        facts["versions"]["safetensors"] = safetensors.__version__
    beside.write(Path(), truth, facts)


if __name__ == "__main__":
    for name in sys.argv[1:] or MADE:
        shutil.rmtree(HERE / name / "ckpt", ignore_errors=True)
        pool.run(MADE[name].world, make, name, str(HERE / name))
