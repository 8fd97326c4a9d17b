"""Checkpoints of `hfai.checkpoint.save`: a part a rank; small tensors are dealt out among them, large ones cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import fqns, members, recognise
from holdfast.formats.assemble import ForeignState
from holdfast.formats.machine.torch_files import is_torch_file, load_file
from holdfast.formats.members import glanced, prove_all
from holdfast.formats.sources import all_of, file
from holdfast.formats.stored import Stored, from_flat
from holdfast.storage.place import Place

VERSION = "2.0.0"
_PART = re.compile(r"PART_(\d{3,})\.pt")
_COUNT, _VERSION = "__nshards__", "__version__"


def read(path: Place) -> ForeignState | None:
    """The checkpoint at ``path``, a folder (whatever its name ends with) or one of its parts; None if it is no such."""
    folder = path.parent if _PART.fullmatch(path.name) and path.is_file() else path
    if not folder.is_dir():
        return None
    files = {int(m[1]): m[0] for m in map(_PART.fullmatch, members.listed(folder)) if m}
    if not files:
        return None
    first = _load(folder, files[min(files)])
    if not isinstance(first, dict) or _COUNT not in first:
        return None
    _check_version(folder, first)
    count = first[_COUNT]
    if type(count) is not int or count < 1:
        raise Damaged(f"{folder / files[min(files)]} says that there are {str(count)[:40]} parts")
    prove_all(files.keys(), count, folder, lambda rank: _part(folder, rank).name)
    ranks = glanced(range(count), lambda rank: folder / files[rank])
    parts = [first if rank == min(files) else _load(folder, files[rank]) for rank in ranks]
    for rank, part in enumerate(parts):
        _check(folder / files[rank], part, count)
    lengths = {key: {len(part[key]) for part in parts} for key in ("model", "optimizer")}
    if any(len(held) != 1 for held in lengths.values()):
        raise Damaged(f"{folder}: its parts hold different numbers of models or optimizers: two saves are mixed")
    models = [_model(folder, [part["model"][i] for part in parts]) for i in range(len(first["model"]))]
    optimizers = [_optimizer(folder, [part["optimizer"][i] for part in parts]) for i in range(len(first["optimizer"]))]
    state: dict[str, Any] = {k: v for k, v in parts[0].items() if k not in (_COUNT, _VERSION, "model", "optimizer")}
    if models:
        state["model"] = models[0] if len(models) == 1 else models
    if optimizers:
        state["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
    return ForeignState(
        "hfai.checkpoint", state, step=recognise.step_of(state), world_size=count,
        producer={"hfai.checkpoint": VERSION}, reading="" if folder == path else f"its folder {folder}",
    )  # fmt: skip


def _load(folder: Place, name: str) -> Any:
    data = all_of(file(members.member(folder, name)))
    if not is_torch_file(data):
        raise Damaged(f"{folder / name} is no file of torch.save")
    return load_file(data)


def _check_version(path: Place, part: Mapping[str, Any]) -> None:
    version = part.get(_VERSION, "1.0.0")
    if version != VERSION:
        raise Unsupported(f"{path} is of version {str(version)[:40]} of hfai.checkpoint; version {VERSION} is read")


def _check(path: Place, part: Any, count: int) -> None:
    """Raise Damaged or Unsupported unless this is a part of a save in ``count`` parts."""
    if not isinstance(part, dict):
        raise Damaged(f"{path} is no part of a checkpoint of hfai")
    _check_version(path, part)
    if part.get(_COUNT) != count:
        raise Damaged(f"{path} is of a save in {str(part.get(_COUNT))[:40]} parts, the others of one in {count}")
    for key in ("model", "optimizer"):
        pairs = part.get(key)
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise Damaged(f"{path}: its {key!r} is no list of pairs of small and of large tensors")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(half, dict) for half in value)


def _model(folder: Place, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for rank, (small, _) in enumerate(pairs):
        _take(folder, rank, tensors, small)
    for name, tensor in _large(folder, [large for _, large in pairs]).items():
        if name in tensors:
            raise Damaged(f"{folder}: {name} is there both whole and in chunks")
        tensors[name] = tensor
    return fqns.model_state(tensors)


def _optimizer(folder: Place, pairs: list[tuple[dict[str, Any], dict[Any, Any]]]) -> dict[str, Any]:
    first = pairs[0][0]
    state: dict[Any, Any] = {}
    for rank, (small, _) in enumerate(pairs):
        own, groups = small.get("state"), small.get("param_groups")
        if not isinstance(own, dict) or not isinstance(groups, list):
            raise Damaged(f"{_part(folder, rank)}: its optimizer has no state or no param_groups")
        if _members(groups) != _members(first["param_groups"]):
            raise Damaged(f"{_part(folder, rank)} has other parameter groups than part 0: parts of two saves are mixed")
        _take(folder, rank, state, {k: dict(v) if isinstance(v, dict) else v for k, v in own.items()})
    for key, tensor in _large(folder, [large for _, large in pairs]).items():
        held = state.get(key[0]) if isinstance(key, tuple) and len(key) == 2 else None
        if not isinstance(held, dict) or key[1] in held:
            raise Damaged(f"{folder}: chunks of {key} belong to no state of a parameter, or it is there whole too")
        held[key[1]] = tensor
    return fqns.optimizer_state({**first, "state": state}, folder)


def _members(groups: list[Any]) -> list[Any]:
    return [group.get("params") if isinstance(group, dict) else None for group in groups]


def _take(folder: Place, rank: int, into: dict[Any, Any], more: Mapping[Any, Any]) -> None:
    twice = into.keys() & more.keys()
    if twice:
        raise Damaged(f"{_part(folder, rank)} holds {min(map(str, twice))}, which a part before it holds too")
    into.update(more)


def _large(folder: Place, each: list[dict[Any, Any]]) -> dict[Any, Stored]:
    """Tensors that were flattened and cut among the ranks; if that gave fewer chunks than ranks, the last have none."""
    chunks: dict[Any, list[tuple[int, tuple[int, ...], Stored]]] = {}
    for rank, held in enumerate(each):
        for key, pair in held.items():
            shape, chunk = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
            if not isinstance(shape, tuple) or not isinstance(chunk, Stored) or len(chunk.shape) != 1:
                raise Damaged(f"{_part(folder, rank)}: {key} is no pair of a shape and a flat chunk")
            chunks.setdefault(key, []).append((rank, tuple(shape), chunk))
    return {key: _whole(folder, key, held) for key, held in chunks.items()}


def _whole(folder: Place, key: Any, held: list[tuple[int, tuple[int, ...], Stored]]) -> Stored:
    _, shape, first = held[0]
    if any(other != shape or chunk.dtype != first.dtype for _, other, chunk in held):
        raise Damaged(f"{folder}: its parts say different shapes or types of {key}: parts of two saves are mixed")
    starts, at = [], 0
    for _, _, chunk in held:
        starts.append(at)
        at += chunk.shape[0]
    if at != prod(shape):
        ranks = ", ".join(str(rank) for rank, _, _ in held[:20])
        raise Damaged(f"{folder}: {key} of shape {list(shape)} has {prod(shape)} elements, parts {ranks} hold {at}")
    return from_flat(first.dtype, shape, [(start, chunk) for start, (_, _, chunk) in zip(starts, held, strict=True)])


def _part(folder: Place, rank: int) -> Place:
    return folder / f"PART_{rank:03d}.pt"
