"""Checkpoints of OLMo and OLMo-core: the layouts of five checkpointers as one model, optimizer and trainer's state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.buffers.memory import no_collection
from holdfast.errors import Damaged, NotACheckpoint
from holdfast.events import log
from holdfast.formats import fqns, members
from holdfast.formats.assemble import ForeignState
from holdfast.formats.dcp import dcp
from holdfast.formats.dcp import names as dcp_names
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.olmo.local import read_local
from holdfast.formats.olmo.ranks import as_written, is_legacy, listed, plausible, rank_files, read_legacy, trainer_state
from holdfast.formats.olmo.safetensors import INDEX, core_optimizer, is_encoded, read_core, read_encoded
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

_STEP = re.compile(r"step(0|[1-9][0-9]*)(-unsharded)?")
_LINKS = ("latest", "latest-unsharded")
_RANK_FILE = re.compile(r"rank([0-9]+|\{rank\})\.pt")
_PARTS = re.compile(r"(?:model|optim|train|other)\.(?:pt|safetensors)|rank[0-9]+\.pt")


class _Content(NamedTuple):
    """What a layout's reader makes of a folder; ``layout`` as OLMo calls it, and what had to be guessed."""

    layout: str
    state: dict[str, Any]
    trainer: dict[str, Any]
    world: int


def read(path: Place) -> ForeignState | None:
    """The checkpoint at ``path``, or None if it is none of OLMo's.

    ``path``: a checkpoint's folder (``step1000``, ``step1000-unsharded``), the run's folder with ``latest`` links or
    steps, one safetensors file with OLMo's keys, a rank file or ``rank{rank}.pt`` of the layout `torch_legacy`, or
    one of OLMo-core 0.1's folders ``model`` and ``optim``.
    """
    with no_collection():  # each rank's file makes many objects, and drops them without help
        if not path.is_dir():
            return _of_file(path)
        folder, how, content = path, "", _content(path)
        if content is None and (chosen := _newest(path)) is not None:
            folder, how = chosen
            content = _content(folder)
        return None if content is None else _checkpoint_of(folder, content, how)


def _checkpoint_of(folder: Place, content: _Content, how: str) -> ForeignState:
    state = dict(content.state)
    for key, value in content.trainer.items():
        # A trainer has no such keys; if one had, its value must not take the place of the model.
        state[f"trainer_{key}" if key in state else key] = value
    step = content.trainer.get("global_step")
    return ForeignState(
        "OLMo", state, step if type(step) is int else None, content.world, {},
        "; ".join(filter(None, [how, f"layout {content.layout}"])), _attachments(folder),
    )  # fmt: skip


def _content(folder: Place) -> _Content | None:
    """What a folder holds, by the first layout that recognises it: first by names of files, then by their content."""
    names = {*listed(folder)}
    layouts: list[tuple[bool, Callable[[Place], _Content | None]]] = [
        ("model_and_optim" in names, _torch_new),
        ((folder / "model" / INDEX).is_file(), _olmo_core),
        ("model" in names and bool(rank_files(folder / "model")), _local),
        (INDEX in names, _olmo_core_part),
        (any(map(_RANK_FILE.fullmatch, names)), _torch_legacy),
        (bool({"model.pt", "model.safetensors"} & names), _full),
    ]
    for likely, reader in layouts:
        if likely:
            content = reader(folder)
            if content is not None:
                return content
    return None


def _of_file(path: Place) -> ForeignState | None:
    if is_encoded(path):
        held = read_encoded(path)
        optimizer = "param_groups" in held
        state = {"optimizer": _optimizer(held, path)} if optimizer else {"model": fqns.model_state(held)}
        return ForeignState("OLMo", state, reading=f"one file, the {'optimizer' if optimizer else 'model'} alone")
    if not _RANK_FILE.fullmatch(path.name):
        return None
    first = path.with_name("rank0.pt") if "{" in path.name else path
    if not first.is_file() or not is_legacy(load_path(first)):
        return None
    content = _torch_legacy(path.parent)
    return None if content is None else _checkpoint_of(path.parent, content, "all ranks' files beside this one")


def _newest(run: Place) -> tuple[Place, str] | None:
    """The checkpoint to take of a run's folder: where its links lead, else the last step; and why.

    Of the two links, and of two folders of one step, the later step counts, then the sharded one, as OLMo itself takes.
    """
    steps = {m[0]: (int(m[1]), m[2] is None) for m in map(_STEP.fullmatch, members.folders(run)) if m}
    newest_first = sorted(steps, key=steps.__getitem__, reverse=True)
    last = next((name for name in newest_first if _is_finished(run / name)), next(iter(newest_first), None))
    links: dict[str, tuple[int, bool]] = {}
    for name in _LINKS:
        leads_to = _STEP.fullmatch((run / name).real().name) if (run / name).is_dir() else None
        if leads_to:
            links[name] = (int(leads_to[1]), leads_to[2] is None)
    if links:
        link = max(links, key=links.__getitem__)
        newer = f" (to {last}, which is later, leads no link)" if last is not None and steps[last] > links[link] else ""
        return run / link, f"{link} in the run's folder, which is {(run / link).real().name}{newer}"
    if last is None:
        return None
    unfinished = [name for name in sorted(steps, key=steps.__getitem__) if steps[name] > steps[last]]
    skipped = f" ({', '.join(unfinished[-3:])} never finished)" if unfinished else ""
    return run / last, f"{last}, the last of {len(steps)} in the run's folder{skipped}"


def _is_finished(folder: Place) -> bool:
    """Whether the file is there that is written last: OLMo's config.yaml, OLMo-core's .metadata.json."""
    return any((folder / name).is_file() for name in ("config.yaml", ".metadata.json"))


def _attachments(folder: Place) -> dict[str, Place]:
    """The other files of a checkpoint: its configuration, and OLMo-core's mark that it is whole."""
    names = [name for name in listed(folder) if not _PARTS.fullmatch(name)]
    return members.attachments(folder, [name for name in names if (folder / name).is_file()])


def _full(folder: Place) -> _Content | None:
    """FullCheckpointer and scripts/unshard.py: one file each for the model, the optimizer and the trainer."""
    names = {*listed(folder)}
    if not any(f"{part}.{kind}" in names for part in ("train", "other") for kind in ("pt", "safetensors")) and (
        "config.yaml" not in names and not is_encoded(folder / "model.safetensors")
    ):
        return None
    kinds = {part: _part(folder, part) for part in ("model", "optim", "train", "other")}
    model, optimizer = kinds["model"], kinds["optim"]
    if not isinstance(model, dict) or not model or not all(isinstance(v, Stored) for v in model.values()):
        return None
    state: dict[str, Any] = {"model": fqns.model_state(model)}
    if optimizer is not None:
        if not isinstance(optimizer, dict) or "param_groups" not in optimizer:
            return None
        state["optimizer"] = _optimizer(optimizer, folder)
    trainer = kinds["other"] if kinds["train"] is None else kinds["train"]
    if trainer is not None and not isinstance(trainer, dict):
        raise Damaged(f"{folder}: train.pt should hold a trainer's state, a dict, but holds a {type(trainer).__name__}")
    return _Content("full", state, trainer or {}, plausible((trainer or {}).get("world_size")) or 1)


def _optimizer(saved: dict[Any, Any], path: Place) -> dict[str, Any]:
    with as_written(path):
        return fqns.optimizer_state(saved, path)


def _part(folder: Place, part: str) -> Any:
    """What a file holds; the safetensors one, if there are two, as OLMo prefers it. None if there is none."""
    packed, plain = folder / f"{part}.safetensors", folder / f"{part}.pt"
    if is_encoded(packed):
        if plain.is_file():
            log.warning("%s is not read: OLMo takes %s", plain, packed.name)
        return read_encoded(packed)
    return load_path(plain) if plain.is_file() else None


def _torch_new(folder: Place) -> _Content | None:
    """TorchNewStyleShardedCheckpointer, and OLMo-core since 1.0: DCP, and a trainer's file of each rank."""
    held = folder / "model_and_optim"
    try:
        saved = dcp.read_folder(held)
    except NotACheckpoint:
        if not rank_files(folder / "train"):
            return None
        raise
    state, how = dcp_names.own_names(saved.tree, held)
    trainer, world = trainer_state(rank_files(folder / "train"), folder / "train")
    return _Content("; ".join(["torch_new", *how]), state, trainer, world if trainer else saved.world_size)


def _torch_legacy(folder: Place) -> _Content | None:
    """TorchLegacyShardedCheckpointer: all of a rank in one file."""
    saved = read_legacy(folder)
    if saved is None:
        return None
    parts, trainer, world = saved
    state = {"model": fqns.model_state(parts["model"])}
    if "optim" in parts:
        state["optimizer"] = _optimizer(parts["optim"], folder)
    return _Content("torch_legacy", state, trainer, world)


def _local(folder: Place) -> _Content | None:
    """LocalShardedCheckpointer: flat parameters of FSDP1."""
    saved = read_local(folder)
    if saved is None:
        return None
    state, world = saved
    trainer, _ = trainer_state(rank_files(folder / "train"), folder / "train", world)
    return _Content("local", state, trainer, world)


def _olmo_core(folder: Place) -> _Content | None:
    """OlmoCoreCheckpointer: OLMo-core 0.1's two folders of flat pieces."""
    model, optimizer = read_core(folder / "model"), read_core(folder / "optim")
    if model is None:
        return None
    state: dict[str, Any] = {"model": fqns.model_state(model)}
    if optimizer is not None:
        state["optimizer"] = core_optimizer(optimizer, folder / "optim")
    trainer, world = trainer_state(rank_files(folder / "train"), folder / "train")
    return _Content("olmo_core", state, trainer, world)


def _olmo_core_part(folder: Place) -> _Content | None:
    """One of OLMo-core 0.1's folders alone."""
    held = read_core(folder)
    if held is None:
        return None
    if "num_param_groups" in held:
        return _Content("olmo_core, the optimizer alone", {"optimizer": core_optimizer(held, folder)}, {}, 1)
    return _Content("olmo_core, one state alone", {"model": fqns.model_state(held)}, {}, 1)
