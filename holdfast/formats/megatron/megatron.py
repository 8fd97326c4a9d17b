"""Checkpoints of Megatron-core's dist_checkpointing (``torch_dist``): DCP with `common.pt` and `metadata.json`.

Megatron does not save which parameters were a group, so no groups are guessed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats import fqns
from holdfast.formats.assemble import ForeignState
from holdfast.formats.dcp import dcp
from holdfast.formats.dcp.dcp import DcpState
from holdfast.formats.machine.pickles import Record
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.machine.untrusted import read_json, read_whole
from holdfast.formats.megatron import shards
from holdfast.formats.stored import Opaque, Stored, float_scalar
from holdfast.storage.place import Place

_LATEST = "latest_checkpointed_iteration.txt"
_CONFIG = "metadata.json"
_MASTERS = ("fp32_param", "param", "master_param")
"""What the optimizers call the weights that they step, where the module holds others."""

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")


def read(path: Place) -> ForeignState | None:
    """The checkpoint at ``path``: the folder of an iteration, or a run folder, whose latest iteration is taken."""
    folder, reading = _folder(path)
    if folder is None:
        return None
    config = _config(folder)
    if config is None:
        return _without_config(folder, reading)
    backend = config.get("sharded_backend")
    if backend != "torch_dist" or config.get("sharded_backend_version", 1) != 1:
        raise Unsupported(
            f"{folder} keeps its tensors in format {backend!r}, version {config.get('sharded_backend_version')}; only "
            "torch_dist 1 is read. Load it with the Megatron that wrote it and save it with --ckpt-format torch_dist"
        )
    common = _common(folder)
    state = dcp.read_folder(folder)
    content, how = _state(state, common, folder)
    iteration, args = common.get("iteration"), common.get("args")
    world_size = args.get("world_size") if isinstance(args, Record) else None
    return ForeignState(
        "Megatron-core torch_dist", content, iteration if type(iteration) is int else None,
        world_size if type(world_size) is int and world_size > 0 else state.world_size,
        {"megatron": "torch_dist 1"}, "; ".join(filter(None, [reading, *how])),
    )  # fmt: skip


def _folder(path: Place) -> tuple[Place | None, str]:
    """The folder of one iteration that a path means, and why it is that one."""
    if path.name in (_LATEST, _CONFIG) and path.is_file():
        path = path.parent
    if _config(path) is not None:
        return path, ""
    if (path / "common.pt").is_file() and (path / ".metadata").is_file():
        raise NotACheckpoint(
            f"{path} holds no valid {_CONFIG}, which Megatron writes last: that save never finished. Take another one"
        )
    if not (path / _LATEST).is_file():
        return None, ""
    latest = read_whole(path / _LATEST, 1 << 20).decode("utf-8", "replace").strip()
    name = latest if latest == "release" else f"iter_{int(latest):07d}" if re.fullmatch(r"[0-9]{1,12}", latest) else ""
    if not name or not (path / name).is_dir():
        raise NotACheckpoint(f"{path / _LATEST} names iteration {latest[:40]!r}, but there is no folder of it")
    return path / name, f"the latest iteration, {name}"


def _config(folder: Place) -> dict[str, Any] | None:
    """`metadata.json`, if it is Megatron's."""
    path = folder / _CONFIG
    if not path.is_file() or path.stat().st_size > 1 << 20:
        return None
    try:
        config = read_json(path)
    except Damaged:
        return None
    return config if isinstance(config, dict) and "sharded_backend" in config else None


def _without_config(folder: Place, reading: str) -> ForeignState | None:
    if any(folder.glob("mp_rank_*")):
        raise Unsupported(
            f"{folder} is in Megatron's old format, one file for each model-parallel rank; load it with Megatron and "
            "save it with --ckpt-convert-format torch_dist"
        )
    content = dcp.read(folder)  # Megatron-FSDP writes plain DCP
    if content is None:
        raise NotACheckpoint(f"{folder} holds no {_CONFIG}: it never finished, or is no checkpoint of Megatron-core")
    return replace(content, reading="; ".join(filter(None, [reading, content.reading])))


def _common(folder: Place) -> dict[Any, Any]:
    path = folder / "common.pt"
    if not path.is_file():
        raise Damaged(f"{path} is missing; bring it back from a copy")
    try:
        common = load_path(path)
    except Unsupported as error:
        return {"common": Opaque(str(error))}
    if not isinstance(common, dict):
        raise Damaged(f"{path} holds no state")
    return common


def _state(state: DcpState, common: dict[Any, Any], folder: Place) -> tuple[dict[str, Any], list[str]]:
    tensors, objects = _split(state, folder)
    own: dict[str, Stored] = {}
    of_optimizer: dict[str, dict[str, Stored]] = {}
    buckets: dict[str, Any] = {}
    for key, tensor in tensors.items():
        part = _OPTIMIZER.fullmatch(key)
        if part is not None:
            of_optimizer.setdefault(part[2], {})[part[1]] = tensor
        else:
            (buckets if _BUCKET.match(key) else own)[key] = tensor
    module: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, tensor in own.items():
        module.update(shards.apart(key, tensor, folder))
    for key, grid in objects.items():
        into = module if key.endswith("_extra_state") else buckets if _BUCKET.match(key) else values
        into.update(shards.objects_apart(key, grid, folder))
    parameters: dict[str, dict[str, Any]] = {}
    for key, kinds in of_optimizer.items():
        for kind, tensor in kinds.items():
            for fqn, part_of_it in shards.apart(key, tensor, folder).items():
                parameters.setdefault(fqn, {})[kind] = part_of_it
    called = fqns.unwrapped(dict.fromkeys([*module, *parameters]))
    module = shards.glued({called[key]: value for key, value in module.items()})
    parameters = shards.glued_state({called[key]: value for key, value in parameters.items()})
    result = {**_models(module, parameters), **values}
    if parameters or buckets or "optimizer" in common:
        result["optimizer"] = _optimizer(parameters, buckets, common.get("optimizer"), folder)
    rest = {key: value for key, value in common.items() if key != "optimizer"}
    clash = {key: rest.pop(key) for key in list(rest) if key in result}
    result |= {**rest, **({"common": clash} if clash else {})}
    stacks = sorted({shards.stack_of(key, tensor) for key, tensor in own.items()} - {""})
    how = [f"stacked layers of {', '.join(stacks)} taken apart"] if stacks else []
    how += ["the optimizer's flat buffers are kept as they are"] if buckets else []
    return result, how


def _split(state: DcpState, folder: Place) -> tuple[dict[str, Stored], dict[str, shards.Grid]]:
    """Tensors in their true shapes, and objects by name."""
    reformulated = state.metadata[0].get("mcore_data")
    tensors: dict[str, Stored] = {}
    objects: dict[str, shards.Grid] = {}
    for key, value in {**_objects_beside(folder), **state.flat}.items():
        if isinstance(value, Stored):
            about = reformulated.get(key) if isinstance(reformulated, dict) else None
            shape = about.get("nd_reformulated_orig_global_shape") if isinstance(about, dict) else None
            tensors[key] = value if shape is None else shards.unflattened(key, value, shape, folder)
        else:
            name, place = shards.place_of(key)
            # Each is a list of what its rank had under that key: one thing.
            objects.setdefault(name, {})[place] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return tensors, objects


def _objects_beside(folder: Place) -> dict[str, Any]:
    """Objects that older versions kept in files of their own: ``<key>/shard_<offsets>_<shape>.pt``."""
    paths: list[Place] = [*folder.glob("*/shard_*.pt")]
    return {f"{path.parent.name}/{path.stem}": [load_path(path)] for path in sorted(paths, key=str)}


def _models(module: dict[str, Any], parameters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The weights that the optimizer steps are the model; what the module held beside them, if it did, the module."""
    masters = {}
    for fqn, state in parameters.items():
        for kind in _MASTERS:
            if kind in state:
                masters[fqn] = state.pop(kind)
                break
    return {"model": {**module, **masters}, "module": module} if masters else {"model": module}


def _optimizer(
    parameters: dict[str, dict[str, Any]], buckets: dict[str, Any], common: Any, folder: Place
) -> dict[str, Any]:
    """The optimizer, or several that are chained, as one: each parameter is in one of them."""
    parts = _parts(common)
    if not any(part["param_groups"] for part in parts):
        # In the formats of flat buckets each model-parallel rank wrote the settings; they are the same for all.
        settings = {key.partition("optimizer.distributed.")[0]: key for key in sorted(buckets, reverse=True)
                    if key.endswith(".optimizer")}  # fmt: skip
        parts += [part for _, key in sorted(settings.items()) for part in _parts(buckets[key])]
    groups = [dict(group) for part in parts for group in part["param_groups"] if isinstance(group, dict)]
    if len(groups) == 1:
        groups[0].setdefault("params", list(parameters))
    common_steps = [part["state"]["common_step"] for part in parts if "common_step" in part["state"]]
    steps = {_number(step) for step in common_steps or [group["step"] for group in groups if "step" in group]}
    if len(steps) == 1 and None not in steps:
        step = float_scalar(steps.pop() or 0.0, folder / "common.pt")
        parameters = {fqn: {"step": step, **state} for fqn, state in parameters.items()}
    rest = {k: v for part in parts for k, v in part.items() if k not in ("state", "param_groups") and not _empty(v)}
    if buckets:  # which parameter lies where in them is known to the optimizer that wrote them alone
        rest["distributed"] = {key.replace("optimizer.distributed.", "", 1): value for key, value in buckets.items()}
    return {"state": parameters, "param_groups": groups, **rest}


def _parts(common: Any) -> list[dict[str, Any]]:
    """What is common to all ranks of each optimizer: settings, and the step."""
    if not isinstance(common, dict):
        return []
    if common and all(type(key) is int for key in common):
        return [part for key in sorted(common) for part in _parts(common[key])]
    inner = common.get("optimizer")
    part = {**{k: v for k, v in common.items() if k != "optimizer"}, **inner} if isinstance(inner, dict) else common
    state, groups = part.get("state"), part.get("param_groups")
    return [{**part, "state": state if isinstance(state, dict) else {},
             "param_groups": groups if isinstance(groups, (list, tuple)) else []}]  # fmt: skip


def _empty(value: Any) -> bool:
    """Whether only the shards of it were anything."""
    if isinstance(value, dict):
        return all(map(_empty, value.values()))
    return isinstance(value, list) and all(map(_empty, value))


def _number(step: Any) -> float | None:
    if isinstance(step, Stored):
        step = step.read().item() if prod(step.shape) == 1 else None
    try:
        return float(step) if isinstance(step, (int, float)) else None
    except OverflowError:
        return None
