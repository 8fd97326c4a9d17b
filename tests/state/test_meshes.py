"""Every save mesh against every load mesh: bit-equal, optimizer included, also into optimizers that never stepped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import meshes, pool
from tests.marks import every


def _saved() -> Sequence[str]:
    """The layouts that save."""
    return every(3, [*meshes.LAYOUTS])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("meshes")
    pairs = []
    for number, layout in enumerate(_saved()):
        pair = (str(folder / f"ckpt{number}"), str(folder / f"truth{number}.pt"))
        pool.run(meshes.LAYOUTS[layout][0], meshes.save_one, layout, *pair)
        pairs.append(pair)
    return pairs


@pytest.mark.parametrize("layout", meshes.LAYOUTS)
@pytest.mark.slow_cases("FSDP2 2", "FSDP2 4", "HSDP 2x2", "HSDP x TP 2x2x2", "FSDP1 flat 4", "FSDP1 hybrid 2x2")
def test_load_on_every_mesh(layout: str, checkpoints: list[tuple[str, str]]) -> None:
    for rank, problems in enumerate(pool.run(meshes.LAYOUTS[layout][0], meshes.load_all, layout, checkpoints, 1)):
        wrong = {saved: names for saved, names in zip(_saved(), problems, strict=True) if names}
        assert not wrong, f"rank {rank} of {layout}"


@pytest.mark.parametrize("layout", ["one process", "FSDP2 x TP 2x2", "FSDP1 2", "FSDP1 flat 4", "DDP 2"])
@pytest.mark.slow_cases("FSDP2 x TP 2x2", "FSDP1 flat 4")
def test_optimizer_that_never_stepped(layout: str, checkpoints: list[tuple[str, str]]) -> None:
    for rank, problems in enumerate(pool.run(meshes.LAYOUTS[layout][0], meshes.load_all, layout, checkpoints, 0)):
        wrong = {saved: names for saved, names in zip(_saved(), problems, strict=True) if names}
        assert not wrong, f"rank {rank} of {layout}"


def test_every_rank_writes_its_share_of_a_ddp_state(tmp_path: Path) -> None:
    layout = "DDP 2"
    pool.run(2, meshes.save_one, layout, str(tmp_path / "c"), str(tmp_path / "t"))
    sizes = [0, 0]
    for file in (tmp_path / "c").rglob("*.safetensors"):
        sizes[int(file.name[:5])] += file.stat().st_size
    assert min(sizes) > 0
