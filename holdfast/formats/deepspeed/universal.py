"""Universal checkpoints of DeepSpeed: a folder for each parameter, whatever ranks saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import members
from holdfast.formats.alike import alike
from holdfast.formats.assemble import ForeignState
from holdfast.formats.deepspeed.fields import load_common, load_model
from holdfast.formats.deepspeed.ranks import checkpoint_of, sorted_files
from holdfast.formats.deepspeed.slice import Slice, module_weights, others, weights
from holdfast.formats.deepspeed.zero import GEOMETRY, Partitioned, Shapes, proper, saved_order, spread
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.members import glanced
from holdfast.formats.sources import Stretch, all_of, file
from holdfast.formats.stored import Stored, cut, reshaped
from holdfast.storage.place import Place

_COMMON = "optimizer_state.pt"
_MASTER = "fp32.pt"
_STEP = "step.pt"


def is_universal(folder: Place) -> bool:
    """Whether a folder is a universal checkpoint."""
    return (folder / "zero" / _COMMON).is_file()


def read_universal(folder: Place, files: Mapping[str, Stretch], reading: str = "") -> ForeignState:
    """The universal checkpoint in ``folder``, whose own files are ``files``. Raises Damaged, Unsupported."""
    with damaged_as(f"{folder} is not as DeepSpeed writes it", unexpected=True):
        _, by_rank, _ = sorted_files(files, folder)
        ranks = [[load_model(s) for _, s in sorted(ranks.items())] for _, ranks in sorted(by_rank.items())]
        first = ranks[0][0]
        common = load_common(all_of(file(folder / "zero" / _COMMON)))
        shapes = _all_shapes([models[0] for models in ranks], folder)
        masters, states = _parameters(folder, shapes, first.get("module") or {}, common)
        wrapper = {key: value for key, value in common.items() if key not in GEOMETRY}
        part = Partitioned(masters, states, _groups(common, shapes, first, folder), wrapper)
        sharded = "fp32_flat_groups" in common
        shared = first.get("shared_params") or {}
        if len(ranks) > 1:
            _check_replicas([models[0] for models in ranks], masters, shared, folder)
        whole = Slice(
            weights(ranks[0], masters, shared, folder, sharded=sharded),
            module_weights(first.get("module") or {}, masters, shared) if len(ranks) == 1 and not sharded else {},
            part,
            others=[others(model) for models in ranks for model in models],
        )
        world_size = len(ranks) * (first.get("dp_world_size") or 1)
        return checkpoint_of(whole, world_size, folder, reading, first.get("ds_version"))


def _all_shapes(models: Sequence[Mapping[str, Any]], folder: Place) -> list[Shapes]:
    """The parameters of each group, of all pipeline stages; of parallel tensors the shapes of the first rank."""
    if any(model.get("param_shapes") is None for model in models):
        raise Damaged(f"{folder}: a model file does not list the parameters")
    groups: list[dict[str, Sequence[int]]] = [{} for _ in range(max(len(model["param_shapes"]) for model in models))]
    for model in models:
        for group, shapes in zip(groups, model["param_shapes"], strict=False):
            for name, shape in shapes.items():
                group.setdefault(name, shape)
    return [proper(group, folder) for group in groups]


def _parameters(
    folder: Place, shapes: Sequence[Shapes], module: Mapping[str, Any], common: Mapping[str, Any]
) -> tuple[dict[str, Stored], dict[str, dict[str, Any]]]:
    """Masters and optimizer state of every parameter, from its own folder."""
    root = folder / "zero"
    there = set(members.folders(root))
    known = {name: shape for group in shapes for name, shape in group.items()}
    lost = sorted(known.keys() - there)
    if lost:
        raise Damaged(f"{root} has no folder for {len(lost)} of {len(known)} parameters, the first is {lost[0]}")
    # Buffers, frozen and tied weights have folders too, but as fp32: the model's file has them as they were.
    names = [*known, *sorted(there - known.keys() - module.keys())]
    masters: dict[str, Stored] = {}
    states: dict[str, dict[str, Any]] = {}
    files = {name: [f for f in members.names(root / name) if f.endswith(".pt")] for name in names}
    for name in names:
        if _MASTER not in files[name]:
            raise Damaged(f"{root / name / _MASTER} is missing: bring it back, or convert the checkpoint again")
    paths = ((name, root / name / file_name) for name in names for file_name in files[name])
    for name, path in glanced(paths, lambda pair: pair[1]):
        state = states.setdefault(name, {})
        if path.name == _MASTER:
            masters[name] = _tensor(path, known.get(name))
        elif path.name == _STEP:
            spread({name: state}, "step", load_path(path), folder)
        else:
            state[path.name.removesuffix(".pt")] = _tensor(path, known.get(name))
    _add_steps(states, shapes, common, folder)
    return masters, {name: state for name, state in states.items() if state}


def _tensor(path: Place, shape: Sequence[int] | None) -> Stored:
    """A parameter's file: a dict with the tensor as it is, or from ZeRO 3 only its elements."""
    tensor = load_path(path)
    if isinstance(tensor, dict):
        tensor = tensor.get("param")
        shape = tensor.shape if isinstance(tensor, Stored) else None
    if not isinstance(tensor, Stored):
        raise Damaged(f"{path} holds no tensor")
    if shape is None or len(tensor.shape) != 1:
        return tensor
    if tensor.shape[0] < prod(shape):
        raise Damaged(f"{path} holds {tensor.shape[0]} elements of a parameter of shape {tuple(shape)}")
    # Before 0.16 the converter takes some padding along where a parameter has fewer elements than there were ranks.
    return reshaped(cut(tensor, 0, prod(shape)), tuple(shape))


def _add_steps(
    states: Mapping[str, dict[str, Any]], shapes: Sequence[Shapes], common: Mapping[str, Any], folder: Place
) -> None:
    """The step, where the parameters' folders do not have it."""
    inner = common.get("optimizer_state_dict")
    flat = inner.get("state", {}) if isinstance(inner, Mapping) else {}
    ids = [id_ for group in common["param_groups"] for id_ in group.get("params", ())]
    for k, group in enumerate(shapes):
        wanting = {name: states[name] for name in group if states[name] and "step" not in states[name]}
        if not wanting or k >= len(ids):
            continue
        step = flat.get(ids[k], {}).get("step")
        if step is None:
            settings: Mapping[str, Any] = next(
                (group for group in common["param_groups"] if ids[k] in group.get("params", ())), {}
            )
            step = settings.get("step", common.get("base_optimizer_state_step"))
        if step is not None:
            spread(wanting, "step", step, folder)


def _groups(
    common: Mapping[str, Any], shapes: Sequence[Shapes], model: Mapping[str, Any], folder: Place
) -> list[dict[str, Any]]:
    """The param_groups, each with the names of its flat groups' parameters."""
    partitions = common.get("partition_count")
    ranks = max(partitions, default=1) if isinstance(partitions, (list, tuple)) else partitions or 1
    groups, at = [], 0
    for group in common["param_groups"]:
        names: list[str] = []
        count = len(group.get("params", ()))
        for flat in shapes[at : at + count]:
            names += saved_order(list(flat), ranks, model.get("ds_config"))
        at += count
        groups.append({**group, "params": names})
    if at != len(shapes):
        raise Damaged(f"{folder}: its optimizer has {at} flat groups, its model's file {len(shapes)}")
    return groups


def _check_replicas(
    models: Sequence[Mapping[str, Any]], masters: Mapping[str, Any], shared: Mapping[str, str], folder: Place
) -> None:
    """Prove that what has no folder is the same on all model-parallel ranks: otherwise it could not be joined."""
    for name, value in (models[0].get("module") or {}).items():
        if name in masters or shared.get(name) in masters:
            continue
        if not all(alike(value, (model.get("module") or {}).get(name)) for model in models[1:]):
            raise Unsupported(
                f"{folder}: {name} was not trained and differs between the {len(models)} model-parallel ranks: no file "
                "says how to join its parts"
            )
