"""What is saved on one mesh and loaded on another is bit for bit the same, whichever door it goes through.

The doors: ours (`holdfast.dcp.save`, `load`) and torch's engine over our format (`Writer`, `Reader`). The truth is
gathered by torch itself.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import holdfast.dcp as dcp
from tests import meshes, pool
from tests.marks import every

SAVED = ["one process", "DDP 2", "FSDP2 4", "HSDP 2x2", "FSDP2 x TP 2x2", "FSDP1 2"]
LOADED = ["one process", "FSDP2 2", "TP 2", "HSDP 2x2"]
PROGRESS = {"seen": [1, 2], "name": "run", "betas": (0.5, None)}


def _states(state: dict[str, Any], flat: bool) -> dict[str, Any]:
    """The nested dicts that torch recommends; ``flat`` with the optimizer's taken apart by parameter."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    return {"model": model, "optim": optimizer}


def save_both(layout: str, folder: str, flat: bool) -> None:
    """Train, save through both doors, and keep what torch says the state is."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    state = meshes.build(layout, 7, steps=2)
    full = meshes.gathered(state)
    saved = {**_states(state, flat), "progress": PROGRESS, "step": 2}
    dcp.save(saved, checkpoint_id=f"{folder}/ours")
    torch_dcp.save(saved, storage_writer=dcp.Writer(f"{folder}/torch"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(full, f"{folder}/truth")


def load_across(layout: str, folders: list[str], flat: bool) -> list[str]:
    """What differs after ours has loaded what torch wrote, and torch what ours wrote."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    wrong = []
    for folder in folders:
        expected = torch.load(f"{folder}/truth", weights_only=True)
        for written in ("ours", "torch"):
            state = meshes.build(layout, 100, steps=0)
            progress: dict[str, Any] = {"seen": [], "name": "", "betas": None}
            into = {**_states(state, flat), "progress": progress, "step": 0}
            if written == "torch":
                dcp.load(into, checkpoint_id=f"{folder}/torch")
            else:
                torch_dcp.load(into, storage_reader=dcp.Reader(f"{folder}/ours"))
            set_state_dict(
                state["model"], state["optimizer"], model_state_dict=into["model"], optim_state_dict=into["optim"],
                options=StateDictOptions(flatten_optimizer_state_dict=flat),
            )  # fmt: skip
            full = meshes.gathered(state)
            names = {*full, *expected}
            odd = [n for n in names if n not in full or n not in expected or not torch.equal(full[n], expected[n])]
            if progress != PROGRESS or into["step"] != 2:
                odd.append(f"values {progress}")
            wrong += [f"{folder} written by {written}: {name}" for name in odd]
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = []
    for layout in every(2, SAVED):
        folder = tmp_path_factory.mktemp("saved")
        pool.run(meshes.LAYOUTS[layout][0], save_both, layout, str(folder), False)
        made.append(str(folder))
    return made


@pytest.mark.parametrize("layout", LOADED)
@pytest.mark.fast_cases("FSDP2 2")
def test_any_mesh_loads_what_any_mesh_saved(layout: str, folders: list[str]) -> None:
    assert pool.run(meshes.LAYOUTS[layout][0], load_across, layout, folders, False)[0] == []


@pytest.mark.slow
def test_flattened_optimizer_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("flat"))
    pool.run(4, save_both, "FSDP2 4", folder, True)
    for layout in ("TP 2", "FSDP2 x TP 2x2"):
        assert pool.run(meshes.LAYOUTS[layout][0], load_across, layout, [folder], True)[0] == []
