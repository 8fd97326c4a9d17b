"""How the golden checkpoints `ds_*` are made, on real ranks: ``python -m tests.golden.make_deepspeed [name …]``."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests import pool
from tests.golden import beside, tiny

HERE = Path(__file__).parent
TAG = f"global_step{tiny.STEPS}"
CLIENT_STATE = {"step": tiny.STEPS, "note": "tiny", "data_order": [3, 1, 2]}
NOTE = (
    "model.<fqn> is the fp32 master copy; module_bf16.<fqn> (ZeRO 1 and 2 in bf16) is the weight as the module "
    "holds it; optim step is the number of optimizer steps"
)
FILES = "latest, <tag>/*model_states.pt, <tag>/*optim_states.pt (flat fp32 partitions per parameter group)"
UNIVERSAL = (
    "latest, latest_universal, <tag>_universal/zero/<fqn>/{fp32,exp_avg,exp_avg_sq,step}.pt, "
    "<tag>_universal/mp_rank_00_model_states.pt"
)


@dataclass(frozen=True)
class Made:
    """How one checkpoint is made."""

    stage: int
    bf16: bool = False
    fp32_gradients: bool = False
    tied: bool = False
    frozen: bool = False
    universal: bool = False


MADE = {
    "ds_zero1_bf16opt_2r": Made(1, bf16=True, fp32_gradients=True),
    "ds_zero1_fp32_tied_2r": Made(1, tied=True),
    "ds_zero2_bf16_frozen_2r": Made(2, bf16=True, frozen=True),
    "ds_zero2_universal_2r": Made(2, universal=True),
    "ds_zero3_fp32_2r": Made(3),
    "ds_zero3_universal_2r": Made(3, universal=True),
}

# An allreduce over shared memory that DeepSpeed would compile first; without it torch's own is taken.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def settings(made: Made) -> dict[str, Any]:
    buckets = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**6, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": made.stage, "stage3_param_persistence_threshold": 20, **buckets},
    }  # fmt: skip
    if made.bf16:
        config["bf16"] = {"enabled": True}
    if made.fp32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def make(name: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train and save, on each rank; the truth, and the facts."""
    made = MADE[name]
    os.chdir(folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    model = tiny.Tiny(tied=made.tied, frozen=made.frozen)
    if made.bf16:
        model.bfloat16()  # the buffer too, which DeepSpeed leaves as it is
    optimizer, schedule = tiny.optimizer_of(model)
    facts = beside.facts_of(
        model, optimizer, system="DeepSpeed", layout=UNIVERSAL if made.universal else FILES,
        api="DeepSpeedEngine.save_checkpoint" + " + ds_to_universal" * made.universal, world=dist.get_world_size(),
    )  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings(made))[0]
    for tokens, targets in tiny.batches():
        engine.backward(tiny.loss_of(engine(tokens), targets))
        engine.step()
    engine.save_checkpoint("ckpt", tag=TAG, client_state=CLIENT_STATE)
    facts |= {
        "zero_stage": made.stage, "compute_dtype": "bfloat16" if made.bf16 else "float32", "note": NOTE,
        "optimizer_wrapper": type(engine.optimizer).__name__, "client_state": CLIENT_STATE,
    }  # fmt: skip
    facts["versions"]["deepspeed"] = deepspeed.__version__
    return truth_of(engine, masters=made.bf16), facts


def truth_of(engine: Any, *, masters: bool) -> dict[str, torch.Tensor]:
    """The tensors of the live engine."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # linked after the step of the first group alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {f"model.{name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            found[f"model.{name}"] = param.detach().clone()
            continue
        found[f"model.{name}"] = safe_get_full_fp32_param(param).detach().clone()
        if masters:
            found[f"module_bf16.{name}"] = param.detach().clone()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optim.{name}.{key}"] = safe_get_full_optimizer_state(param, key).detach().clone()
            found[f"optim.{name}.step"] = torch.tensor(float(engine.global_steps - engine.skipped_steps))
    return found


def to_universal(folder: Path) -> None:
    """Convert a checkpoint, with DeepSpeed's own script, and leave only what that wrote."""
    script = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    paths = ["--input_folder", f"ckpt/{TAG}", "--output_folder", f"ckpt/{TAG}_universal"]
    subprocess.run([*script, *paths], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder / "ckpt" / TAG)


if __name__ == "__main__":
    for name in sys.argv[1:] or MADE:
        folder = HERE / name
        shutil.rmtree(folder / "ckpt", ignore_errors=True)
        truth, facts = pool.run(2, make, name, str(folder))[0]
        if MADE[name].universal:
            to_universal(folder)
        for script in (folder / "ckpt").rglob("*.py"):
            script.unlink()  # what DeepSpeed copies next to each checkpoint
        beside.write(folder, truth, facts)
