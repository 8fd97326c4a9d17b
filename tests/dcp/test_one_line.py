"""Programs of torch's users, run with torch's module and with ours: what comes out must be the same.

Also with the line changed between the save and the load, and with torch's own engine over our format.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast.dcp as dcp
from tests import pool
from tests.dcp import savers
from tests.dcp.test_save_load import _same

LONG = 240.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class AppState:
    """The class of torch's recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def _made(seed: int, steps: int, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _full(state: Any) -> Any:
    """Nested state with whole tensors."""
    if isinstance(state, dict):
        return {key: _full(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_full, state))
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if hasattr(state, "full_tensor") else state).detach().clone()
    return state


def app_state(dcp: Any, path: str) -> Any:
    model, optimizer = _made(1, 2, _sharded)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=path)
    model, optimizer = _made(2, 0, _parallel)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=path)
    return _full(list(get_state_dict(model, optimizer)))


def model_state_dict(dcp: Any, path: str) -> Any:
    model, _ = _made(1, 1, _parallel)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    model, _ = _made(2, 0, _sharded)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return _full(model.state_dict())


def model_object(dcp: Any, path: str) -> Any:
    model, _ = _made(1, 1, _sharded)
    dcp.save({"model": model}, checkpoint_id=path)
    other, _ = _made(2, 1, _sharded)
    dcp.load({"model": other}, checkpoint_id=path)
    return _full(other.state_dict())


def asynchronous(dcp: Any, path: str) -> Any:
    model, optimizer = _made(1, 1, _sharded)
    group = dist.new_group()  # torch's own needs one, as training uses the other meanwhile
    found = []
    future = None
    for step in range(2):
        if future is not None:
            future.result(LONG)
        state = {"app": AppState(model, optimizer), "step": step}
        future = dcp.async_save(state, checkpoint_id=f"{path}/{step}", process_group=group)
        model(torch.full((2, 6), float(step))).sum().backward()
        optimizer.step()
    future.result(LONG)
    for step in range(2):
        other, its = _made(2, 0, _sharded)
        state = {"app": AppState(other, its), "step": 0}
        dcp.load(state, checkpoint_id=f"{path}/{step}")
        found.append([state["step"], _full(other.state_dict())])
    dist.destroy_process_group(group)
    return found


def values_and_plain_tensors(dcp: Any, path: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(21.0).view(7, 3)
    state = {
        "a": {"b": [1, 2, {"c": 3}], "t": (1, "x"), "n": None, "w": torch.ones(3)},
        "s": distribute_tensor(full, mesh, [Shard(1)]), "r": distribute_tensor(full, mesh, [Replicate()]), "step": 5,
        "groups": [{"lr": 0.1, "params": ["p", "q"]}],
    }  # fmt: skip
    dcp.save(state, checkpoint_id=path)
    into = {
        "a": {"b": [0, 0, {"c": 0}], "t": None, "n": 1, "w": torch.zeros(3)}, "groups": [{"lr": 0.0, "params": []}],
        "s": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]), "r": torch.zeros(7, 3), "step": 0,
    }  # fmt: skip
    kept = into["a"]["w"]
    dcp.load(into, checkpoint_id=path)
    return [_full(into), into["a"]["w"] is kept]


def partial_and_missing(dcp: Any, path: str) -> Any:
    dcp.save({"m": {"a": torch.ones(2), "b": torch.ones(3)}, "n": 1}, checkpoint_id=path)
    some = {"m": {"b": torch.zeros(3)}}
    dcp.load(some, checkpoint_id=path)
    more = {"m": {"b": torch.zeros(3), "c": torch.zeros(1)}, "n": 0}
    failed = False
    try:
        dcp.load(more, checkpoint_id=path)
    except BaseException:
        failed = True
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, checkpoint_id=path, planner=planner)
    return [some, failed, more]


def overwriting_alone(dcp: Any, path: str) -> Any:
    path = f"{path}-{dist.get_rank()}"
    for value in (1.0, 2.0):
        dcp.save({"x": torch.full((3,), value), "v": value}, checkpoint_id=path, no_dist=True)
    into = {"x": torch.zeros(3), "v": 0.0}
    dcp.load(into, checkpoint_id=path, no_dist=True)
    return into


class Ordered:
    """Needs all ranks to load it at the same time."""

    def __init__(self, value: int) -> None:
        self.value, self.sum = torch.tensor([value]), 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dist.all_reduce(self.value)
        self.sum = int(self.value)


def another_order_of_keys(dcp: Any, path: str) -> Any:
    """Torch goes by the sorted keys, so that collectives of objects meet their like."""
    objects = {"a": Ordered(1), "b": Ordered(10)}
    state = dict(reversed(objects.items())) if dist.get_rank() else dict(objects)
    dcp.save(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    return [objects["a"].sum, objects["b"].sum]


class Losses:
    """Packs something by itself, as trainers of torch's examples do."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        packed = io.BytesIO()
        torch.save(self.losses, packed)
        return {"losses": packed, "step": torch.tensor(len(self.losses), dtype=torch.int32)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"]) + [state_dict["step"].item()]


def packed_by_itself(dcp: Any, path: str) -> Any:
    dcp.save({"train": Losses([0.5, 0.25])}, checkpoint_id=path)
    into = Losses([])
    dcp.load({"train": into}, checkpoint_id=path)
    return into.losses


class Watched(dict[str, Any]):
    """A state dict that notes what is set in it."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.noted: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.noted.append(key)
        super().__setitem__(key, value)


def what_is_set(dcp: Any, path: str) -> Any:
    state = Watched({"app": Ordered(1), "dict": {"t": torch.ones(1), "l": [1]}, "value": 1})
    dcp.save(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    return set(state.noted)


def nothing_at_all(dcp: Any, path: str) -> Any:
    dcp.save({}, checkpoint_id=path)
    dcp.load({}, checkpoint_id=path)
    return None


def patched(dcp: Any, path: str) -> Any:
    """Objects whose state_dict torch has replaced by the one that knows wrappers."""

    def wrap(model: nn.Module) -> nn.Module:
        return torch.compile(FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True), backend="eager")

    model, optimizer = _made(1, 2, wrap)
    _patch_model_state_dict(model)
    _patch_optimizer_state_dict(model, optimizers=optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    model, optimizer = _made(2, 0, wrap)
    _patch_model_state_dict(model)
    _patch_optimizer_state_dict(model, optimizers=optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True)
    return _full([get_model_state_dict(model, options=options), optimizer.state_dict()["param_groups"]])


PROGRAMS = [
    app_state, model_state_dict, model_object, asynchronous, values_and_plain_tensors, partial_and_missing,
    overwriting_alone, another_order_of_keys, packed_by_itself, what_is_set, nothing_at_all, patched,
]  # fmt: skip


def _written(call: Callable[..., Any]) -> Callable[..., Any]:
    """A save of torch's own engine, into our format."""
    return lambda state, *, checkpoint_id, **rest: call(state, storage_writer=dcp.Writer(checkpoint_id), **rest)


def _read(state: Any, *, checkpoint_id: str, **rest: Any) -> None:
    torch_dcp.load(state, storage_reader=dcp.Reader(checkpoint_id), **rest)


def _module(save: Any, async_save: Any, load: Any) -> Any:
    return SimpleNamespace(save=save, async_save=async_save, load=load, DefaultLoadPlanner=dcp.DefaultLoadPlanner)


CHANGED = _module(torch_dcp.save, torch_dcp.async_save, dcp.load)
MODULES = {
    "ours": dcp,
    "changed between save and load": CHANGED,
    "torch's engine": _module(_written(torch_dcp.save), _written(torch_dcp.async_save), _read),
    "ours, read by torch's engine": _module(dcp.save, dcp.async_save, _read),
    "torch's engine, read by ours": _module(_written(torch_dcp.save), _written(torch_dcp.async_save), dcp.load),
}


def run_all(number: int, folder: str) -> dict[str, Any]:
    """What comes out with each module, where that is not what comes out with torch's."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    expected = PROGRAMS[number](torch_dcp, f"{folder}/torch")  # type: ignore[arg-type]
    wrong = {}
    for index, (name, module) in enumerate(MODULES.items()):
        if PROGRAMS[number] is packed_by_itself and module is CHANGED:
            continue  # torch has pickled the file in memory itself, and no pickle of torch's is undone
        found = PROGRAMS[number](module, f"{folder}/{index}")
        if not _same(found, expected):
            wrong[name] = (found, expected)
    savers.close_all()
    return wrong


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.slow_cases("asynchronous", "app_state", "patched")
def test_the_same_program(program: Callable[..., Any], tmp_path: Path) -> None:
    assert pool.run(2, run_all, PROGRAMS.index(program), str(tmp_path)) == [{}, {}]


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_the_same_signature(name: str) -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (dcp, torch_dcp)
    )
    assert ours == theirs
