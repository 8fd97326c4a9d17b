"""What pages find where they look: checkpoints of other libraries, a config, a profile, a store of one's own.

Imported by the hidden set-up of pages.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
import torch.distributed.checkpoint as dcp_
from safetensors.torch import save_file

import holdfast
from holdfast.testing import Memory as MyStore
from tests.docs.tiny import make
from tests.formats import deepspeed_made

__all__ = [
    "MyStore",
    "composer",
    "config",
    "dcp",
    "deepspeed",
    "hub",
    "huggingface",
    "load_each",
    "old_checkpoints",
    "olmo",
    "profile",
    "run",
    "script",
    "served",
    "torch_save",
]


def trained() -> dict[str, Any]:
    """The tiny state, with an optimizer that has stepped; the one that pages import is not touched."""
    state = make()
    state["model"](torch.arange(8)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return state


def dcp(folder: str) -> None:
    """As torch.distributed.checkpoint writes a model and its optimizer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = trained()
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp_.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def torch_save(path: str) -> None:
    """As a script of one's own saves it."""
    state = trained()
    saved = {key: state[key].state_dict() for key in ("model", "optimizer", "scheduler")}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({**saved, "step": 7, "rng": torch.get_rng_state()}, path)


def composer(path: str) -> None:
    """As Composer's Trainer writes it: one file, the state of all under ``state``, ``rng`` as a list by rank."""
    state = trained()
    inner = {
        "model": state["model"].state_dict(),
        "optimizers": {"AdamW": state["optimizer"].state_dict()},
        "schedulers": {"LambdaLR": state["scheduler"].state_dict()},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 7}},
        "run_name": "made",
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state": inner, "rng": [{"torch": torch.get_rng_state()}]}, path)


def olmo(folder: str) -> None:
    """As OLMo's checkpointer of torch's format writes it, of one rank; beside it the link ``latest``."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = trained()
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp_.save({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/model_and_optim", no_dist=True)
    (Path(folder) / "train").mkdir()
    torch.save({"global_step": 1000, "world_size": 1}, Path(folder) / "train/rank0.pt")
    (Path(folder) / "config.yaml").write_text("run_name: made\n")
    (Path(folder).parent / "latest").symlink_to(Path(folder).name)


def deepspeed(folder: str) -> None:
    """As DeepSpeed's ZeRO 2 writes it on two ranks: global_step3 and latest."""
    state = trained()
    names = dict(state["model"].named_parameters())
    inner = {
        name: {key: state["optimizer"].state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
        for name, parameter in names.items()
    }
    run = deepspeed_made.Run({name: p.detach() for name, p in names.items()}, [list(names)], inner)
    deepspeed_made.write(Path(folder), deepspeed_made.zero12(run, 2))


def config(folder: str) -> None:
    """The files of a Hugging Face model but for its weights."""
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.json").write_text(json.dumps({"architectures": ["GPT"], "vocab_size": 128}))
    (Path(folder) / "tokenizer.json").write_text("{}")


def huggingface(url: str) -> None:
    """A model's folder on a web server."""
    config("served")
    save_file({name: t.contiguous() for name, t in trained()["model"].state_dict().items()}, "served/model.safetensors")
    served("served", url)


def hub(name: str, step: str) -> None:
    """A hub with the model of a step, and a user who may push to it."""
    from huggingface_hub import constants

    from tests.servers.hub import TOKEN, Hub

    started = Hub()
    started.__enter__()
    os.environ.update(started.environment(), HF_TOKEN=TOKEN)
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    holdfast.save(trained(), step)
    config("base-model")
    holdfast.convert(step, f"hf://{name}", to="huggingface", extras="base-model")


def served(folder: str, url: str) -> None:
    """A folder moves to a web server, which here is a bucket that all may read."""
    for file in sorted(Path(folder).rglob("*")):
        if file.is_file():
            there = f"{url.rstrip('/')}/{file.relative_to(folder).as_posix()}"
            told = Request(
                there, file.read_bytes(), headers={"x-amz-acl": "public-read", "content-type": "a/b"}, method="PUT"
            )
            urlopen(told).close()
    shutil.rmtree(folder)


def profile(name: str) -> None:
    """A profile of AWS that holds what the environment does."""
    file = Path("credentials").absolute()
    file.write_text(f"[{name}]\naws_access_key_id = moto\naws_secret_access_key = moto\nregion = us-east-1\n")
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(file)


def run() -> None:
    """Two steps below /ckpt/run1, the second of which reuses the first; a conversion; a timeline."""
    from holdfast.report.timeline import timeline

    with timeline("runs/timeline"):
        holdfast.save(_layers(500), "ckpt/run1/step-500", step=500, files={"config.yaml": b"lr: 0.1"})
    holdfast.save(_layers(1000), "ckpt/run1/step-1000", step=1000, base="ckpt/run1/step-500")
    holdfast.convert("ckpt/run1/step-1000", "ckpt/dcp", to="dcp", only=["model", "step"])


def _layers(step: int) -> dict[str, Any]:
    """Eight layers, their moments and a frozen tower; one tensor follows the step."""
    torch.manual_seed(0)
    model = {"tok.weight": torch.randn(1000, 64)}
    shapes = {"attn.wq": (64, 64), "attn.wo": (64, 64), "mlp.up": (256, 64), "mlp.down": (64, 256)}
    for i in range(8):
        for name, shape in shapes.items():
            model[f"layers.{i}.{name}.weight"] = torch.randn(shape) + (step if (i, name) == (7, "attn.wq") else 0)
    model["norm.weight"] = torch.ones(64)
    return {
        "model": model,
        "optimizer": {"state": {name: {"exp_avg": torch.randn(w.shape)} for name, w in model.items()}},
        "frozen": {"vision": torch.randn(20000, 64)},
        "step": step,
        "scheduler": {"last_epoch": step},
        "rng": holdfast.PerRank({"seed": step}),
    }


def script(name: str) -> None:
    """A training script of the user's, with ``--root``: DDP, a save at every step, goes on where it was."""
    Path(name).write_text(Path(__file__).with_name("a_script.py").read_text())


OLD = ("runs/dcp/step-700", "runs/old/step7.pt", "runs/ds", "runs/composer/ep0-ba7-rank0.pt", "runs/olmo/latest")


def old_checkpoints() -> None:
    """One checkpoint of each library that the page on migration names, and the files of a Hugging Face model."""
    for make_one, path in zip((dcp, torch_save, deepspeed, composer), OLD, strict=False):
        make_one(path)
    olmo("runs/olmo/step1000")
    config("base-model")


def load_each() -> None:
    """Load each of them into a new model and optimizer, and compare."""
    import holdfast

    for path in OLD:
        state = make()
        holdfast.load(path, {key: state[key] for key in ("model", "optimizer")})
        assert state["optimizer"].state, path
        for name, tensor in state["model"].state_dict().items():
            assert torch.equal(tensor, holdfast.open(path).read(f"model/{name}")), (path, name)
