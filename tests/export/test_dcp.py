"""Conversions to torch.distributed.checkpoint: what its own `load` makes of them, on a mesh and alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.export import dcp as exporter
from tests import pool
from tests.export import states


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "c"
    made = holdfast.convert(source, path, to="dcp")
    assert "nothing" in made.left_out, "an empty dict has no name there"
    return path


def as_dcp_keeps_it(state: dict[str, Any]) -> dict[str, Any]:
    """Keys of dicts are texts there, and a dict that is empty is lost."""
    kept = {key: value for key, value in state.items() if key != "nothing"}
    return {**kept, "numbers": {str(key): value for key, value in state["numbers"].items()}}


def test_torch_unshards_it(source: Path, converted: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(converted, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    states.same(loaded, as_dcp_keeps_it(states.whole(holdfast.open(source))))


def load_on_a_mesh(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def empty(placement: Any) -> DTensor:
        return distribute_tensor(torch.zeros(states.ROWS, states.WIDTH), mesh, [placement])

    state = {
        "model": {"rows.weight": empty(Shard(1)), "seen": torch.tensor(0)},
        "optimizer": {"columns": empty(Shard(0))},
        "layers": [torch.zeros(3), {"w": torch.ones(2, 2)}],
        "config": {"lr": 0.0, "big": 0, "raw": b""},
        "step": 0,
        "numbers": {1: 0},
    }
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["model"]["rows.weight"].full_tensor(), states.wide(0))
    assert torch.equal(state["optimizer"]["columns"].full_tensor(), states.wide(1))
    assert state["layers"][0].sum() == 3 and not state["layers"][1]["w"].any()
    assert state["config"] == {"lr": 0.1, "big": 2**80, "raw": b"\0x"} and state["step"] == 7


def test_torch_loads_it_on_a_mesh(converted: Path) -> None:
    pool.run(2, load_on_a_mesh, str(converted))


def test_the_metadata_is_what_torch_writes(tmp_path: Path) -> None:
    """The same names, paths, dtypes and sizes as torch's own checkpoint of the same state.

    Without the strides that torch 2.15 notes too: it takes metadata that has none, and an older torch takes no other.
    """
    state = {key: value for key, value in states.small().items() if key != "nothing"}
    holdfast.save(state, tmp_path / "ours")
    holdfast.convert(tmp_path / "ours", tmp_path / "converted", to="dcp")
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("converted", "theirs"))
    assert type(ours) is type(theirs) and ours.version == theirs.version
    assert ours.planner_data == theirs.planner_data
    for of_tensor in theirs.state_dict_metadata.values():
        if hasattr(of_tensor, "properties"):
            of_tensor.properties.strides = None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()


def test_large_tensors_lie_in_chunks_of_rows_in_several_files(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c", to="dcp", max_shard_bytes=1 << 20, only=["model", "optimizer"])
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["model.rows.weight"].chunks
    assert len(chunks) == 2 and all(c.sizes[1] == states.WIDTH for c in chunks)
    assert all(c.sizes.numel() * 4 <= exporter.CHUNK for c in chunks)
    assert len({place.relative_path for place in metadata.storage_data.values()}) >= 3
    dcp_to_torch_save(tmp_path / "c", tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt")["model"]["rows.weight"], states.wide(0))


def test_tied_tensors_are_stored_once(source: Path, converted: Path) -> None:
    places = pickle.loads((converted / ".metadata").read_bytes()).storage_data
    found = {
        (p.relative_path, p.offset) for key, p in places.items() if key.fqn in ("model.emb.weight", "model.head.weight")
    }
    assert len(found) == 1


def test_tuples_of_tensors_become_lists(tmp_path: Path) -> None:
    state = {"pair": (torch.ones(2), {"x": torch.zeros(3)}), "plain": (1, (2, "a"))}
    holdfast.save(state, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "d", to="dcp")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "state.pt")
    states.same(torch.load(tmp_path / "state.pt"), {"pair": list(state["pair"]), "plain": (1, (2, "a"))})


def test_names_that_become_one_are_refused(tmp_path: Path) -> None:
    holdfast.save({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Mismatch, match=r"both called 'a\.b\.c'"):
        holdfast.convert(tmp_path / "c", tmp_path / "d", to="dcp")
    assert not list(tmp_path.glob("d*"))
    holdfast.convert(tmp_path / "c", tmp_path / "d", to="dcp", rename={"a.b": "other"})


def train(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    model(torch.ones(4, 33)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_fsdp2(path: str) -> None:
    model, optimizer = train(1)
    holdfast.save({"model": model, "optimizer": optimizer}, path)


def load_fsdp2(path: str) -> None:
    """As torch's own tutorial loads: into the state dict of a model that was trained otherwise."""
    model, optimizer = train(2)
    theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(theirs, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=theirs["model"], optim_state_dict=theirs["optimizer"])
    wanted, other = train(1)
    for found, right in ((model.state_dict(), wanted.state_dict()), (optimizer.state_dict(), other.state_dict())):
        states.same(local(found), local(right))


def local(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: local(value) for key, value in node.items()}
    if isinstance(node, list):
        return [local(value) for value in node]
    return node.to_local() if isinstance(node, DTensor) else node


def test_a_training_run_goes_on_with_torch_alone(tmp_path: Path) -> None:
    pool.run(2, save_fsdp2, str(tmp_path / "c"))
    holdfast.convert(tmp_path / "c", tmp_path / "dcp", to="dcp")
    pool.run(2, load_fsdp2, str(tmp_path / "dcp"))
