"""OLMo's files of ranks: which there are, which values all ranks share, and the `torch_legacy` layout joined."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.formats import members
from holdfast.formats.alike import alike
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.machine.untrusted import damaged_as, read_whole
from holdfast.formats.members import glanced, prove_all
from holdfast.formats.sharded import join_nodes
from holdfast.formats.simplified import PerRank
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

MAX_WORLD = 1 << 20
"""More ranks than there are; a file that claims more is mistaken."""

_RANK = re.compile(r"rank(0|[1-9][0-9]{0,6})\.pt")


def as_written(path: Place) -> AbstractContextManager[None]:
    """Turn what a file of another shape than OLMo's leads to into Damaged that names the file."""
    return damaged_as(f"{path} is not as OLMo writes it", unexpected=True)


def listed(folder: Place) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    return members.names(folder) if folder.is_dir() else []


def rank_files(folder: Place) -> dict[int, Place]:
    """``rank<N>.pt`` of a folder by N, in order."""
    files = {int(m[1]): folder / m[0] for m in map(_RANK.fullmatch, listed(folder)) if m}
    return dict(sorted(files.items()))


def proved(files: Mapping[int, Place], claimed: int | None, folder: Place) -> int:
    """The world size, if there is exactly one file for each of its ranks. Raises Damaged, naming those that are not.

    ``claimed``: the world size that the checkpoint names, if it does.
    """
    world = claimed or max(files, default=-1) + 1
    prove_all(files.keys(), world, folder, lambda rank: f"rank{rank}.pt")
    return world


def told_world_size(folder: Place) -> int | None:
    """The world size that a checkpoint names: in metadata.yaml, else in the trainer's state of rank 0.

    metadata.yaml holds this number and nothing else, one line, for which no YAML library is needed.
    """
    path, trainer = folder / "metadata.yaml", folder / "train" / "rank0.pt"
    if path.is_file():
        text = read_whole(path, 1 << 16).decode("utf-8", "replace")
        match = re.search(r"^world_size:[ \t]*([0-9]{1,7})[ \t]*(?:#.*)?$", text, re.MULTILINE)
        if match:
            return plausible(int(match[1]))
    return plausible(_trainer(trainer).get("world_size")) if trainer.is_file() else None


def plausible(value: Any) -> int | None:
    """A world size that can be one."""
    return value if type(value) is int and 0 < value <= MAX_WORLD else None


def trainer_state(files: Mapping[int, Place], folder: Place, world: int | None = None) -> tuple[dict[str, Any], int]:
    """What the trainers of all ranks kept, and the world size: equal values once, others as `PerRank`.

    A rank without a file has the state of rank 0: so OLMo itself resumes on more ranks than saved. ``world``: the
    world size, if it is known; else what rank 0 says of it, or how many files there are.
    """
    if not files:
        return {}, world or 1
    if 0 not in files:
        raise Damaged(f"{folder}/rank0.pt is missing: all ranks without a file of their own take the trainer's from it")
    wanted = (rank for rank in files if world is None or rank < world)
    kept = {rank: _trainer(files[rank]) for rank in glanced(wanted, files.__getitem__)}
    size = world or plausible(kept[0].get("world_size")) or max(files) + 1
    without = [rank for rank in range(size) if rank not in kept]
    if without:
        log.warning(
            "%s has no file of rank %s: they take the trainer's state of rank 0",
            folder,
            ", ".join(map(str, without[:10])),
        )
    beyond = [rank for rank in files if rank >= size]
    if beyond:
        log.warning(
            "%s has files of ranks beyond its world size %d, not read: %s",
            folder,
            size,
            ", ".join(map(str, beyond[:10])),
        )
    return joint([kept.get(rank, kept[0]) for rank in range(size)]), size


def _trainer(path: Place) -> dict[str, Any]:
    held = load_path(path)
    if not isinstance(held, dict):
        raise Damaged(f"{path} should hold a trainer's state, a dict, but holds a {type(held).__name__}")
    return held


def joint(states: list[dict[Any, Any]]) -> dict[Any, Any]:
    """One state of those of all ranks: what is alike once, else a `PerRank`, None for ranks that lack a key."""
    return {key: _joint([state.get(key) for state in states], 0) for key in dict.fromkeys(k for s in states for k in s)}


def _joint(values: list[Any], depth: int) -> Any:
    first = values[0]
    others = [v for v in values[1:] if v is not first]
    if depth < 8 and isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in others):
        return {key: _joint([v[key] for v in values], depth + 1) for key in first}
    return first if all(alike(first, v) for v in others) else PerRank(tuple(values))


def read_legacy(folder: Place) -> tuple[dict[str, Any], dict[str, Any], int] | None:
    """State, trainer's state and world size of the rank files in a folder; None if they are no such states.

    The layout is OLMo's `torch_legacy`: ``rank<N>.pt``, each the state of a rank, with ShardedTensors.
    """
    files = rank_files(folder)
    held = {rank: load_path(path) for rank, path in files.items()}
    if not files or not is_legacy(held[min(held)]):
        return None
    for rank, state in held.items():
        if not is_legacy(state):
            raise Damaged(
                f"{files[rank]} holds no model and optimizer as {files[min(files)]} does: it is of another save"
            )
    world = proved(files, plausible(held[min(held)].get("world_size")), folder)
    parts = {key: [(r, state.pop(key)) for r, state in held.items() if key in state] for key in ("model", "optim")}
    cut = join_nodes({key: part for key, part in parts.items() if part}, world, f"{folder}: ")
    return {key: _agreed(value, key, folder) for key, value in cut.items()}, joint([*held.values()]), world


def is_legacy(held: Any) -> bool:
    """Whether a loaded file is one rank's state in this layout."""
    return isinstance(held, dict) and isinstance(held.get("model"), dict) and bool({"optim", "global_step"} & {*held})


def _agreed(node: Any, at: str, folder: Place) -> Any:
    """A joined tree, with the first rank's tensor where they differ. Raises Damaged for other values that differ."""
    if isinstance(node, Mapping):
        return {key: _agreed(value, f"{at}.{key}", folder) for key, value in node.items()}
    if not isinstance(node, PerRank):
        return node
    values = [value for value in node.values if value is not None]
    if not all(isinstance(v, Stored) for v in values) or len({(v.dtype, v.shape) for v in values}) > 1:
        raise Damaged(f"{folder}: {at} differs between ranks: the files are of different saves, or one was altered")
    log.warning("%s: %s differs between ranks; that of the first is taken", folder, at)
    return values[0]
