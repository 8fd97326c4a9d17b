"""transformers' tests of Trainer's checkpoints with `HoldfastCallback` attached to each Trainer.

A pytest plugin. Every Trainer that saves gets a callback with its output folder as the root and steps called as Trainer
calls them; `save_total_limit`, rhythm and best step are left to the arguments. All steps are kept where there is no
limit, as Trainer does. What the tests do with files of Trainer is done to ours:

- weights, config and `trainer_state.json` that a test reads from a checkpoint are read from ours;
- a test that looks for Trainer's files in a folder looks for a committed checkpoint with all sections;
- a test that cuts a checkpoint's weights into shards leaves ours as it is;
- a test that goes back to an older step moves the later ones away first, as docs/resume.md says.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import Trainer, TrainerState

import holdfast
from holdfast.trainers.huggingface import HoldfastCallback

THEIRS = {"init": Trainer.__init__, "load_file": safetensors.torch.load_file, "from_json": TrainerState.load_from_json}
NAME = "checkpoint-{step}"


def ours(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder that holdfast has committed."""
    return (Path(path) / "manifest.json").is_file()


def make(self: Trainer, *args: Any, **kwargs: Any) -> None:
    THEIRS["init"](self, *args, **kwargs)
    if self.args.save_strategy == "no":
        return
    root = Path(self.args.output_dir)
    keep = {} if self.args.save_total_limit else {"keep": holdfast.Keep(last=10**6)}
    HoldfastCallback(root, name=NAME, worker="thread", journal=False, **keep).attach(self)
    train = self.train

    def going_back(resume_from_checkpoint: Any = None, **named: Any) -> Any:
        if isinstance(resume_from_checkpoint, str) and ours(resume_from_checkpoint):
            wanted = holdfast.open(resume_from_checkpoint).step
            later = [path for path in root.iterdir() if ours(path) and holdfast.open(path).step > wanted]
            for path in later if root == Path(resume_from_checkpoint).parent else ():
                shutil.rmtree(path)
        return train(resume_from_checkpoint=resume_from_checkpoint, **named)

    self.train = going_back


def weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    saved = holdfast.open(folder)
    return {name.removeprefix("model/"): saved.read(name) for name in saved.tensors if name.startswith("model/")}


def load_file(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    folder = Path(path).parent
    return weights(folder) if ours(folder) else THEIRS["load_file"](path, *args, **kwargs)


def load_from_json(path: str) -> TrainerState:
    folder = Path(path).parent
    if ours(folder):
        return TrainerState(**json.loads(holdfast.open(folder).per_rank("trainer", 0)["state"]))
    return THEIRS["from_json"](path)


def check_saved_checkpoints(self: Any, output_dir: str, freq: int, total: int, *_: Any, **__: Any) -> None:
    for step in range(freq, total, freq):
        saved = holdfast.open(Path(output_dir) / NAME.format(step=step))
        saved.verify()
        self.assertEqual(saved.step, step)
        sections = {name.split("/")[0] for name in (*saved.tensors, *saved.values)}
        self.assertLessEqual({"model", "optimizer", "scheduler", "step"}, sections)


def pytest_collection_finish(session: Any) -> None:
    """The tests are imported: what they do with Trainer's files is done to ours."""
    common = sys.modules["tests.trainer.trainer_test_utils"]
    tests = sys.modules["tests.trainer.test_trainer_checkpointing"]
    tests.SAFE_WEIGHTS_NAME = "manifest.json"  # type: ignore[attr-defined]
    common.TrainerIntegrationCommon.check_saved_checkpoints = check_saved_checkpoints  # type: ignore[attr-defined]
    common.TrainerIntegrationCommon.convert_to_sharded_checkpoint = lambda self, folder: None  # type: ignore[attr-defined]
    model = common.RegressionPreTrainedModel  # type: ignore[attr-defined]

    def from_pretrained(folder: str) -> Any:
        made = model(common.RegressionModelConfig())  # type: ignore[attr-defined]
        made.load_state_dict(weights(folder))
        return made

    model.from_pretrained = from_pretrained


Trainer.__init__ = make
TrainerState.load_from_json = staticmethod(load_from_json)
safetensors.torch.load_file = load_file
