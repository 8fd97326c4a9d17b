"""From a found state to a checkpoint: what is proved, what is told, and what no file can make us do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.formats.assemble import ForeignState, assemble
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.simplified import PerRank
from holdfast.formats.sources import all_of, file
from holdfast.formats.stored import Stored, concatenated, cut, float_scalar, plain
from holdfast.ondisk.box import Box
from holdfast.storage.local.local_place import LocalPlace


@pytest.fixture
def tensor(tmp_path: Path) -> Stored:
    """0, 1, … 23 as float32, of shape (6, 4)."""
    path = tmp_path / "data"
    path.write_bytes(torch.arange(24.0).numpy().tobytes())
    return plain("float32", (6, 4), all_of(file(path)))


def opened(state: dict[str, Any], path: Path = LocalPlace("/there"), **facts: Any) -> Checkpoint:
    return Checkpoint(path, reader=assemble(ForeignState("a test", state, **facts), path))


def test_what_it_is_goes_through(tensor: Stored) -> None:
    checkpoint = opened(
        {"model": {"w": tensor, "tied": tensor}, "step": 3, "list": [1, (2.5, None)], "ids": {0: "a", 1: "b"},
         "none": {}},
        step=3, world_size=2,
    )  # fmt: skip
    state = checkpoint.state_dict()
    assert torch.equal(state["model"]["w"], torch.arange(24.0).reshape(6, 4))
    assert state["model"]["tied"] is state["model"]["w"], "one tensor under two names"
    assert (state["step"], state["list"], state["ids"], state["none"]) == (3, [1, (2.5, None)], {0: "a", 1: "b"}, {})
    assert (checkpoint.format, checkpoint.step, checkpoint.world_size) == ("a test", 3, 2)
    assert torch.equal(checkpoint.read("model/w", [(4, 6), (1, 2)]), torch.tensor([[17.0], [21.0]]))


def test_a_hole_is_refused(tensor: Stored) -> None:
    holed = Stored("float32", (6, 4), ((Box((0, 0), (4, 4)), cut(tensor, 0, 4).pieces[0][1]),))
    with pytest.raises(holdfast.errors.Damaged, match=r"model/w .*not whole"):
        opened({"model": {"w": holed}})


def test_an_overlap_is_refused(tensor: Stored) -> None:
    twice = Stored(
        "float32", (6, 4),
        ((Box((0, 0), (4, 4)), cut(tensor, 0, 4).pieces[0][1]), (Box((2, 0), (4, 4)), cut(tensor, 2, 6).pieces[0][1])),
    )  # fmt: skip
    with pytest.raises(holdfast.errors.Damaged, match="not whole"):
        opened({"model": {"w": twice}})


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(holdfast.errors.Damaged, match="contains itself"):
        opened({"loop": loop})


def test_what_multiplies_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.formats.assemble.MAX_LEAVES", 1000)
    laughs: list[Any] = [1]
    for _ in range(40):
        laughs = [laughs, laughs]
    with pytest.raises(holdfast.errors.Damaged, match="over and over"):
        opened({"laughs": laughs})
    with pytest.raises(holdfast.errors.Damaged, match="over and over"):
        opened({"own": PerRank((laughs,))}).per_rank("own", 0)


def test_keys_that_read_the_same_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        checkpoint = opened({"v": {1: "number", "1": "text"}})
    assert list(checkpoint.left_out) == ["v/1"] and "v/1" in caplog.text


def test_what_has_no_place_is_told_and_the_rest_is_there(tensor: Stored) -> None:
    checkpoint = opened({"model": {"w": tensor, "sharded": Record("torch.distributed.tensor.DTensor")}})
    assert list(checkpoint.tensors) == ["model/w"] and list(checkpoint.left_out) == ["model/sharded"]


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (Name("torch.bfloat16"), torch.bfloat16),
        (Name("composer.Thing.KIND"), "composer.Thing.KIND"),
        (Record("argparse.Namespace", (), {"a": 1}), {"a": 1}),
        (Record("deepspeed.Enum", (2,)), 2),
        (Record("datetime.timedelta", (1, 2, 500_000)), 86402.5),
        ({"b", "a"}, ["a", "b"]),
    ],
)
def test_records_come_as_values(leaf: Any, value: Any) -> None:
    assert opened({"v": leaf}).state_dict()["v"] == value


def test_thousands_of_counters_are_one_source() -> None:
    checkpoint = opened({"s": {str(i): float_scalar(float(i), LocalPlace("/there")) for i in range(3000)}})
    assert len(checkpoint.manifest.files) == 1
    assert [float(t) for t in checkpoint.state_dict()["s"].values()] == [float(i) for i in range(3000)]


def test_values_of_each_rank(tensor: Stored) -> None:
    checkpoint = opened({"rng": PerRank(({"t": tensor, "n": 1}, {"t": cut(tensor, 0, 2), "n": 2}))}, world_size=2)
    assert checkpoint.differing == ["rng"] and "rng" not in checkpoint.state_dict()
    own = checkpoint.per_rank("rng", 1)
    assert own["n"] == 2 and torch.equal(own["t"], torch.arange(8.0).reshape(2, 4))


def test_pieces_of_many_files(tmp_path: Path) -> None:
    """More files than a process may hold open."""
    parts = []
    for i in range(1500):
        path = tmp_path / str(i)
        path.write_bytes(torch.tensor([float(i)]).numpy().tobytes())
        parts.append(plain("float32", (1,), all_of(file(path))))
    checkpoint = opened({"model": {"w": concatenated(parts)}})
    assert torch.equal(checkpoint.read("model/w"), torch.arange(1500.0))


def test_a_file_that_shrank_is_told(tensor: Stored, tmp_path: Path) -> None:
    checkpoint = opened({"model": {"w": tensor}})
    (tmp_path / "data").write_bytes(bytes(40))
    with pytest.raises(holdfast.errors.Damaged, match="data ends at byte 40"):
        checkpoint.state_dict()
