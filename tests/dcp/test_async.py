"""`dcp.async_save`: what training may change when, what the futures tell, in threads and by a process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
import holdfast.dcp as dcp
from holdfast.write import file_writer
from tests import meshes, pool
from tests.dcp import savers
from tests.dcp.test_save_load import App, _fresh, _same, _trained

KINDS = [dcp.AsyncCheckpointerType.THREAD, dcp.AsyncCheckpointerType.PROCESS]
LONG = 240.0


def _stager(*, later: bool) -> Any:
    options = dcp.staging.StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=later, use_non_blocking_copy=False
    )
    return dcp.staging.DefaultStager(options)


def changed_at_once(folder: str, kind: dcp.AsyncCheckpointerType) -> list[str]:
    """Everything is overwritten right after each return; what was saved is what was there at the call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(40.0).view(10, 4)
    state = {
        "model": {"w": distribute_tensor(full, mesh, [Shard(0)]), "b": torch.ones(3)},
        "app": App(1.0), "cfg": {"n": [0]}, "step": 0,
    }  # fmt: skip
    futures = []
    for step in range(3):
        future = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", async_checkpointer_type=kind)
        assert isinstance(future, Future)
        futures.append(future)
        state["model"]["w"].to_local().add_(1000)
        state["model"]["b"].add_(1)
        state["app"].tensor.add_(1)
        state["cfg"]["n"][0] += 1
        state["step"] += 1
    wrong = []
    for step, future in enumerate(futures):
        described = future.result(LONG)
        assert isinstance(described, dcp.Metadata) and "model.w" in described.state_dict_metadata
        into = {
            "model": {"w": torch.zeros(10, 4), "b": torch.zeros(3)}, "app": App(0.0), "cfg": {"n": []}, "step": -1
        }  # fmt: skip
        dcp.load(into, checkpoint_id=f"{folder}/{step}")
        seen = into["model"]["w"], into["model"]["b"][0], into["app"].tensor[0], into["cfg"]["n"], into["step"]
        if not _same(seen, (full + 1000 * step, torch.tensor(1.0 + step), torch.tensor(1.0 + step), [step], step)):
            wrong.append(f"{step}: {seen}")
    savers.close_all()
    return wrong


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.value))
def test_what_is_saved_is_the_state_at_the_call(kind: dcp.AsyncCheckpointerType, tmp_path: Path) -> None:
    assert pool.run(2, changed_at_once, str(tmp_path), kind) == [[], []]


def objects(folder: str, layout: str) -> list[str]:
    """Modules and optimizers as they are: with a stager that stages at once their parameters change by hand."""
    state = meshes.build(layout, 7, steps=2)
    full = meshes.gathered(state)
    future = dcp.async_save(state, checkpoint_id=folder, async_stager=dcp.staging.BlockingAsyncStager())
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    future.result(LONG)
    other = meshes.build(layout, 8, steps=0)
    dcp.load(other, checkpoint_id=folder)
    found = meshes.gathered(other)
    savers.close_all()
    return [name for name in {*full, *found} if name not in found or not torch.equal(full[name], found[name])]


@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP1 2"])
def test_objects_may_change_as_soon_as_it_returns(layout: str, tmp_path: Path) -> None:
    assert pool.run(2, objects, str(tmp_path / "c"), layout) == [[], []]


def test_the_two_futures_of_a_stager_that_stages_later(tmp_path: Path) -> None:
    gate, real = threading.Event(), file_writer._write

    def write(*args: Any) -> None:
        assert gate.wait(LONG)
        real(*args)

    model, optimizer = _trained(1)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    stager = _stager(later=True)
    file_writer._write = write
    try:
        response = dcp.async_save({"m": model, "o": optimizer}, checkpoint_id=tmp_path / "c", async_stager=stager)
        assert isinstance(response, dcp.AsyncSaveResponse)
        assert response.staging_completion.result(LONG) is None
        optimizer.step()
        with torch.no_grad():
            model[0].weight.zero_()
        assert not response.upload_completion.done()
    finally:
        gate.set()
        file_writer._write = real
    assert "m.0.weight" in response.upload_completion.result(LONG).state_dict_metadata
    other, its = _fresh()
    dcp.load({"m": other, "o": its}, checkpoint_id=tmp_path / "c")
    assert _same(dict(other.state_dict()), expected)
    stager.close()
    savers.close_all()


def test_stagers_that_stage_at_once_give_one_future_and_others_are_refused(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    for stager in (_stager(later=False), dcp.staging.BlockingAsyncStager()):
        future = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)
        assert isinstance(future, Future)
        state["x"].add_(1)
        future.result(LONG)
    assert bool((holdfast.open(tmp_path / "c").read("x") == 2).all())

    class Stager(dcp.staging.BlockingAsyncStager):
        pass

    with pytest.raises(holdfast.errors.Unsupported, match=r"async_stager=.*holdfast\.dcp\.Writer"):
        dcp.async_save(state, checkpoint_id=tmp_path / "d", async_stager=Stager())
    savers.close_all()


def failing(folder: str) -> list[str]:
    """A failure is told by its own future alone, on every rank; the saves before and after it are not touched."""
    rank = dist.get_rank()
    good = dcp.async_save({"x": torch.ones(2)}, checkpoint_id=f"{folder}/0")
    bad = dcp.async_save({"x": torch.ones(2), "seed": rank}, checkpoint_id=f"{folder}/1")
    after = dcp.async_save({"x": torch.ones(2)}, checkpoint_id=f"{folder}/2")
    response = dcp.async_save({"f": print}, checkpoint_id=f"{folder}/3", async_stager=_stager(later=True))
    assert good.result(LONG) and after.result(LONG) and response.staging_completion.result(LONG) is None
    texts = []
    for future in (bad, response.upload_completion):
        error = future.exception(LONG)
        assert isinstance(error, holdfast.SaveFailed)
        texts.append(str(error))
    savers.close_all()
    return texts


def test_failures_come_through_the_future(tmp_path: Path) -> None:
    one, two = pool.run(2, failing, str(tmp_path))
    assert one == two and "seed differs between ranks" in one[0] and "f: builtins" in one[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "2"]


def alone(folder: str) -> None:
    """One rank of a group saves for itself; nobody else is met, and the group's own saves are not disturbed."""
    if dist.get_rank() == 1:
        state = {"w": torch.ones(4), "mine": holdfast.PerRank(torch.ones(2))}
        future = dcp.async_save(state, checkpoint_id=f"{folder}/alone", no_dist=True)
        state["w"].zero_()
        state["mine"].value.zero_()
        future.result(LONG)
        bad = dcp.async_save({"f": print}, checkpoint_id=f"{folder}/bad", no_dist=True)
        assert isinstance(bad.exception(LONG), holdfast.SaveFailed)
    dcp.async_save({"x": torch.ones(1)}, checkpoint_id=f"{folder}/all").result(LONG)
    savers.close_all()


def test_one_rank_of_a_group_alone(tmp_path: Path) -> None:
    pool.run(2, alone, str(tmp_path))
    checkpoint = holdfast.open(tmp_path / "alone")
    assert (
        checkpoint.world_size == 1 and bool(checkpoint.read("w").all()) and bool(checkpoint.per_rank("mine", 0).all())
    )
    assert holdfast.open(tmp_path / "all").world_size == 2 and not (tmp_path / "bad").exists()
