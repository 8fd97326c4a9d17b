"""The files that the ranks of a DeepSpeed run saved, counted, proved to be of one save, and joined."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats.assemble import ForeignState
from holdfast.formats.deepspeed.fields import load_model, load_optimizer
from holdfast.formats.deepspeed.slice import Slice, join_slices, slice_of
from holdfast.formats.fqns import optimizer_state, unwrapped
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.members import prove_all
from holdfast.formats.sharded import join_ranks
from holdfast.formats.sources import Stretch
from holdfast.storage.place import Place

_OPTIM = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,7})-(?:model_(\d{1,7})-)?model_states\.pt")
_EXPERT = re.compile(r"(?:(?:layer_\d+_)?expert_\d+|expp_rank_\d+)_mp_rank_\d+_(?:model|optim)_states\.pt")
_SECTIONS = frozenset(["model", "module", "optimizer", "optimizer_wrapper", "buffers_by_rank"])

ByRank = dict[int, dict[int, Stretch]]
"""Files by model-parallel and then by data-parallel rank."""


def is_rank_file(name: str) -> bool:
    """Whether a rank saved a file of this name."""
    return any(pattern.fullmatch(name) for pattern in (_OPTIM, _MODEL, _LAYER, _EXPERT))


def read_ranks(files: Mapping[str, Stretch], where: Place, reading: str = "") -> ForeignState:
    """What the files of one save hold. ``where``: their folder, for errors. Raises Damaged, Unsupported."""
    with damaged_as(f"{where} is not as DeepSpeed writes it", unexpected=True):
        optims, models, layers = sorted_files(files, where)
        shared: dict[str, str] = {}
        slices = []
        world_size = 0
        for mp, by_rank in sorted(models.items()):
            loaded = [load_model(stretch) for _, stretch in sorted(by_rank.items())]
            states = [load_optimizer(stretch) for _, stretch in sorted(optims.get(mp, {}).items())]
            _check_ranks(loaded, states, where)
            shared = shared or dict(loaded[0].get("shared_params") or {})  # only rank 0 has them
            slices.append(slice_of(mp, loaded, states, shared, where))
            world_size += len(states) or _number(loaded[0], "dp_world_size") or 1
        whole = join_slices(slices, layers, where)
        version = slices[0].others[0].get("ds_version")
        return checkpoint_of(whole, world_size, where, reading, version)


def sorted_files(files: Mapping[str, Stretch], where: Place) -> tuple[ByRank, ByRank, ByRank]:
    """Optimizer files, model files and layer files, each counted and found complete."""
    optims: ByRank = {}
    models: ByRank = {}
    layers: ByRank = {}
    kinds: dict[str, str] = {}
    for name, stretch in files.items():
        if _EXPERT.fullmatch(name):
            raise Unsupported(
                f"{where} holds experts in files of their own ({name}): DeepSpeed's mixture of experts is not read. "
                "Convert it with DeepSpeed's ds_to_universal.py, or save the model's state_dict() with torch"
            )
        if match := _OPTIM.fullmatch(name):
            _put(optims, int(match[3]), int(match[2]), stretch, name, where)
            kinds.setdefault(f"{match[1]}zero_…_optim_states.pt", name)
        elif match := _MODEL.fullmatch(name):
            _put(models, int(match[2]), int(match[1] or 0), stretch, name, where)
            kinds.setdefault("zero_…_model_states.pt" if match[1] else "mp_…_model_states.pt", name)
        elif match := _LAYER.fullmatch(name):
            _put(layers, int(match[1]), int(match[2] or 0), stretch, name, where)
    for suffix in ("_optim_states.pt", "_model_states.pt"):
        both = [name for kind, name in kinds.items() if kind.endswith(suffix)]
        if len(both) > 1:
            raise Damaged(
                f"{where} holds files of two saves that named them differently ({both[0]} and {both[1]}): move those "
                "of one of them away"
            )
    if not models:
        raise NotACheckpoint(f"{where} holds no *_model_states.pt: that save never finished, or the file was lost")
    _prove_all(models.keys(), where, "mp_rank_{:02d}…_model_states.pt")
    for mp, by_rank in models.items():
        _prove_all(by_rank.keys(), where, f"zero_pp_rank_{{}}_mp_rank_{mp:02d}_model_states.pt")
    if optims:
        if optims.keys() != models.keys():
            lost = sorted(optims.keys() ^ models.keys())[0]
            raise Damaged(f"{where}: of mp_rank_{lost:02d} only the model or only the optimizer files are there")
        for mp, by_rank in optims.items():
            _prove_all(by_rank.keys(), where, f"zero_pp_rank_{{}}_mp_rank_{mp:02d}_optim_states.pt")
    return optims, models, layers


def _put(into: ByRank, outer: int, inner: int, stretch: Stretch, name: str, where: Place) -> None:
    if inner in into.setdefault(outer, {}):
        raise Damaged(f"{where} holds two files for the same rank, one of them {name}: move one of them away")
    into[outer][inner] = stretch


def _prove_all(ranks: Collection[int], where: Place, name: str) -> None:
    prove_all(ranks, max(ranks) + 1, where, name.format)


def _check_ranks(models: Sequence[Mapping[str, Any]], optims: Sequence[Mapping[str, Any]], where: Place) -> None:
    """That there are as many files as ranks saved, and that all are of the same save."""
    stages = {_stage(optim["optimizer_state_dict"]) for optim in optims}
    if len(stages) > 1:
        raise Damaged(f"{where}: its optimizer files are of ZeRO stages {sorted(stages)}: files of different saves")
    for rank, optim in enumerate(optims):
        partitions = optim["optimizer_state_dict"].get("partition_count")
        count = max(partitions, default=0) if isinstance(partitions, (list, tuple)) else partitions
        count = count or _number(models[0], "dp_world_size")
        if count is not None and count != len(optims):
            fault = (
                "some are missing" if count > len(optims) else "those of an earlier save on more ranks are there too"
            )
            raise Damaged(
                f"{where} has optimizer files of {len(optims)} ranks, but rank {rank} saved as one of {count}: {fault}"
            )
    wanted = len(optims) if stages == {3} else 1
    if len(models) != wanted:
        raise Damaged(
            f"{where}: ZeRO stage {max(stages, default=0)} on {len(optims)} ranks saves {wanted} model files, but "
            f"{len(models)} are there: some are missing, or of another save"
        )
    steps = {_number(model, "global_steps") for model in models}
    if len(steps) > 1:
        raise Damaged(f"{where}: its model files are of steps {sorted(map(str, steps))}: files of different saves")


def _stage(optim: Mapping[str, Any]) -> int:
    stage = optim.get("zero_stage", 3 if "fp32_flat_groups" in optim else 0)
    return int(getattr(stage, "args", (stage,))[0])  # an enum of DeepSpeed


def _number(model: Mapping[str, Any], key: str) -> int | None:
    number = model.get(key)
    return number if type(number) is int and number >= 0 else None


def checkpoint_of(whole: Slice, world_size: int, where: Place, reading: str, version: Any) -> ForeignState:
    """A checkpoint from all slices joined: names without wrappers, sections under our names."""
    part = whole.optimizer
    named = [*whole.model, *whole.module, *(part.states if part else ())]
    called = unwrapped(dict.fromkeys(named))

    def plainly(section: Mapping[str, Any]) -> dict[str, Any]:
        return {called.get(name, name): value for name, value in section.items()}

    state: dict[str, Any] = {"model": plainly(whole.model)}
    if whole.module:
        state["module"] = plainly(whole.module)
    if part is not None:
        groups = [{**g, "params": [called.get(name, name) for name in g["params"]]} for g in part.groups]
        state["optimizer"] = {"state": plainly(part.states), "param_groups": groups}
        state["optimizer_wrapper"] = part.wrapper
    elif len(whole.plain) == 1:
        state["optimizer"], state["optimizer_wrapper"] = _plain(next(iter(whole.plain.values())), where)
    else:  # integer ids of each rank's own parameters: they cannot be one optimizer
        each = {key: _plain(saved, where) for key, saved in whole.plain.items()}
        state["optimizer"] = {key: optimizer for key, (optimizer, _) in each.items()}
        state["optimizer_wrapper"] = {key: wrapper for key, (_, wrapper) in each.items() if wrapper}
    if whole.buffers_by_rank:
        state["buffers_by_rank"] = plainly(whole.buffers_by_rank)
    rest = join_ranks(whole.others, f"{where}: ")
    step = rest.get("global_steps")
    if _SECTIONS & rest.keys():  # the client may name its own as it likes
        rest = {"client_state": rest}
    state.update(rest)
    state = {key: value for key, value in state.items() if value != {} or key == "model"}
    return ForeignState(
        "DeepSpeed", state, step if type(step) is int else None, world_size,
        {"deepspeed": str(version)} if version else {}, reading,
    )  # fmt: skip


def _plain(saved: Mapping[str, Any], where: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer of a run without ZeRO: torch's own, or DeepSpeed's for fp16 around one."""
    inner = saved.get("optimizer_state_dict")
    if isinstance(inner, Mapping):
        return optimizer_state(inner, where), {k: v for k, v in saved.items() if k != "optimizer_state_dict"}
    return optimizer_state(saved, where), {}
