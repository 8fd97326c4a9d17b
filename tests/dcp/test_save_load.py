"""`dcp.save` and `dcp.load` as torch's programs call them: what comes back, what is refused, and where."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
import holdfast.dcp as dcp
from tests import pool


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def _trained(seed: int, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    return model, torch.optim.AdamW(model.parameters(), lr=9.0)


def _same(ours: Any, theirs: Any) -> bool:
    """Two state dicts, bit for bit."""
    if isinstance(ours, torch.Tensor):
        return bool(torch.equal(ours, theirs)) and ours.dtype == theirs.dtype
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


# What comes back


def test_nested_values_come_back_in_their_own_dicts_and_lists(tmp_path: Path) -> None:
    values = {
        "a": 1, "f": float("inf"), "text": "é/%", "none": None, "raw": b"\0\1", "dtype": torch.bfloat16,
        "list": [1, [2, "x"]], "betas": (0.9, 0.99), "groups": [{"lr": 0.1, "p": ["w", "b"]}, {"lr": torch.ones(())}],
        "ints": {0: {"step": 3}, 1: torch.arange(2)}, "empty": [], "nothing": {},
    }  # fmt: skip
    dcp.save({"cfg": values, "step": 7}, checkpoint_id=tmp_path / "c")
    config: dict[str, Any] = {
        "a": 0, "f": 0.0, "text": object(), "none": 5, "raw": None, "dtype": None, "list": [], "betas": None,
        "groups": [{"lr": 0.0, "p": []}, {"lr": torch.zeros(())}], "empty": [1, 2], "nothing": {},
        "ints": {0: {"step": 0}, 1: torch.zeros(2, dtype=torch.int64)},
    }  # fmt: skip
    group, tensor = config["groups"][0], config["groups"][1]["lr"]
    state = {"cfg": config, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["cfg"] is config and config["groups"][0] is group and config["groups"][1]["lr"] is tensor
    assert _same(config, values) and state["step"] == 7
    assert holdfast.open(tmp_path / "c").step == 7


def test_what_only_the_checkpoint_has_is_left_alone(tmp_path: Path) -> None:
    dcp.save(
        {"m": {"a": torch.ones(2), "b": torch.ones(3)}, "cfg": {"x": 1, "y": 2}, "step": 1},
        checkpoint_id=tmp_path / "c",
    )
    state = {"m": {"b": torch.zeros(3)}, "cfg": {"y": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert _same(state, {"m": {"b": torch.ones(3)}, "cfg": {"y": 2}})


def test_missing_keys_are_an_error_that_names_all_and_changes_nothing(tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(2)}, "step": 1}, checkpoint_id=tmp_path / "c")
    state = {"model": {"weight": torch.zeros(2), "wieght": torch.zeros(2)}, "cfg": {"new": 1}, "step": 0}
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert "2 missing" in str(caught.value) and "cfg/new" in str(caught.value)
    assert "model/wieght (did you mean model/weight?)" in str(caught.value)
    assert not state["model"]["weight"].any() and state["step"] == 0
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert state["model"]["weight"].all() and state["step"] == 1 and state["cfg"] == {"new": 1}


def test_what_does_not_fit_is_an_error_and_another_dtype_is_cast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"m": {"a": torch.ones(2, 3), "b": torch.full((4,), 1.5), "n": 3}}, checkpoint_id=tmp_path / "c")
    for state, text in (
        ({"m": {"a": torch.zeros(3, 2)}}, "m/a: saved with shape [2, 3], here [3, 2]"),
        ({"m": {"a": 5}}, "m/a: saved as a tensor, here a value"),
    ):
        with pytest.raises(holdfast.errors.Mismatch) as caught:
            dcp.load(state, checkpoint_id=tmp_path / "c")
        assert text in str(caught.value)
    state = {"m": {"b": torch.zeros(4, dtype=torch.float64), "n": torch.zeros(())}}
    with caplog.at_level(logging.WARNING, "holdfast"):
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert "m/b (float32 to float64)" in caplog.text
    assert _same(state, {"m": {"b": torch.full((4,), 1.5, dtype=torch.float64), "n": 3}})  # as torch: the saved number


def test_tensors_directly_at_the_top(tmp_path: Path) -> None:
    model, _ = _trained(1)
    described = dcp.save(model.state_dict(), checkpoint_id=tmp_path / "c")
    other, _ = _fresh()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert _same(other.state_dict(), model.state_dict())
    assert list(described.state_dict_metadata) == list(model.state_dict())
    assert holdfast.open(tmp_path / "c").tensors["0.weight"].shape == (3, 4)


def test_the_answer_of_save_is_what_torch_would_have_said(tmp_path: Path) -> None:
    state = {
        "model": {"a.w": torch.ones(2, 3), "e": torch.ones(0, 3)}, "o": {"groups": [{"lr": 1}, {"p": torch.ones(1)}]},
        "t": (1, 2), "l": [1, 2], "deep": [[1], [torch.ones(1)]],
    }  # fmt: skip
    ours = dcp.save(state, checkpoint_id=tmp_path / "ours")
    theirs = torch_dcp.save(state, checkpoint_id=tmp_path / "theirs")
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    for key, entry in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[key]
        assert type(entry) is type(other)
        if isinstance(entry, dcp.TensorStorageMetadata):
            assert (entry.size, entry.properties.dtype) == (other.size, other.properties.dtype)
            assert entry.chunks == [chunk for chunk in other.chunks if chunk.sizes.numel()]


def test_a_tensor_on_the_meta_device_gets_memory(tmp_path: Path) -> None:
    dcp.save({"m": {"a": torch.arange(3.0)}}, checkpoint_id=tmp_path / "c")
    state = {"m": {"a": torch.empty(3, device="meta")}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert _same(state, {"m": {"a": torch.arange(3.0)}})


def sharded_on_meta(path: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = fully_shard(nn.Linear(3, 5), mesh=mesh)
    state = {"m": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["m"], assign=True)
    return _same(model.weight.full_tensor().detach(), torch.arange(15.0).view(5, 3))


def test_a_sharded_tensor_on_the_meta_device_gets_its_shard(tmp_path: Path) -> None:
    dcp.save({"m": {"weight": torch.arange(15.0).view(5, 3), "bias": torch.zeros(5)}}, checkpoint_id=tmp_path / "c")
    assert pool.run(2, sharded_on_meta, str(tmp_path / "c")) == [True, True]


def test_tuples_take_tensors_in_place_and_new_values(tmp_path: Path) -> None:
    dcp.save({"x": {"pair": (torch.ones(2), 5), "plain": (1, "a")}}, checkpoint_id=tmp_path / "c")
    tensor = torch.zeros(2)
    state = {"x": {"pair": (tensor, 0), "plain": ()}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert _same(state, {"x": {"pair": (torch.ones(2), 5), "plain": (1, "a")}})
    assert state["x"]["pair"][0] is tensor


# Objects


class App:
    """A Stateful as torch's tutorials have it."""

    def __init__(self, value: float) -> None:
        self.tensor, self.seen, self.loads = torch.full((2,), value), [int(value)], 0

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "seen": self.seen, "nested": {"sum": float(self.tensor.sum())}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["tensor"] is self.tensor  # filled in place
        self.seen, self.loads = state_dict["seen"], self.loads + 1
        assert state_dict["nested"] == {"sum": float(self.tensor.sum())}


class Both(OrderedDict[str, Any]):
    """A dict that is a Stateful as well: torch asks its methods."""

    loaded = False

    def state_dict(self) -> dict[str, Any]:
        return self

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = True


def test_objects_give_and_take_their_state_dict_at_any_depth(tmp_path: Path) -> None:
    saved = {"app": App(3.0), "both": Both(x=1, t=torch.ones(1)), "deep": {"list": [App(4.0)]}}
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    state = {"app": App(0.0), "both": Both(x=0, t=torch.zeros(1)), "deep": {"list": [App(0.0)]}}
    app, both, inner = state["app"], state["both"], state["deep"]["list"][0]
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["app"] is app and app.seen == [3] and app.loads == 1 and bool((app.tensor == 3).all())
    assert both.loaded and _same(dict(both), {"x": 1, "t": torch.ones(1)})
    assert inner.seen == [4] and inner.loads == 1 and bool((inner.tensor == 4).all())
    assert {"app/tensor", "both/t", "deep/list/0/tensor"} <= set(holdfast.open(tmp_path / "c").tensors)


def test_modules_and_optimizers_as_they_are_and_as_their_state_dicts(tmp_path: Path) -> None:
    model, optimizer = _trained(1)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "objects")
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "dicts")
    torch_dcp.save({"model": model, "optim": optimizer}, storage_writer=dcp.Writer(tmp_path / "torch"))
    for folder in ("objects", "dicts", "torch"):
        # One that has not stepped gets its state too, which torch's own load forgets.
        for start in (_fresh, lambda: _trained(2, lr=9.0)):
            other, its = start()
            dcp.load({"model": other, "optim": its}, checkpoint_id=tmp_path / folder)
            assert _same(other.state_dict(), model.state_dict()), folder
            assert _same(its.state_dict(), optimizer.state_dict()), folder
    other, its = _trained(2, lr=9.0)
    state = {"model": other.state_dict(), "optim": its.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dicts")
    its.load_state_dict(state["optim"])
    assert _same(other.state_dict(), model.state_dict()) and _same(its.state_dict(), optimizer.state_dict())


def test_an_optimizer_that_would_get_nothing_is_an_error(tmp_path: Path) -> None:
    model, optimizer = _trained(1)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "c")
    with pytest.raises(holdfast.errors.Mismatch, match="Put the module that owns the parameters into the state dict"):
        dcp.load({"optim": _fresh()[1]}, checkpoint_id=tmp_path / "c")
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "numbers")
    lone = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(holdfast.errors.Mismatch, match=r"groups of \[4\] parameters, here are groups of \[1\]"):
        dcp.load({"optim": lone}, checkpoint_id=tmp_path / "numbers")


def test_a_patched_state_dict_is_asked(tmp_path: Path) -> None:
    model, _ = _trained(1)
    bias = model[0].bias.detach().clone()
    model.state_dict = lambda: {"only": model[0].bias.detach(), "of": "mine"}  # type: ignore
    dcp.save({"model": model}, checkpoint_id=tmp_path / "c")
    assert list(holdfast.open(tmp_path / "c").tensors) == ["model/only"]
    with torch.no_grad():
        model[0].bias.zero_()
    taken: list[Any] = []
    model.load_state_dict = taken.append  # type: ignore
    dcp.load({"model": model}, checkpoint_id=tmp_path / "c")
    assert _same(taken, [{"only": bias, "of": "mine"}]) and _same(model[0].bias.detach(), bias)


def wrapped(folder: str) -> list[str]:
    """DDP's prefix: with it and without it, whoever wrote and whoever reads."""
    model, optimizer = _trained(1)
    ddp = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        model[1].running_mean.fill_(_rank())  # buffers differ by rank under DDP, and the first rank's are kept
    dcp.save({"model": ddp, "optim": optimizer}, checkpoint_id=f"{folder}/ours")
    with torch.no_grad():
        model[1].running_mean.fill_(0)
    torch_dcp.save({"model": ddp, "optim": optimizer}, storage_writer=dcp.Writer(f"{folder}/torch"))
    wrong = []
    for written in ("ours", "torch"):
        for kind in ("object", "dict"):
            other, its = _fresh()
            wrapper = nn.parallel.DistributedDataParallel(other)
            state = {"model": wrapper if kind == "object" else wrapper.state_dict(), "optim": its}
            if kind == "dict":
                del state["optim"]
            dcp.load(state, checkpoint_id=f"{folder}/{written}")
            if not _same(other.state_dict(), model.state_dict()):
                wrong.append(f"{written} {kind} model")
            if kind == "object" and not _same(its.state_dict(), optimizer.state_dict()):
                wrong.append(f"{written} optimizer")
    return wrong + [name for name in holdfast.open(f"{folder}/ours").tensors if "module." in name]


def test_names_with_and_without_the_prefix_of_ddp(tmp_path: Path) -> None:
    assert pool.run(2, wrapped, str(tmp_path)) == [[], []]


# Ranks


def over_ranks(folder: str) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(5 * 3, dtype=torch.float32).view(5, 3)
    app = App(2.0)
    state = {
        "w": distribute_tensor(full, mesh, [Shard(0)]), "r": distribute_tensor(full, mesh, [Replicate()]),
        "app": app, "mine": holdfast.PerRank({"seed": rank}), "step": 4,
    }  # fmt: skip
    described = dcp.save(state, checkpoint_id=f"{folder}/c")
    wrong = [] if described.state_dict_metadata["w"].chunks[0].sizes == (3, 3) else ["chunks"]
    mine = holdfast.PerRank(None)
    into = {
        "w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)]), "r": torch.zeros(5, 3), "app": App(0.0),
        "mine": mine, "step": 0,
    }  # fmt: skip
    dcp.load(into, checkpoint_id=f"{folder}/c")
    wrong += [] if torch.equal(into["w"].full_tensor(), full) and torch.equal(into["r"], full) else ["tensors"]
    wrong += [] if mine.value == {"seed": rank} and into["step"] == 4 and into["app"].seen == [2] else ["values"]
    # Alone: no other rank is met, and a sharded tensor still knows its place.
    if rank == 1:
        into["w"] = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None)
        dcp.load({"w": into["w"]}, checkpoint_id=f"{folder}/c", no_dist=True)
        wrong += [] if torch.equal(into["w"].to_local(), full[3:]) else ["no_dist"]
        dcp.save({"x": torch.ones(3), "rank": rank}, checkpoint_id=f"{folder}/alone", no_dist=True)
        wrong += [] if holdfast.open(f"{folder}/alone").world_size == 1 else ["alone"]
    dcp.save({"w": state["w"]}, checkpoint_id=f"{folder}/d", use_collectives=False)
    return wrong


def test_over_ranks_and_alone(tmp_path: Path) -> None:
    assert pool.run(2, over_ranks, str(tmp_path)) == [[], []]
    state = {"w": torch.zeros(5, 3), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["w"].sum() == 105 and state["step"] == 4
    dcp.load(state, checkpoint_id=tmp_path / "d", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(holdfast.errors.Mismatch, match="mine: every rank saved its own"):
        dcp.load({"mine": 0}, checkpoint_id=tmp_path / "c")


def in_a_group(folder: str) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        state = {"x": torch.full((3,), 2.0), "n": 1}
        dcp.save(state, checkpoint_id=folder, process_group=group)
        into = {"x": torch.zeros(3), "n": 0}
        dcp.load(into, checkpoint_id=folder, process_group=group)
        assert _same(into, state)
    dist.destroy_process_group(group)


def test_in_a_group_of_some_ranks(tmp_path: Path) -> None:
    pool.run(4, in_a_group, str(tmp_path / "c"))
    assert holdfast.open(tmp_path / "c").world_size == 2


class Breaks:
    """Raises on one rank, on the way out or in."""

    def __init__(self, when: str) -> None:
        self.when = when

    def state_dict(self) -> dict[str, Any]:
        if self.when == "save" and _rank() == 1:
            raise ValueError("no state here")
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.when == "load" and _rank() == 1:
            raise ValueError("cannot take it")


def differing(folder: str, what: str) -> None:
    rank = _rank()
    if what == "value":
        dcp.save({"cfg": {"seed": rank}}, checkpoint_id=folder)
    elif what == "tensor":
        dcp.save({"rng": torch.full((3,), rank)}, checkpoint_id=folder)
    elif what == "code":
        dcp.save({"f": print}, checkpoint_id=folder)
    elif what == "state_dict":
        dcp.save({"app": Breaks("save")}, checkpoint_id=folder)
    elif what == "missing":
        dcp.save({"a": torch.ones(2)}, checkpoint_id=folder)
        dcp.load({"a": torch.ones(2), **({"b": torch.ones(2)} if rank else {})}, checkpoint_id=folder)
    elif what == "load_state_dict":
        dcp.save({"app": Breaks("")}, checkpoint_id=folder)
        dcp.load({"app": Breaks("load")}, checkpoint_id=folder)
    else:
        dcp.load({"a": torch.ones(2)}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (
            "value",
            "SaveFailed",
            "cfg/seed differs between ranks: 0 on rank 0, 1 on rank 1. Wrap it as holdfast.PerRank",
        ),
        ("tensor", "SaveFailed", "rng differs between ranks 0 and 1"),
        ("code", "SaveFailed", "f: builtins.builtin_function_or_method is code"),
        ("state_dict", "SaveFailed", "ValueError: no state here"),
        ("missing", "Mismatch", "1 missing from the checkpoint"),
        ("load_state_dict", "HoldfastError", "ValueError: cannot take it"),
        ("nothing", "NotACheckpoint", "there is nothing at"),
    ],
)
def test_a_failure_is_the_same_on_every_rank(what: str, kind: str, text: str, tmp_path: Path) -> None:
    errors = pool.attempt(2, differing, str(tmp_path / "c"), what)
    for error in errors:
        assert isinstance(error, pool.RemoteError) and kind in error.kinds and text in error.text, errors
    assert errors[0].text == errors[1].text
    assert (tmp_path / "c").exists() == (what in ("missing", "load_state_dict"))


# Overwriting


def test_a_checkpoint_that_is_there_is_replaced_or_stays_whole(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"x": torch.full((3,), value), "old": value}, checkpoint_id=tmp_path / "c")
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 1
    with pytest.raises(holdfast.SaveFailed):
        dcp.save({"x": torch.zeros(3), "f": print}, checkpoint_id=tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    assert checkpoint.values == {"old": 2.0} and bool((checkpoint.read("x") == 2).all())
    torch_dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(holdfast.SaveFailed, match="holds other files"):
        dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
    assert (tmp_path / "theirs" / ".metadata").exists()


# What is refused


def test_what_cannot_be_honoured_is_refused_with_a_way_out(tmp_path: Path) -> None:
    state, path = {"x": torch.ones(2)}, tmp_path / "c"
    for call in (dcp.save, dcp.load):
        with pytest.raises(holdfast.errors.Unsupported, match="`checkpoint_id` must be specified"):
            call(state)
    transforming = dcp.FileSystemWriter(path, _extensions=[ZStandard()])
    with pytest.raises(
        holdfast.errors.Unsupported, match="extensions that transform .* give checkpoint_id=path instead"
    ):
        dcp.save(state, storage_writer=transforming)
    assert not path.exists()


class Odd:
    """Something that torch pickles."""


def test_of_what_torch_wrote_the_pickled_objects_alone_are_missing(tmp_path: Path) -> None:
    torch_dcp.save({"app": {"weights": torch.ones(2), "odd": Odd()}}, checkpoint_id=tmp_path / "c")
    state = {"app": {"weights": torch.zeros(2)}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert _same(state, {"app": {"weights": torch.ones(2)}})
    with pytest.raises(holdfast.errors.Mismatch, match="1 missing from the checkpoint .*\n    app/odd"):
        dcp.load({"app": {"odd": None}}, checkpoint_id=tmp_path / "c")


def test_planners_and_storages_that_say_no_more_than_holdfast_does_are_taken(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c", overwrite=False), planner=dcp.DefaultSavePlanner())
    with pytest.raises(holdfast.SaveFailed, match="already holds a committed checkpoint"):
        dcp.save(state, storage_writer=dcp.Writer(tmp_path / "c", overwrite=False))
    for reader in (dcp.Reader(tmp_path / "c"), dcp.FileSystemReader(tmp_path / "c")):
        into = {"x": torch.zeros(2)}
        dcp.load(into, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
        assert _same(into, state)


def test_every_public_name_of_torchs_module_is_here_but_for_the_deprecated_two() -> None:
    names = {n for n in dir(torch_dcp) if not n.startswith("_") and not hasattr(getattr(torch_dcp, n), "__path__")}
    modules = {n for n in names if type(getattr(torch_dcp, n)) is type(os)}
    missing = {name for name in names - modules if not hasattr(dcp, name)}
    assert missing == {"save_state_dict", "load_state_dict"}
    assert isinstance(App(1.0), dcp.Stateful) and dcp.state_dict is torch_dcp.state_dict
