"""One trial: saved on a mesh, loaded on another, and held against what torch gathers and lays out.

`trial` runs on the test's process, `saved` and `loaded` on the ranks of a pool.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from tests import pool
from tests.any_state.layouts import Refused, Trainer, alike, trainer
from tests.any_state.recipe import WORLDS, Recipe, draw


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
                    optimizer.state[parameter][key] = alike(value, of[name]) if like else copy.deepcopy(value)
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
        why = pool.run(WORLDS[recipe.source], saved, seed, path, truth)
        if any(why):
            return "torch", [next(filter(None, why))]
        found = pool.run(WORLDS[recipe.target], loaded, seed, path, truth)
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
