"""Conversions from states in memory: the files of a conversion from a checkpoint, byte for byte; failures; memory."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests import meshes, pool
from tests.export import live_jobs, states
from tests.export.conftest import source

__all__ = ["source"]  # the fixture


@pytest.mark.fast_cases("DDP 2", "FSDP2 2", "FSDP2 3", "FSDP2 x TP 2x2", "FSDP1 2")
@pytest.mark.parametrize("layout", list(meshes.LAYOUTS))
def test_the_same_bytes_as_by_way_of_a_checkpoint(layout: str, tmp_path: Path) -> None:
    world = meshes.LAYOUTS[layout][0]
    live = pool.run(world, live_jobs.trained, layout, str(tmp_path))
    assert states.files(tmp_path / "live") == states.files(tmp_path / "converted")
    assert {one.nbytes for one in live} == {(tmp_path / "live" / "model.safetensors").stat().st_size}
    assert all(any(name.startswith("optimizer/") for name in one.left_out) for one in live)
    assert "blocks.0.up.weight" in load_file(tmp_path / "live" / "model.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["converted", "live", "saved"], "nothing else is left"


@pytest.mark.parametrize(
    "options",
    [
        {}, {"dtype": torch.float16, "max_shard_bytes": 5 << 20}, {"only": "model/*weight"}, {"only": "optimizer"},
        {"rename": {"emb": "wte", "head.weight": "lm_head.weight"}},
    ],
    ids=["plain", "cast", "only", "optimizer", "rename"],
)  # fmt: skip
def test_the_options_mean_what_they_mean_for_a_checkpoint(options: Any, source: Path, tmp_path: Path) -> None:
    expected = holdfast.convert(source, tmp_path / "converted", to="huggingface", **options)
    live = pool.run(2, live_jobs.small, str(tmp_path / "live"), options)
    assert states.files(tmp_path / "live") == states.files(tmp_path / "converted")
    for one in live:
        assert (one.tensors, one.tied, one.renamed, one.cast) == (
            expected.tensors, expected.tied, expected.renamed, expected.cast,
        )  # fmt: skip
        assert set(one.skipped) == set(expected.skipped) and one.path == tmp_path / "live"
    written = [one.bytes_read for one in live]
    assert sum(written) == sum(t.numel() * t.itemsize for t in _tensors(tmp_path / "live").values())
    assert max(written) < 0.6 * sum(written), "ranks write about equally much"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_shards_along_any_axis_and_many_small_tensors(world: int, tmp_path: Path) -> None:
    pool.run(world, live_jobs.on_one_machine, str(tmp_path / "live"), {"max_shard_bytes": 8 << 20})
    tensors = _tensors(tmp_path / "live")
    assert tensors.keys() == live_jobs.SHAPES.keys()
    for number, (name, shape) in enumerate(live_jobs.SHAPES.items()):
        assert torch.equal(tensors[name], live_jobs.full_tensor(5 + number, shape)), name
    index = json.loads((tmp_path / "live" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys() and len(set(index["weight_map"].values())) == 3


@pytest.mark.slow
def test_ranks_on_several_machines_never_write_to_one_page(tmp_path: Path) -> None:
    pool.run(2, live_jobs.on_one_machine, str(tmp_path / "one"), {})
    pool.run(2, live_jobs.on_two_machines, str(tmp_path / "two"))
    assert states.files(tmp_path / "one") == states.files(tmp_path / "two")
    errors = pool.attempt(2, live_jobs.with_too_many_edges, str(tmp_path / "three"))
    assert all("Unsupported" in e.kinds and "convert the checkpoint" in e.text for e in errors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("called", list(live_jobs.MAPS))
def test_under_a_map_too_the_same_bytes_as_by_way_of_a_checkpoint(called: str, world: int, tmp_path: Path) -> None:
    for dtype in (None, torch.bfloat16):
        folder = tmp_path / str(dtype)
        live = pool.run(world, live_jobs.under_a_map, str(folder), called, dtype)
        assert states.files(folder / "live") == states.files(folder / "converted")
        assert live[0].left_out == ["optimizer/m"] and live[0].tensors


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["together", "refused", "left"])
@pytest.mark.fast_cases("together-2")
def test_ranks_of_a_machine_fill_windows_together_and_can_do_without(how: str, world: int, tmp_path: Path) -> None:
    pool.run(world, live_jobs.on_one_machine, str(tmp_path / "plain"), {})
    filled = pool.run(world, live_jobs.together, str(tmp_path / how), how)
    assert all(count > 10 for count in filled) if how == "together" else filled[1] == (0 if how == "refused" else 5)
    assert states.files(tmp_path / "plain") == states.files(tmp_path / how)


def test_a_rank_that_fails_in_a_window_of_several_ranks(tmp_path: Path) -> None:
    errors = pool.attempt(2, live_jobs.together, str(tmp_path / "t"), "failed")
    assert all("StorageError" in e.kinds and e.fields["rank"] == 1 for e in errors), errors
    assert not list(tmp_path.iterdir())


def test_every_kind_of_memory(tmp_path: Path) -> None:
    base = torch.randn(50, 60)
    model = {
        "transposed": torch.randn(300, 200).t(), "part": base[10:20, 5:50:3], "expanded": torch.ones(1, 5).expand(4, 5),
        "conj": torch.randn(5, 5, dtype=torch.complex64).conj(), "neg": torch.randn(4).to(torch.complex64).conj().imag,
        "number": torch.tensor(3), "none": torch.empty(0, 3), "base": base, "bool": torch.arange(7) % 2 == 0,
        "float8": torch.randn(16).to(torch.float8_e4m3fn), "parameter": torch.nn.Parameter(torch.randn(9)),
    }  # fmt: skip
    for dtype in (None, torch.bfloat16):
        holdfast.convert({"model": model}, tmp_path / "t", to="huggingface", dtype=dtype, overwrite=True)
        loaded = load_file(tmp_path / "t" / "model.safetensors")
        assert loaded.keys() == model.keys()
        for name, tensor in model.items():
            plain = tensor.detach().resolve_conj().resolve_neg()
            wanted = plain.to(dtype) if dtype is not None and plain.is_floating_point() else plain
            states.same(loaded[name], wanted.contiguous(), name)


def test_a_target_in_a_store(tmp_path: Path) -> None:
    target = StorePlace(Memory(), "bucket") / "model"
    done = holdfast.convert({"model": {"w": torch.arange(9.0)}}, target, to="huggingface", extras={"config.json": b""})
    assert done.beside == ["config.json"]
    assert holdfast.open(target).read("model/w").tolist() == list(range(9))


def test_a_save_under_way(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(9.0)}}
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "saved")
        holdfast.convert(saving, tmp_path / "t", to="huggingface")
        assert saving.done
        with pytest.raises(holdfast.SaveFailed, match="already holds"):
            holdfast.convert(saver.save(state, tmp_path / "saved"), tmp_path / "u", to="huggingface")
    assert load_file(tmp_path / "t" / "model.safetensors")["w"].tolist() == list(range(9))
    assert not (tmp_path / "u").exists()


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "step": 3}
    with pytest.raises(holdfast.errors.Unsupported, match=r"by holdfast\.save"):
        holdfast.convert(state, tmp_path / "t")
    for to in ("torch", "dcp"):
        with pytest.raises(holdfast.errors.Unsupported, match=r"save the state \(holdfast.save\) and convert"):
            holdfast.convert(state, tmp_path / "t", to=to)
    with pytest.raises(holdfast.errors.Mismatch, match=r"the state has nothing that fits only='modle'"):
        holdfast.convert(state, tmp_path / "t", to="huggingface", only="modle")
    with pytest.raises(holdfast.errors.Mismatch, match="the state has no tensors that fit"):
        holdfast.convert(state, tmp_path / "t", to="huggingface", only="step")
    with pytest.raises(holdfast.errors.Mismatch, match=r"the state has no section model, but tensors in a, b"):
        both = {"a": {"w": torch.ones(3)}, "b": {"w": torch.ones(3)}}
        holdfast.convert(both, tmp_path / "t", to="huggingface")
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(holdfast.errors.StorageError, match="exists; choose another path, or pass overwrite=True"):
        holdfast.convert(state, tmp_path / "t", to="huggingface")
    assert (tmp_path / "t" / "model.safetensors").read_bytes() == b"mine"
    holdfast.convert(state, tmp_path / "t", to="huggingface", overwrite=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.safetensors", "t"]


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ("with_another_state", "Mismatch", r"model/w is float32 [4] on rank 0 and float32 [5] on rank 1"),
        ("with_other_arguments", "Mismatch", "with the same arguments on every rank"),
        ("without_a_state", "Unsupported", "model/w is on the meta device"),
        ("with_a_bad_disk", "StorageError", "Input/output error"),
    ],
)
def test_a_failure_of_one_rank_is_raised_by_all(job: str, kind: str, text: str, tmp_path: Path) -> None:
    errors = pool.attempt(2, getattr(live_jobs, job), str(tmp_path / "t"))
    assert all(kind in e.kinds and text in e.text for e in errors), errors
    assert not list(tmp_path.iterdir())
    pool.run(2, live_jobs.on_one_machine, str(tmp_path / "t"), {})


@pytest.mark.slow
def test_a_killed_rank_leaves_no_target_and_the_next_call_begins_from_the_start(tmp_path: Path) -> None:
    survivor, died = pool.attempt(2, live_jobs.and_be_killed, str(tmp_path / "t"))
    pool.close(2)
    assert died.kinds == ["Killed"] and "RankLost" in survivor.kinds and survivor.fields["rank"] == 1
    assert not (tmp_path / "t").exists()
    done = pool.run(2, live_jobs.on_one_machine, str(tmp_path / "t"), {})
    assert not any(one.bytes_resumed for one in done)
    assert _tensors(tmp_path / "t").keys() == live_jobs.SHAPES.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_full_disk_is_found_before_anything_is_copied(small_disk: Path) -> None:
    with pytest.raises(holdfast.errors.StorageError, match=r"cannot reserve .* bytes .*the disk is full") as caught:
        holdfast.convert({"model": {"w": torch.ones(1000, 5000)}}, small_disk / "t", to="huggingface")
    assert caught.value.errno == errno.ENOSPC and not list(small_disk.iterdir())


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[holdfast.events.Event] = []
    with holdfast.events.listen(seen.append):
        holdfast.convert({"model": {"w": torch.ones(5000, 5000)}}, tmp_path / "t", to="huggingface")
    told = [e for e in seen if e.task == "convert"]
    assert told[0].kind == "start" and told[-1].kind == "end" and told[-1].done == told[-1].total == 100_000_000


@pytest.mark.timed
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_stays_bounded(dtype: torch.dtype | None, tmp_path: Path) -> None:
    for nbytes, risen in pool.run(2, live_jobs.measured, str(tmp_path / "t"), 6000, dtype):
        assert nbytes == 192_000_000 and risen < 80 << 20
