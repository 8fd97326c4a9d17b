"""What the ranks of a pool do for the tests of shared reading: small windows, made up hosts, loads that are proved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.load import Loaded
from holdfast.plan import share_plan
from holdfast.read.shared import demand, pass_on, relay, share
from holdfast.remap import Constant, Pad, Remap
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests import meshes

Sizes = dict[str, int]


@contextmanager
def eager(*, hosts: int = 1, block: int | None = 4096, warm: Sequence[int] = ()) -> Iterator[None]:
    """Share whatever can be shared, in windows of two small blocks, as if the ranks ran on so many hosts.

    ``warm``: ranks that find every file in their page cache; all others find none there.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (
        patch.object(share, "LEAST", 1), patch.object(share, "PART", 0.0), patch.object(demand, "SHORTEST", 1),
        patch.object(share, "is_cached", lambda fd, at, nbytes: rank in warm),
        patch.object(share, "_host", lambda name: f"host {rank % hosts}"), patch.object(pass_on, "SHORTEST_SLICE", 64),
    ):  # fmt: skip
        if block is None:
            yield
            return
        with (
            patch.object(share_plan, "BLOCK", block), patch.object(pass_on, "LONGEST", 2 * block),
            patch.object(pass_on, "MEMORY", 8 * block),
        ):  # fmt: skip
            yield


def sizes_of(loaded: Loaded) -> Sizes:
    return {
        "needed": loaded.bytes_needed, "read": loaded.bytes_read, "received": loaded.bytes_received,
        "unverified": loaded.bytes_unverified,
    }  # fmt: skip


def load_meshes(layout: str, pairs: list[tuple[str, str]], hosts: int) -> tuple[list[list[str]], list[int]]:
    """What differs after loading each checkpoint into this layout, and the bytes received in each load."""
    received = []

    def loading(*args: Any, **options: Any) -> Loaded:
        loaded = load(*args, **options)
        received.append(loaded.bytes_received)
        return loaded

    load = holdfast.load
    with eager(hosts=hosts, block=256), patch.object(holdfast, "load", loading):
        return meshes.load_all(layout, pairs, 1), received


# A state in which everything is shared, of three blocks and more


def big(seed: int | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed or 0)

    def one(*shape: int) -> torch.Tensor:
        return torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)

    a, b, c = one(3000, 1200), one(1_500_001), one(900, 901)
    return {"model": {"a": a, "b": b, "small": one(7), "none": one(0, 3), "c": c}}


def save_big(path: str) -> None:
    holdfast.save(big(1), path)


def load_big(
    path: str, options: dict[str, Any], hosts: int = 1, block: int | None = None, default: str = "cpu",
    warm: Sequence[int] = (),
) -> Sizes:  # fmt: skip
    state = big(None)
    with eager(hosts=hosts, block=block, warm=warm), torch.device(default):
        loaded = holdfast.load(path, state, **options)
    for name, tensor in big(1)["model"].items():
        assert torch.equal(state["model"][name], tensor), name
    return sizes_of(loaded)


def load_with_numbers(path: str, warm: Sequence[int]) -> Sizes:
    """Under a map that adds a tensor and rows of one number, which no file holds."""
    remap = Remap([Constant("scale", (1100,), value=2.0), Pad("c", 0, after=100, value=3.0)])
    state, saved = big(None), big(1)["model"]
    state["model"] |= {"scale": torch.zeros(1100), "c": torch.zeros(1000, 901)}
    with eager(block=1 << 16, warm=warm):
        loaded = holdfast.load(path, state, remap=remap)
    assert all(torch.equal(state["model"][name], saved[name]) for name in ("a", "b", "small", "none"))
    assert torch.equal(state["model"]["c"][:900], saved["c"]) and bool((state["model"]["c"][900:] == 3).all())
    assert bool((state["model"]["scale"] == 2).all())
    return sizes_of(loaded)


def load_from_store(folder: str) -> Sizes:
    state = big(None)
    with eager(block=1 << 16, warm=range(3)):
        loaded = holdfast.load(StorePlace(Local(Path(folder)), "c"), state)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in big(1)["model"].items())
    return sizes_of(loaded)


# All kinds of leaves at once


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 30)
        self.head = torch.nn.Linear(30, 40, bias=False)
        self.head.weight = self.embed.weight  # tied


class Keeper:
    """An object with tensors of its own in its state dict: they come back as fresh ones."""

    def __init__(self, value: float) -> None:
        self.state = {"ema": torch.full((300, 5), value), "count": int(value)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {"ema": state["ema"], "count": state["count"]}


def mixed(value: float) -> dict[str, Any]:
    """For four ranks. ``value`` 0 is a target."""
    rank = dist.get_rank()
    torch.manual_seed(int(value))
    rows = torch.arange(4000.0).view(80, 50) * value
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (4,))
    half = rank % 2 * 40
    module = Module()
    with torch.no_grad():
        module.embed.weight.fill_(value)
    return {
        "module": module,
        "plain": {
            "turned": (torch.arange(600.0).view(20, 30) * value).t(), "every other": (torch.arange(900.0) * value)[::2],
            "number": torch.tensor(value), "bytes": torch.full((999,), int(value), dtype=torch.uint8),
            "complex": torch.full((500,), complex(value, value)),
        },
        "hybrid": DTensor.from_local(rows.chunk(2)[rank % 2].clone(), mesh, [Replicate(), Shard(0)], run_check=False),
        "columns": DTensor.from_local(
            rows.chunk(2, 1)[rank % 2].clone(), mesh, [Replicate(), Shard(1)], run_check=False
        ),
        "cut": DTensor.from_local(rows.chunk(4)[rank].clone(), line, [Shard(0)], run_check=False),
        "halves": holdfast.Shard(rows[half : half + 40].clone(), (80, 50), (half, 0)),
        "keeper": Keeper(value), "mine": holdfast.PerRank([rank * value]), "step": int(value),
    }  # fmt: skip


def save_mixed(path: str) -> None:
    holdfast.save(mixed(3.0), path)


def load_mixed(path: str, hosts: int, options: dict[str, Any]) -> Sizes:
    """Load with and without sharing into equal targets; both bring the same, and it is what was saved."""
    found = []
    for way in ("auto", "off"):
        state = mixed(0.0)
        if options.get("cast"):
            state["plain"]["turned"] = state["plain"]["turned"].to(torch.float64)
        if options.get("missing") == "keep":
            state["plain"]["more"] = torch.ones(3)
        with eager(hosts=hosts, block=512):
            loaded = holdfast.load(path, state, share=way, **options)
        found.append((loaded, leaves(state), state))
    (shared, ours, state), (alone, theirs, _) = found
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert alone.bytes_received == 0 and (shared.restored, shared.cast) == (alone.restored, alone.cast)
    assert shared.bytes_needed == alone.bytes_needed
    if not options.get("only"):
        saved = leaves(mixed(3.0))
        assert all(torch.equal(saved[n].to(v.dtype), v) for n, v in ours.items() if n in saved)
        assert state["step"] == 3 and state["mine"].value == [dist.get_rank() * 3.0]
        assert state["keeper"].state["count"] == 3
    return sizes_of(shared)


def leaves(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a mixed state, as this rank has them."""
    return {
        **state["module"].state_dict(), **state["plain"], "ema": state["keeper"].state["ema"],
        "halves": state["halves"].tensor, **{n: state[n].to_local() for n in ("hybrid", "columns", "cut")},
    }  # fmt: skip


def load_foreign(path: str) -> Sizes:
    """A checkpoint of another library, into tensors of its own shapes, as `Checkpoint.read` gives them."""
    checkpoint = holdfast.open(path)
    truth = {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith("model/")}
    state = {"model": {name.removeprefix("model/"): torch.zeros_like(value) for name, value in truth.items()}}
    with eager(block=256):
        loaded = holdfast.load(path, state, only="model")
    assert truth
    for name, value in truth.items():
        assert torch.equal(state["model"][name.removeprefix("model/")], value), name
    return sizes_of(loaded)


# What goes wrong


def load_failing(path: str, how: str, victim: int, hosts: int, deadline: float) -> tuple[str, str, list[str]]:
    """Load while something happens on one rank; the class and text of what this one raises, and its thread names."""
    hit = dist.get_rank() == victim
    read, take, sleep = pass_on._Passing._read, pass_on._Passing._take, time.sleep
    calls = [0]

    def second(action: Callable[[], None]) -> None:
        calls[0] += 1
        if calls[0] == 2:
            action()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(error: BaseException) -> Callable[[], None]:
        def action() -> None:
            raise error

        return action

    def before(function: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            second(action)
            return function(*args)

        return wrapped

    passing = pass_on._Passing
    ways: dict[str, Any] = {
        "killed": lambda: patch.object(passing, "_read", before(read, die)),
        "killed while copying": lambda: patch.object(passing, "_take", before(take, die)),
        "cannot read": lambda: patch.object(passing, "_read", before(read, raises(OSError(5, "it is broken")))),
        "cannot copy": lambda: patch.object(passing, "_take", before(take, raises(RuntimeError("out of memory")))),
        "interrupted": lambda: patch.object(passing, "_take", before(take, raises(KeyboardInterrupt()))),
        "interrupted while waiting": lambda: patch.object(
            relay, "time", SimpleNamespace(monotonic=time.monotonic, sleep=before(sleep, raises(KeyboardInterrupt())))
        ),
        "leaves": lambda: patch.object(
            relay.Relay, "sum_beside", before(relay.Relay.sum_beside, raises(relay.Lost("the network is gone")))
        ),
    }
    state = big(None)
    with eager(hosts=hosts, block=1 << 16), ways[how]() if hit and how in ways else nullcontext():
        try:
            holdfast.load(path, state, deadline=deadline)
        except BaseException as error:
            return type(error).__name__, str(error), []
    return "", "", []


def always(error: BaseException) -> Callable[..., Any]:
    def failing(*args: Any) -> Any:
        raise error

    return failing


def load_unconnected(path: str, what: str) -> Sizes:
    """One rank cannot connect, or share memory."""
    target = {"memory": ("_mapped", OSError("no such file")), "gloo": ("_Gloo", RuntimeError("no route"))}
    name, error = target[what]
    failing = patch.object(relay, name, always(error)) if dist.get_rank() == 2 else nullcontext()
    with failing, patch.object(relay, "CONNECTING", 1.0):  # the others wait so long for the one that does not come
        return load_big(path, {}, block=1 << 16)


def load_sharded(path: str) -> Sizes:
    """Nobody has anything in common, so nothing is made and nobody is asked."""
    rank = dist.get_rank()
    into = {"w": holdfast.Shard(torch.zeros(750, 1200), (3000, 1200), (750 * rank, 0))}
    with eager(), patch.object(share, "meet", always(AssertionError("nobody to meet"))):
        loaded = holdfast.load(path, into, only="model/a", rename={"model/a": "w"})
    assert torch.equal(into["w"].tensor, big(1)["model"]["a"][750 * rank : 750 * (rank + 1)])
    return sizes_of(loaded)
