"""How the golden checkpoints `torchsave_*` are made: ``python -m tests.golden.make_torch [name …]``."""

from __future__ import annotations

import random
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.golden import beside, tiny

HERE = Path(__file__).parent


def views(*, new: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors that share storages, and of many dtypes; what they are, in words."""
    whole = torch.arange(60.0)
    tensors = {
        "whole": whole, "tail": whole[40:], "transposed": whole[:24].view(4, 6).T, "half": whole[:5].half(),
        "bf16": whole[:7].bfloat16(), "bool": whole[:9] > 3, "i8": whole[:5].to(torch.int8),
        "c64": torch.complex(whole[:3], whole[3:6]), "empty": torch.empty(0, 3),
    }  # fmt: skip
    words = (
        "whole = arange(60) float32; tail = whole[40:]; transposed = whole[:24].view(4,6).T; "
        "half = float16 of whole[:5]; bf16 = whole[:7]; bool = whole[:9] > 3; i8 = whole[:5]; "
        "c64 = whole[:3] + i*whole[3:6]; empty = float32 (0,3)"
    )
    if not new:
        return tensors, words
    tensors["f8"], tensors["u16"] = whole[:4].to(torch.float8_e4m3fn), torch.tensor([1, 2, 65535], dtype=torch.uint16)
    return tensors, words + "; f8 = float8_e4m3fn of whole[:4]; u16 = uint16 [1, 2, 65535]"


def make(
    folder: Path,
    *,
    new: bool,
    tied: bool = False,
    frozen: bool = False,
    compiled: bool = False,
    with_views: bool = False,
) -> None:
    """Train, save, and write the truth beside."""
    for seed in (random.seed, numpy.random.seed):
        seed(tiny.SEED)
    model: Any = tiny.Tiny(tied=tied, frozen=frozen)
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer, schedule = tiny.optimizer_of(model, amsgrad=compiled)
    tiny.train(model, optimizer, schedule)
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
    args = {"lr": 0.01, "name": "tiny", "betas": (0.9, 0.95)}
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_sched": schedule.state_dict(),
        "step": tiny.STEPS, "rng": rng, "args": args,
    }  # fmt: skip
    truth = tiny.truth_of(model, optimizer)
    facts = beside.facts_of(
        model, optimizer, system="torch.save", api=f"torch.save(..., _use_new_zipfile_serialization={new})",
        layout="one file {model: {fqn: tensor}, optimizer: torch.optim state dict, lr_sched, step, rng, args}",
    )  # fmt: skip
    if with_views:
        state["views"], facts["views"] = views(new=new)
        truth |= {f"views.{name}": tensor for name, tensor in state["views"].items()}
    facts["objects"] = {"args": {**args, "betas": [0.9, 0.95]}, "step": tiny.STEPS}
    facts["rng"] = {
        "torch_cpu_sha256": sha256(rng["torch"].numpy()).hexdigest(), "torch_cpu_len": rng["torch"].numel(),
        "python_first": list(rng["python"][1][:4]), "numpy_first": rng["numpy"][1][:4].tolist(),
    }  # fmt: skip
    facts["versions"]["numpy"] = numpy.__version__
    shutil.rmtree(folder / "ckpt", ignore_errors=True)
    (folder / "ckpt").mkdir()
    torch.save(state, folder / "ckpt" / "checkpoint.pt", _use_new_zipfile_serialization=new)
    beside.write(folder, truth, facts)


MADE: dict[str, dict[str, bool]] = {
    "torchsave_compiled_amsgrad": {"new": True, "compiled": True},
    "torchsave_legacy_tied": {"new": False, "tied": True},
    "torchsave_legacy_views": {"new": False, "with_views": True},
    "torchsave_zip_frozen": {"new": True, "frozen": True},
    "torchsave_zip_tied_views": {"new": True, "tied": True, "with_views": True},
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MADE:
        make(HERE / name, **MADE[name])
