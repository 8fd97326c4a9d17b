"""Sections of more tensors than one header can name: several data files of one rank, alike on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.ondisk import datafile
from holdfast.ondisk.box import whole
from holdfast.plan import plan
from holdfast.plan.plan import PiecedTensor, volumes_of
from tests import format_reader, pool


def _tensors(*found: str, shape: tuple[int, ...] = (3,)) -> dict[str, PiecedTensor]:
    return {name: PiecedTensor("float32", shape, [(whole(shape), 0)]) for name in found}


def test_as_a_rule_there_is_one() -> None:
    assert volumes_of(_tensors("model/a", "model/b", "step")) == {}


def test_each_section_begins_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROOM", 270)
    found = volumes_of(_tensors("a/1", "b/1", "a/2", "a/3", "b/2", "a/4", "a/5", "lone"))
    assert found == {"a/3": 1, "a/4": 1, "a/5": 2}


def test_long_names_and_many_axes_take_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROOM", 500)
    assert volumes_of(_tensors("a/1", "a/2", "a/3")) == {}
    assert volumes_of(_tensors("a/1", "a/" + "é" * 100, "a/3")) == {"a/3": 1}
    assert volumes_of(_tensors("a/1", "a/2", "a/3", shape=(1,) * 9)) == {"a/3": 1}


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float8_e4m3fn"])
def test_whole_pieces_take_what_was_reckoned_and_never_twice_as_much(dtype: str) -> None:
    huge = 1 << 40
    pieces = datafile.arrange(
        datafile.Piece(f"layer.{n}", dtype, (huge, 1), huge * 8) for n in range(9, 0, -1)
    )  # so large that their offsets are as long as they ever are
    header = datafile.build_header(pieces, save="0" * 16, rank=0, section="model", shapes={}, sums="")
    room = sum(len(f"model/{p.key}") + plan._ENTRY + 2 * plan._AXIS for p in pieces)
    assert room / 2 < len(header.rstrip()) + len(pieces) * 17 < 2 * room


def _state(rank: int = 0) -> dict[str, Any]:
    return {
        "model": {f"experts.{n}.scale": torch.arange(n % 5 * 1.0) + n for n in range(40)},
        "buffers": {"x": torch.tensor(7), "y": torch.ones(2, 3)},
        "noise": {"own": holdfast.PerRank(rank), "t": torch.ones(3)},
        "shards": {
            f"s{n}": holdfast.Shard(torch.full((2,), 10.0 * n + rank), (4,), (2 * rank,)) for n in range(9)
        },
    }  # fmt: skip


def _save(path: str, room: int) -> list[str]:
    before, plan.ROOM = plan.ROOM, room
    try:
        return [f.path for f in holdfast.save(_state(dist.get_rank()), path).manifest.data_files]
    finally:
        plan.ROOM = before


def test_two_ranks_write_the_same_volumes(tmp_path: Path) -> None:
    paths, again = pool.run(2, _save, str(tmp_path / "c"), 1000)
    assert paths == again
    save = datafile.save_of(paths[0])
    assert {p for p in paths if p.startswith("shards/")} == {
        f"shards/{rank:05d}-of-00002.{volume}{save}.safetensors" for rank in (0, 1) for volume in ("", "1.")
    }
    assert len([p for p in paths if p.startswith("model/")]) > 4
    assert all(datafile.save_of(path) == save for path in paths)
    assert {str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*.safetensors")} == set(paths)
    found = format_reader.read(tmp_path / "c")
    assert found.per_rank["noise/own"] == [0, 1]
    for n in range(40):
        assert torch.equal(found.tensors[f"model/experts.{n}.scale"], torch.arange(n % 5 * 1.0) + n)
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    assert torch.equal(checkpoint.state_dict("shards")["shards"]["s7"], torch.tensor([70.0, 70.0, 71.0, 71.0]))
    assert [checkpoint.per_rank("noise/own", rank) for rank in (0, 1)] == [0, 1]


def test_saved_over_loaded_copied_and_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROOM", 700)
    state = {key: value for key, value in _state().items() if key != "shards"}
    holdfast.save(state, tmp_path / "c")
    holdfast.save(state, tmp_path / "c", overwrite=True)
    files = {f.path for f in holdfast.open(tmp_path / "c").manifest.data_files}
    assert {str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*.safetensors")} == files
    into: dict[str, Any] = {
        "model": {name: torch.full_like(t, -1.0) for name, t in state["model"].items()},
        "buffers": {"x": torch.tensor(0), "y": torch.zeros(2, 3)},
        "noise": {"own": holdfast.PerRank(5), "t": torch.zeros(3)},
    }
    holdfast.load(tmp_path / "c", into)
    for name, tensor in state["model"].items():
        assert torch.equal(into["model"][name], tensor)
    with holdfast.Saver() as saver:
        checkpoint = saver.save(state, tmp_path / "d").wait()
    checkpoint.verify()
    assert len(checkpoint.manifest.data_files) == len(files)
