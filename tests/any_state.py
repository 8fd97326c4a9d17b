"""A random state on a random mesh, loaded on another: `python -m tests.any_state --minutes 60 --seed 7`.

`draw` makes a recipe from a number; `saved` and `loaded` follow it on the ranks of a pool. What the state is, torch
gathers (``full_tensor``), and torch itself lays it out on the other mesh, where both take the same steps. Gradients
are made up, a number for each element of each name and step, so that no layout changes a bit of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests import pool

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BUFFERS = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8)


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer: where it is, and what. ``tied``: the name of the one that it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "parameter"
    tied: str = ""


@dataclass(frozen=True)
class Recipe:
    """All that is drawn; the same on every rank. ``blocks`` are prefixes of modules that are sharded by themselves."""

    seed: int
    leaves: tuple[Leaf, ...]
    blocks: tuple[str, ...]
    optimizer: str
    groups: tuple[tuple[str, ...], ...]
    steps: int
    before: int
    how: str
    wrapped: str
    source: str
    target: str
    split: bool = False
    turned: bool = False


def draw(seed: int) -> Recipe:
    """Everything about one trial, from its number."""
    chance = random.Random(seed)
    blocks = tuple(f"blocks.{i}" for i in range(chance.randint(0, 3)))
    leaves: list[Leaf] = []
    for prefix in ("", *blocks):
        dtype = chance.choices(DTYPES, (5, 2, 1))[0]
        for number in range(chance.randint(1, 4)):
            leaves.append(_leaf(chance, prefix, number, dtype))
        for number in range(chance.choice((0, 0, 1, 2))):
            leaves.append(_buffer(chance, prefix, number))
        own = [leaf for leaf in leaves if leaf.kind == "parameter" and _block_of(leaf.name, blocks) == prefix]
        if chance.random() < 0.3 and own:
            first = chance.choice(own)
            leaves.append(Leaf(_join(prefix, "last.again"), first.shape, first.dtype, "parameter", first.name))
    parameters = [leaf for leaf in leaves if leaf.kind == "parameter" and not leaf.tied]
    if not parameters:
        leaves.append(Leaf("one", (3, 2), torch.float32))
        parameters = leaves[-1:]
    groups = _groups(chance, [leaf.name for leaf in parameters])
    steps = chance.choice((0, 1, 1, 2, 3))
    return Recipe(
        seed, tuple(leaves), blocks, chance.choice(list(OPTIMIZERS)), groups, steps,
        before=chance.choice((0, 0, 1, 2)) if steps else 0, how=chance.choice(("save", "save", "thread", "process")),
        wrapped=chance.choice(("", "", "compiled")), source=chance.choice(list(LAYOUTS)),
        target=chance.choice(list(LAYOUTS)), split=chance.random() < 0.2 and len(groups) > 1, turned=chance.random() < 0.3,
    )  # fmt: skip


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _leaf(chance: random.Random, prefix: str, number: int, dtype: torch.dtype) -> Leaf:
    shape = tuple(chance.choice((1, 2, 3, 4, 5, 7, 8, 12)) for _ in range(chance.choice((1, 1, 2, 2, 2, 3))))
    place = chance.choice(("", "", "deep", "deep.er", "list.0", "with space", "0"))
    kind = "parameter" if chance.random() < 0.85 else "frozen"
    return Leaf(_join(prefix, _join(place, f"p{number}")), shape, dtype, kind)


def _buffer(chance: random.Random, prefix: str, number: int) -> Leaf:
    shape = tuple(chance.choice((0, 1, 2, 5)) for _ in range(chance.choice((0, 1, 1, 2))))
    kind = chance.choice(("buffer", "buffer", "scratch"))
    return Leaf(_join(prefix, f"b{number}"), shape, chance.choice(BUFFERS), kind)


def _groups(chance: random.Random, names: list[str]) -> tuple[tuple[str, ...], ...]:
    count = chance.choice((1, 1, 2, 3))
    found: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        chance.choice(found).append(name)
    return tuple(tuple(group) for group in found if group)


def _block_of(name: str, blocks: tuple[str, ...]) -> str:
    return next((block for block in blocks if name.startswith(block + ".")), "")


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.01), "Adam amsgrad": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True),
    "Adam without foreach": lambda g: torch.optim.Adam(g, lr=0.01, foreach=False),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1), "SGD momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    "RMSprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1), "NAdam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "Adadelta": lambda g: torch.optim.Adadelta(g, lr=0.5),
    "ASGD": lambda g: torch.optim.ASGD(g, lr=0.1),
}  # fmt: skip


class Refused(Exception):
    """torch itself cannot lay this state out like this."""


def build(recipe: Recipe, layout: str, values: dict[str, torch.Tensor] | None = None, seed: int = 0) -> nn.Module:
    """The model of a recipe on a layout, with these full values, or random ones."""
    torch.manual_seed(recipe.seed * 7 + seed)
    root = nn.Module()
    made: dict[str, nn.Parameter] = {}
    for leaf in recipe.leaves:
        owner = _owner(root, leaf.name)
        key = leaf.name.rpartition(".")[2]
        if leaf.tied:
            owner.register_parameter(key, made[leaf.tied])
            continue
        value = _random(leaf) if values is None or leaf.name not in values else values[leaf.name].clone()
        if leaf.kind in ("parameter", "frozen"):
            made[leaf.name] = nn.Parameter(value, requires_grad=leaf.kind == "parameter")
            owner.register_parameter(key, made[leaf.name])
        else:
            owner.register_buffer(key, value, persistent=leaf.kind == "buffer")
    why, model = "", root
    try:
        model = LAYOUTS[layout][1](root, recipe)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        why = f"{layout}: {type(error).__name__}: {error}"
    if dist.is_initialized():  # torch may refuse on one rank alone
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, why)
        why = next(filter(None, everyone), "")
    if why:
        raise Refused(why)
    return model


def _owner(root: nn.Module, name: str) -> nn.Module:
    for key in name.split(".")[:-1]:
        if key not in root._modules:
            root.add_module(key, nn.Module())
        root = root._modules[key]
    return root


def _random(leaf: Leaf) -> torch.Tensor:
    return (torch.randn(leaf.shape) * 3).abs().to(leaf.dtype) if leaf.kind in ("buffer", "scratch") else torch.randn(leaf.shape).to(leaf.dtype)


def _one(model: nn.Module, recipe: Recipe) -> nn.Module:
    return model


def _ddp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return DistributedDataParallel(model)


def _shard(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> nn.Module:
    for block in recipe.blocks:
        fully_shard(model.get_submodule(block), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _shard(model, recipe, init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _shard(model, recipe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))


def _tensor_parallel(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _distributed(model, recipe, init_device_mesh("cpu", (dist.get_world_size(),)))


def _two_dimensional(model: nn.Module, recipe: Recipe) -> nn.Module:
    return _distributed(model, recipe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def _fsdp_tp(model: nn.Module, recipe: Recipe) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _shard(_distributed(model, recipe, mesh["tp"], under_fsdp=True), recipe, mesh["dp"])


def _distributed(model: nn.Module, recipe: Recipe, mesh: DeviceMesh, *, under_fsdp: bool = False) -> nn.Module:
    """Each parameter a DTensor with placements of its own, uneven or with nothing on some ranks.

    What FSDP2 cuts once more is cut with more care: torch cannot gather strided shards that are uneven or empty.
    """
    placed: dict[int, nn.Parameter] = {}
    for leaf in recipe.leaves:
        if leaf.kind not in ("parameter", "frozen"):
            continue
        owner, key = _owner(model, leaf.name), leaf.name.rpartition(".")[2]
        old = owner._parameters[key]
        if id(old) not in placed:
            chance = random.Random(f"{recipe.seed}/{leaf.name}/{mesh.ndim}")
            dims = range(old.dim())
            if under_fsdp:
                dims = [d for d, size in enumerate(old.shape) if (size % 4 == 0 if d == 0 else size >= mesh.size())]
            ways = [Replicate(), *(Shard(d) for d in dims)]
            where = [chance.choice(ways) for _ in range(mesh.ndim)]
            new = distribute_tensor(old.detach(), mesh, where, src_data_rank=None)
            placed[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
        owner._parameters[key] = placed[id(old)]
    return model


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module, Recipe], nn.Module]]] = {
    "one process": (1, _one), "DDP 2": (2, _ddp), "FSDP2 2": (2, _fsdp), "FSDP2 3": (3, _fsdp), "FSDP2 4": (4, _fsdp),
    "HSDP 2x2": (4, _hsdp), "TP 2": (2, _tensor_parallel), "TP 3": (3, _tensor_parallel),
    "DTensors 2x2": (4, _two_dimensional), "FSDP2 x TP 2x2": (4, _fsdp_tp),
}  # fmt: skip


@dataclass
class Trainer:
    """What is saved of a trial, and how it steps."""

    recipe: Recipe
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    extra: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        wrapped = torch.compile(self.model, backend="eager") if self.recipe.wrapped == "compiled" else self.model
        optimizer = self.optimizers if self.recipe.split else self.optimizers[0]
        return {"model": wrapped, "optimizer": optimizer, "extra": self.extra}

    def named(self) -> Iterator[tuple[Leaf, torch.Tensor]]:
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        for leaf in self.recipe.leaves:
            owner, key = _owner(inner, leaf.name), leaf.name.rpartition(".")[2]
            yield leaf, getattr(owner, key)

    def step(self, number: int) -> None:
        for leaf, tensor in self.named():
            if leaf.kind == "parameter" and not leaf.tied:
                tensor.grad = _alike(_gradient(leaf, number), tensor)
            elif leaf.kind in ("buffer", "scratch") and leaf.dtype in (torch.float32, torch.int64):
                tensor += number
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.extra["count"] += 1
        self.extra["nested"][0]["tensor"] += number


def trainer(recipe: Recipe, layout: str, values: dict[str, torch.Tensor] | None = None, *, seed: int = 0, turned: bool = False) -> Trainer:
    """A trainer on a layout; ``turned`` has its groups, and the parameters in them, in another order."""
    model = build(recipe, layout, values, seed)
    made = Trainer(recipe, model, [], {"count": seed, "nested": [{"tensor": torch.full((3,), float(seed))}, "text"], "none": None})
    of = {leaf.name: tensor for leaf, tensor in made.named()}
    groups = [{"params": [of[name] for name in group], "lr": 0.01 * (index + 1 + seed)} for index, group in enumerate(recipe.groups)]
    if turned and not recipe.split:
        groups = [{**group, "params": group["params"][::-1]} for group in reversed(groups)]
    make = OPTIMIZERS[recipe.optimizer]
    made.optimizers = [make([group]) for group in groups] if recipe.split else [make(groups)]
    return made


def _gradient(leaf: Leaf, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{leaf.name}/{number}".encode()))
    return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)


def _alike(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This full value, laid out as a tensor is."""
    if not isinstance(tensor, DTensor):
        return full.clone()
    made = torch.empty_like(tensor.detach(), dtype=full.dtype)
    assert made.placements == tensor.placements
    index = _indices(tensor)
    made.to_local().copy_(full.reshape(-1)[index.reshape(-1)].reshape(index.shape))
    return made


_known: dict[Any, torch.Tensor] = {}


def _indices(tensor: DTensor) -> torch.Tensor:
    """Which elements of the whole this rank has, as torch tells it: by gathering ranks and positions laid out alike."""
    mesh, order = tensor.device_mesh.mesh, getattr(tensor._spec, "shard_order", None)
    key = (tuple(tensor.shape), tuple(tensor.placements), str(order), tuple(mesh.flatten().tolist()), tuple(mesh.shape))
    if key not in _known:
        positions, owners = (torch.empty_like(tensor.detach(), dtype=torch.int64) for _ in range(2))
        here = positions.to_local()
        here.copy_(torch.arange(here.numel()).reshape(here.shape))
        owners.to_local().fill_(dist.get_rank())
        own = owners.full_tensor() == dist.get_rank()
        found = torch.empty(here.numel(), dtype=torch.int64)
        found[positions.full_tensor()[own]] = torch.arange(tensor.numel()).reshape(tensor.shape)[own]
        _known[key] = found.reshape(here.shape)
    return _known[key]


def _full(value: Any) -> Any:
    return value.detach().full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def truth_of(made: Trainer) -> dict[str, Any]:
    """The whole state by names: tensors, optimizer state, settings of each parameter's group, values."""
    tensors = {leaf.name: _full(tensor.detach()) for leaf, tensor in made.named()}
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    name_of = {id(tensor): leaf.name for leaf, tensor in made.named() if not leaf.tied}
    for optimizer in made.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = name_of[id(parameter)]
                states[name] = {key: _full(value) for key, value in optimizer.state.get(parameter, {}).items()}
                settings[name] = {key: value for key, value in group.items() if key != "params"}
    return {"tensors": tensors, "states": states, "settings": settings, "extra": copy.deepcopy(made.extra)}


def unlike(a: Any, b: Any, at: str = "") -> list[str]:
    """Paths at which two trees differ in a bit, a dtype, a type or a key."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{at}: {a.dtype} {list(a.shape)} is now {b.dtype} {list(b.shape)}"]
        one, other = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return [] if torch.equal(one, other) else [f"{at}: other bits"]
    if isinstance(a, dict) and isinstance(b, dict):
        odd = [f"{at}: {sorted(map(str, a.keys() ^ b.keys()))[:4]} on one side alone"] if a.keys() != b.keys() else []
        return odd + [text for key in a.keys() & b.keys() for text in unlike(a[key], b[key], f"{at}/{key}")]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [text for n, (x, y) in enumerate(zip(a, b, strict=True)) for text in unlike(x, y, f"{at}/{n}")]
    return [] if type(a) is type(b) and a == b else [f"{at}: {a!r} is now {b!r}"]


def saved(seed: int, path: str, truth: str) -> str:
    """On each rank of the source: train, save, and leave what torch says the state is. Why not, or empty."""
    recipe = draw(seed)
    try:
        made = trainer(recipe, recipe.source)
        for number in range(recipe.steps):
            made.step(number)
    except Refused as refusal:
        return str(refusal)
    whole = truth_of(made)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(whole, truth)
    if recipe.how == "save":
        holdfast.save(made.state, path)
    else:
        with holdfast.Saver(worker=recipe.how) as saver:  # type: ignore[arg-type]
            saving = saver.save(made.state, path)
            for number in range(3):
                made.step(50 + number)
            saving.wait()
    return ""


def loaded(seed: int, path: str, truth: str) -> list[str]:
    """On each rank of the target: load, and compare with what torch lays out, then and after more steps."""
    recipe = draw(seed)
    whole = torch.load(truth, weights_only=False)
    try:
        ours = trainer(recipe, recipe.target, seed=1, turned=recipe.turned)
        for number in range(recipe.before):
            ours.step(20 + number)
    except Refused as refusal:
        return [f"torch: {refusal}"]
    identities = {leaf.name: id(tensor) for leaf, tensor in ours.named() if leaf.kind in ("parameter", "frozen")}
    report = holdfast.load(path, ours.state)
    now = truth_of(ours)
    scratch = {leaf.name for leaf in recipe.leaves if leaf.kind == "scratch"}
    for side in (whole, now):
        side["tensors"] = {name: tensor for name, tensor in side["tensors"].items() if name not in scratch}
    wrong = [f"after the load {text}" for text in unlike(whole, now)]
    if {leaf.name: id(t) for leaf, t in ours.named() if leaf.kind in ("parameter", "frozen")} != identities:
        wrong.append("a parameter is another object")
    known = {f"model/{name}" for name in whole["tensors"]}
    wrong += [f"restored tells of {n}" for n in report.restored if n.startswith("model/") and n not in known][:3]
    theirs = _by_torch(recipe, whole, ours)
    for number in range(3):
        ours.step(80 + number)
        theirs.step(80 + number)
    return wrong + [f"after more steps {text}" for text in unlike(_local(theirs), _local(ours))]


def _by_torch(recipe: Recipe, whole: dict[str, Any], ours: Trainer) -> Trainer:
    """The same state on the same layout, put there without holdfast."""
    scratch = {leaf.name: t.detach().clone() for leaf, t in ours.named() if leaf.kind == "scratch"}
    made = trainer(recipe, recipe.target, {**whole["tensors"], **scratch}, turned=recipe.turned)
    of = {leaf.name: tensor for leaf, tensor in made.named()}
    name_of = {id(tensor): leaf.name for leaf, tensor in made.named() if not leaf.tied}
    for optimizer in made.optimizers:
        for group in optimizer.param_groups:
            names = [name_of[id(parameter)] for parameter in group["params"]]
            group.update(whole["settings"][names[0]])
            for name, parameter in zip(names, group["params"], strict=True):
                for key, value in whole["states"][name].items():
                    like = isinstance(value, torch.Tensor) and value.dim() and value.shape == of[name].shape
                    optimizer.state[parameter][key] = _alike(value, of[name]) if like else copy.deepcopy(value)
    made.extra = copy.deepcopy(whole["extra"])
    return made


def _local(made: Trainer) -> dict[str, Any]:
    """What this rank holds, by names."""
    name_of = {id(tensor): leaf.name for leaf, tensor in made.named() if not leaf.tied}
    mine = lambda value: value.to_local().clone() if isinstance(value, DTensor) else copy.deepcopy(value)  # noqa: E731
    states = {
        name_of[id(parameter)]: {key: mine(value) for key, value in state.items()}
        for optimizer in made.optimizers
        for parameter, state in optimizer.state.items()
        if state
    }
    return {"tensors": {leaf.name: mine(t.detach()) for leaf, t in made.named()}, "states": states, "extra": made.extra}


def trial(seed: int, folder: Path) -> tuple[str, list[str]]:
    """One trial: "right", "torch" (it cannot lay this out) or "wrong", and what is wrong."""
    recipe = draw(seed)
    path, truth = str(folder / f"checkpoint-{seed}"), str(folder / f"truth-{seed}.pt")
    try:
        why = pool.run(LAYOUTS[recipe.source][0], saved, seed, path, truth)
        if any(why):
            return "torch", [next(filter(None, why))]
        found = pool.run(LAYOUTS[recipe.target][0], loaded, seed, path, truth)
    except pool.RankFailed as failure:
        return "wrong", [str(failure)]
    finally:
        Path(truth).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    problems = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    if problems and all("torch: " in text for text in problems):
        return "torch", problems
    return ("wrong", problems) if problems else ("right", [])


def described(seed: int) -> str:
    """A line about a trial."""
    recipe = draw(seed)
    return f"{seed}: {recipe.source} to {recipe.target}, {recipe.optimizer}, {recipe.steps} steps, by {recipe.how}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.any_state", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; the next ones count on")
    parser.add_argument("--trials", type=int, default=None, help="stop after so many")
    options = parser.parse_args()
    first = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    print(json.dumps({"seed": first}), flush=True)
    counts: Counter[str] = Counter()
    until = time.monotonic() + options.minutes * 60
    folder = Path(tempfile.mkdtemp(prefix="any-state-"))
    seed = first
    while time.monotonic() < until and (options.trials is None or seed - first < options.trials):
        verdict, problems = trial(seed, folder)
        counts[verdict] += 1
        if verdict == "wrong":
            print(json.dumps({"trial": described(seed), "wrong": problems[:6]}), flush=True)
        seed += 1
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"trials": seed - first, **counts}), flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
