"""The state of a run: every number of it a function of the run, the episode, the step and its place in the tensor.

Ranks fill their shards by it and look at what was restored; the checks compare whole tensors with it. Shards learn
their places from torch itself: each tensor begins as the numbers of its own elements and is then sharded.
"""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from tests import meshes
from tests.soak.plan import Episode, Run

WIDTH = 64

Mark = tuple[int, int]
"""Which save a content is of: episode and step."""


def numbers(places: torch.Tensor, run: Run, name: str, mark: Mark) -> torch.Tensor:
    """The numbers at these places (int64) of a tensor; below 2^24, so that float32 holds each of them."""
    key = int.from_bytes(
        hashlib.blake2b(f"{run.key}/{name}/{_phase(name, mark)}".encode(), digest_size=8).digest(), "big"
    )
    mixed = places * (key % (1 << 31) | 1) + (key >> 33)
    return (mixed ^ (mixed >> 15)) & 0xFFFFFF


def _phase(name: str, mark: Mark) -> object:
    """How long a tensor stays as it is: some for ever, some for three steps, so that incremental saves find them."""
    if "frozen" in name:
        return "always"
    if "slow" in name or "bias" in name:
        return mark[0], mark[1] // 3
    return mark


def whole(run: Run, name: str, shape: tuple[int, ...], dtype: torch.dtype, mark: Mark) -> torch.Tensor:
    """All of a tensor as it is at that mark."""
    if name.endswith("/step"):  # of an optimizer: how often it has stepped
        return torch.full(shape, float(mark[1]), dtype=dtype)
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return numbers(places, run, name, mark).to(dtype)


def shapes(run: Run) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor that a checkpoint of the run holds, by name."""
    f32 = torch.float32
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "sharded/w": ((run.rows, WIDTH), f32), "optimizer/m" if not run.module else "ema/m": ((run.rows, WIDTH), f32),
        "spread/d": ((24, 12), torch.float64), "replicated/v": ((300,), torch.int32),
        "replicated/slow": ((70, 11), torch.int64), "frozen/f": ((500, 9), f32), "frozen/empty": ((0, 4), f32),
    }  # fmt: skip
    if run.module:
        model = meshes.Model()
        persistent = model.state_dict()
        found |= {f"model/{name}": (tuple(t.shape), t.dtype) for name, t in persistent.items()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                base = f"optimizer/state/{name}"
                found |= {f"{base}/step": ((), f32)}
                found |= {f"{base}/{key}": (tuple(parameter.shape), f32) for key in ("exp_avg", "exp_avg_sq")}
    return found


@dataclass
class Local:
    """A tensor on this rank: its own memory, and the places of its elements in the whole tensor."""

    name: str
    tensor: torch.Tensor
    places: torch.Tensor

    def expected(self, run: Run, mark: Mark) -> torch.Tensor:
        if self.name.endswith("/step"):
            return torch.full_like(self.tensor, float(mark[1]))
        return numbers(self.places, run, self.name, mark).to(self.tensor.dtype)

    def fill(self, run: Run, mark: Mark) -> None:
        with torch.no_grad():
            self.tensor.copy_(self.expected(run, mark))


class Stepping(torch.optim.AdamW):
    """AdamW whose steps lead to known numbers. Real otherwise: its hooks run, and its state is where torch has it."""

    after: weakref.WeakMethod[Callable[[], None]]
    """Of the state that holds this optimizer. Weak, or the tensors of every state would wait for the collector."""

    def step(self, closure: Any = None) -> None:
        step = self.after()
        assert step is not None
        step()


class State:
    """The state of this rank: ``tree`` is what is saved and restored."""

    def __init__(self, episode: Episode) -> None:
        self.run, self.episode = episode.run, episode
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.restless: list[Local] = []
        self.stepped: list[Local] = []
        self.optimizer: Stepping | None = None
        self.tree: dict[str, Any] = {}
        for name, (shape, dtype) in shapes(self.run).items():
            section, _, key = name.partition("/")
            if section in ("sharded", "ema") or name == "optimizer/m":
                self.tree.setdefault(section, {})[key] = self._sharded(name, shape, dtype)
            elif section == "spread":
                self.tree["spread"] = {key: self._spread(name, shape, dtype)}
            elif section in ("replicated", "frozen"):
                self.tree.setdefault(section, {})[key] = self._replicated(name, shape, dtype)
        if self.run.module:
            self._add_module()
        self.tree |= {
            "mine": holdfast.PerRank(None, elsewhere="first"),
            "rng": holdfast.RNG(),
            "episode": -1,
            "step": 0,
        }
        self.set((-1, 0))
        if self.optimizer is not None and not episode.fresh:
            self.optimizer.step()

    # Tensors, each with its places

    def _own(self, name: str, tensor: torch.Tensor, places: torch.Tensor, *, stepped: bool = False) -> None:
        (self.stepped if stepped else self.restless).append(Local(name, tensor, places.long().clone()))

    def _sharded(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> holdfast.Shard:
        # Shares of uneven length, so that no two world sizes cut alike.
        cuts = [shape[0] * r * (r + self.world) // (2 * self.world * self.world) for r in range(self.world)] + [
            shape[0]
        ]
        begin, end = cuts[self.rank], cuts[self.rank + 1]
        places = torch.arange(begin * shape[1], end * shape[1]).reshape(end - begin, shape[1])
        tensor = torch.zeros(places.shape, dtype=dtype)
        self._own(name, tensor, places)
        return holdfast.Shard(tensor, shape, (begin, 0))

    def _replicated(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype)
        self._own(name, tensor, torch.arange(tensor.numel()).reshape(shape))
        return tensor

    def _spread(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A bare DTensor on a mesh that the episode's number picks."""
        whole_places = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
        if not dist.is_initialized():
            return self._replicated(name, shape, dtype)
        if self.world == 4 and self.episode.number % 2:
            mesh, placements = init_device_mesh("cpu", (2, 2)), ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
        else:
            mesh, placements = init_device_mesh("cpu", (self.world,)), ([Shard(0)], [Shard(1)])
        tensor = distribute_tensor(whole_places, mesh, placements[self.episode.number // 2 % 2])
        self._own(name, tensor.to_local(), tensor.to_local())
        return tensor

    def _add_module(self) -> None:
        plain = meshes.Model()
        with torch.no_grad():
            for tensor in [*plain.parameters(), *plain.buffers()]:
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
        model = meshes.LAYOUTS[self.episode.mesh][1](plain) if dist.is_initialized() else plain
        persistent = {name for name in shapes(self.run) if name.startswith("model/")}
        self._trained: list[tuple[str, torch.Tensor]] = []
        for long_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            name = "model/" + long_name.removeprefix("module.")
            if name not in persistent:
                continue
            local = _local(tensor)
            self._own(name, local, local, stepped=tensor.requires_grad)
            if tensor.requires_grad:
                self._trained.append((name.removeprefix("model/"), tensor))
        matrices = [p for n, p in self._trained if "weight" in n and "norm" not in n]
        others = [p for n, p in self._trained if not ("weight" in n and "norm" not in n)]
        self.optimizer = Stepping(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.5
        )
        self.optimizer.after = weakref.WeakMethod(self._step)
        self.tree |= {"model": model, "optimizer": self.optimizer}

    def _step(self) -> None:
        """What a step of the optimizer does: state where there is none yet, then the numbers of this mark."""
        optimizer = self.optimizer
        assert optimizer is not None
        for _, parameter in self._trained:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }  # fmt: skip
        for local in [*self.stepped, *self._moments()]:
            local.fill(self.run, self.mark)
        for group in optimizer.param_groups:
            group["lr"] = _rate(self.mark)

    def _moments(self) -> Iterator[Local]:
        """The state of the optimizer, found where it is now: a load may have put other tensors there."""
        assert self.optimizer is not None
        places = {local.name: local.places for local in self.stepped}
        for name, parameter in self._trained:
            for key, tensor in self.optimizer.state[parameter].items():
                found = places[f"model/{name}"] if key != "step" else torch.zeros((), dtype=torch.int64)
                yield Local(f"optimizer/state/{name}/{key}", _local(tensor), found)

    # What training does, and what is there

    def set(self, mark: Mark) -> None:
        """Everything that may change at any time, as of ``mark``."""
        self.mark = mark
        for local in self.restless:
            local.fill(self.run, mark)
        seed(mark, self.rank)
        self.tree["mine"].value = [*mark, self.rank]
        self.tree["episode"], self.tree["step"] = mark

    def advance(self, step: int) -> None:
        """One step of training."""
        self.set((self.episode.number, step))
        if self.optimizer is not None:
            self.optimizer.step()

    def faults(self, saved_world: int) -> list[str]:
        """What is not as it was at the mark that the state itself tells: after a restore, nothing."""
        mark = self.tree["episode"], self.tree["step"]
        locals_ = [*self.restless, *self.stepped, *(self._moments() if self.optimizer is not None else ())]
        found = [one.name for one in locals_ if not torch.equal(one.tensor, one.expected(self.run, mark))]
        if self.optimizer is not None and any(g["lr"] != _rate(mark) for g in self.optimizer.param_groups):
            found.append("lr")
        mine = [*mark, self.rank if self.world == saved_world else 0]
        if self.tree["mine"].value != mine:
            found.append(f"mine is {self.tree['mine'].value}, not {mine}")
        if self.rank < saved_world:
            drawn = torch.rand(3), random.random()
            seed(mark, self.rank)
            if not torch.equal(drawn[0], torch.rand(3)) or drawn[1] != random.random():
                found.append("rng")
        return found


def seed(mark: Mark, rank: int) -> None:
    torch.manual_seed(mark[0] * 1_000_003 + mark[1] * 101 + rank + 5)
    random.seed(f"{mark}{rank}")


def _rate(mark: Mark) -> float:
    return mark[1] / 1024 + (mark[0] + 1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
