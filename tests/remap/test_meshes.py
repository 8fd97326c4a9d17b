"""Maps on ranks: each rank reads what its shards are made of, whatever the meshes are, and replicas read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import pool
from tests.remap import mesh_trials
from tests.remap.mesh_trials import LAYOUTS, SMALL, WIDE, sized
from tests.remap.models import Hub

SHARDED = ["FSDP2 2", "FSDP2 3", "FSDP2 x TP 2x2", "FSDP2 x TP x EP 2x2", "FSDP1 2", "FSDP1 flat 2"]


def hub_folder(folder: Path, sizes: dict[str, int]) -> tuple[str, str]:
    """A folder as the hub has them, and the file in which its tensors are."""
    torch.manual_seed(0)
    folder.mkdir()
    with sized(sizes):
        save_file(Hub().state_dict(), folder / "model.safetensors")
    return str(folder), str(folder / "model.safetensors")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return hub_folder(tmp_path_factory.mktemp("wide") / "hub", WIDE)


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.fast_cases("FSDP2 3", "FSDP2 x TP x EP 2x2", "FSDP1 flat 2")
def test_a_hub_folder_on_every_mesh(layout: str, tmp_path: Path) -> None:
    pair = hub_folder(tmp_path / "hub", SMALL)
    world = LAYOUTS[layout][0]
    for wrong, _ in pool.run(world, mesh_trials.load, "Native", layout, *pair, SMALL, {}):
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 x TP 2x2", "FSDP2 x TP x EP 2x2"])
def test_each_rank_reads_what_it_needs(layout: str, wide: tuple[str, str]) -> None:
    options = {"share": "off"}
    for wrong, sizes in pool.run(LAYOUTS[layout][0], mesh_trials.load, "Native", layout, *wide, WIDE, options):
        assert not wrong
        assert sizes["needed"] == sizes["own"]
        assert sizes["read"] <= 1.05 * sizes["needed"]


@pytest.mark.parametrize(
    ("kind", "saved", "target"),
    [
        ("Hub", "FSDP2 4", "one process"), ("Hub", "FSDP2 4", "FSDP2 2"), ("Hub", "FSDP2 x TP x EP 2x2", "FSDP2 3"),
        ("Native", "FSDP2 3", "FSDP2 x TP x EP 2x2"), ("Native", "FSDP2 2", "FSDP1 2"), ("Hub", "FSDP1 2", "FSDP2 2"),
        ("Hub", "FSDP1 flat 2", "FSDP2 2"),
    ],
)  # fmt: skip
@pytest.mark.fast_cases("Hub-FSDP2 x TP x EP 2x2-FSDP2 3")
def test_a_checkpoint_of_many_cells_with_its_optimizer(kind: str, saved: str, target: str, tmp_path: Path) -> None:
    pair = (str(tmp_path / "c"), str(tmp_path / "truth.pt"))
    other = "Native" if kind == "Hub" else "Hub"
    pool.run(LAYOUTS[saved][0], mesh_trials.save, other, saved, *pair, SMALL)
    for wrong, _ in pool.run(LAYOUTS[target][0], mesh_trials.load, kind, target, *pair, SMALL, {}):
        assert not wrong


@pytest.mark.parametrize("layout", ["DDP 2", "HSDP 2x2"])
@pytest.mark.parametrize("source", ["hub", "cells"])
@pytest.mark.fast_cases("hub-HSDP 2x2", "cells-DDP 2")
def test_replicas_read_once(layout: str, source: str, tmp_path: Path) -> None:
    world = LAYOUTS[layout][0]
    if source == "hub":
        kind, pair, options = "Native", hub_folder(tmp_path / "hub", SMALL), dict[str, Any]()
    else:
        kind, pair, options = "Hub", (str(tmp_path / "c"), str(tmp_path / "truth.pt")), {"only": "model"}
        pool.run(3, mesh_trials.save, "Native", "FSDP2 3", *pair, SMALL)
    results = pool.run(world, mesh_trials.load, kind, layout, *pair, SMALL, options, True)
    for wrong, sizes in results:
        assert not wrong
        assert sizes["needed"] == sizes["own"] and sizes["received"]
    if source == "hub":
        assert sum(sizes["received"] for _, sizes in results) == sum(sizes["needed"] for _, sizes in results) // 2
