"""What trainers leave in a folder beside the weights, under known names: optimizer, scheduler, RNG and more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.formats import members, recognise
from holdfast.formats.dcp import dcp
from holdfast.formats.machine import torch_files
from holdfast.formats.machine.untrusted import read_json
from holdfast.formats.members import prove_all
from holdfast.formats.simplified import PerRank
from holdfast.formats.stored import Opaque
from holdfast.storage.place import Place

TRAINER_STATE = "trainer_state.json"
_OPTIMIZER = re.compile(r"(optimizer(?:_\d+)?)\.(?:pt|bin)")
_VALUES = re.compile(
    r"((?:scheduler|sampler|dl_state_dict|custom_checkpoint)(?:_\d+)?|scaler|training_args)\.(?:pt|bin|pkl)"
)
_OF_DCP = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_EACH_RANK = re.compile(r"(rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")


class Beside(NamedTuple):
    """State under our names, the step if it is known, the number of ranks, and the names of the files."""

    state: dict[str, Any]
    step: int | None
    world_size: int
    files: frozenset[str]


def beside(folder: Place, names: Iterable[str]) -> Beside:
    """What the files ``names`` of a folder hold that have a customary name.

    The only optimizer is ``optimizer``; several are ``optimizer/optimizer``, ``optimizer/optimizer_1`` and so on, and
    so are models that FSDP sharded. All else goes by the names of the files. Raises Damaged for a broken file or a
    missing rank, Unsupported.
    """
    state: dict[str, Any] = {}
    ranks: dict[str, dict[int | None, Any]] = {}
    step, taken = None, set()
    models, optimizers, world_size = _of_dcp(folder)
    for name in names:
        if name == TRAINER_STATE:
            state["trainer_state"] = trainer = read_json(members.member(folder, name))
            step = recognise.step_of(trainer) if isinstance(trainer, dict) else None
        elif match := _OPTIMIZER.fullmatch(name):
            held = _load(folder, name)
            if not recognise.is_optimizer_state(held):
                continue  # more than that, or something else
            optimizers[match[1]] = recognise.optimizer(held, folder / name)
        elif match := _EACH_RANK.fullmatch(name):
            rank = int(match[2]) if match[2] else None
            ranks.setdefault(match[1], {})[rank] = _load(folder, name)
        elif match := _VALUES.fullmatch(name):
            try:
                state[match[1]] = _load(folder, name)
            except Unsupported as error:
                # Arguments of a class of the user's own script, say: no reason to refuse the weights.
                state[match[1]] = Opaque(str(error))
        else:
            continue
        taken.add(name)
    for kind, by_name in (("model", models), ("optimizer", optimizers)):
        if by_name:
            state[kind] = next(iter(by_name.values())) if len(by_name) == 1 else by_name
    for stem, held in ranks.items():
        state[stem] = _of_ranks(folder, stem, held)
        world_size = max(world_size, len(held))
    return Beside(state, step, world_size, frozenset(taken))


def _of_dcp(folder: Place) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Models and optimizers that FSDP saved in parts, each a folder of DCP, and how many ranks there were."""
    states: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    world_size = 1
    for name in members.folders(folder):
        match = _OF_DCP.fullmatch(name)
        held = dcp.read(folder / name) if match else None
        if match and held is not None:
            kind = "optimizer" if match[1] == "optimizer" else "model"
            states[kind][name] = held.state.get(kind, held.state)
            world_size = max(world_size, held.world_size)
    return states["model"], states["optimizer"], world_size


def is_complete(folder: Place) -> bool:
    """Whether a trainer has finished a checkpoint there: these files it writes last."""
    return any((folder / name).is_file() for name in (TRAINER_STATE, "random_states_0.pkl"))


def _load(folder: Place, name: str) -> Any:
    return torch_files.load_path(members.member(folder, name))


def _of_ranks(folder: Place, stem: str, held: dict[int | None, Any]) -> Any:
    if set(held) == {None}:
        return held[None]
    by_rank = {rank: value for rank, value in held.items() if rank is not None}
    if len(by_rank) < len(held):
        log.warning("%s: %s without a rank is left out: there are those of ranks too", folder, stem)
    prove_all(by_rank.keys(), max(by_rank) + 1, folder, lambda rank: f"{stem}_{rank}")
    return PerRank(tuple(by_rank[rank] for rank in sorted(by_rank)))
