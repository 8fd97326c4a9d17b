"""OLMo's `local` layout: the flat parameters of FSDP1 as each rank had them, and its optimizer's pieces of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.events import log
from holdfast.formats import fqns
from holdfast.formats.alike import alike
from holdfast.formats.machine.pickles import Record
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.olmo.ranks import as_written, proved, rank_files, told_world_size
from holdfast.formats.stored import Stored, cut, flat, from_flat
from holdfast.storage.place import Place


class Piece(NamedTuple):
    """What one rank holds of one parameter: elements ``start:start + numel`` of it flattened."""

    start: int
    numel: int


@dataclass(eq=False)
class _Cut:
    """A tensor whose flat pieces come rank by rank."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, Stored]] = field(default_factory=list)

    def stored(self) -> Stored:
        return from_flat(self.dtype, self.shape, self.pieces)


def read_local(folder: Place) -> tuple[dict[str, Any], int] | None:
    """``model`` and ``optimizer`` of the checkpoint, and its world size; None if there are no flat parameters."""
    files = rank_files(folder / "model")
    model: dict[str, _Cut] = {}
    held: list[dict[str, Piece]] = []
    world = 0
    for rank, path in files.items():
        modules = _modules(path)
        if modules is None:
            if not held:
                return None
            raise Damaged(f"{path} holds no flat parameters as {files[0]} does: it is of another save")
        world = world or proved(files, told_world_size(folder), folder / "model")
        held.append({})
        with as_written(path):
            for name, shape, piece, data in _flat_pieces(modules, path):
                tensor = model.setdefault(name, _Cut(data.dtype, shape))
                if (tensor.dtype, tensor.shape) != (data.dtype, shape):
                    raise Damaged(f"{path}: {name} is {data.dtype} {list(shape)}, on ranks before it is not")
                if name in held[rank]:
                    raise Damaged(f"{path} holds {name} in two flat parameters")
                if piece.numel:
                    tensor.pieces.append((piece.start, data))
                    held[rank][name] = piece
    if not world:
        return None
    state: dict[str, Any] = {"model": {name: tensor.stored() for name, tensor in model.items()}}
    optimizer = rank_files(folder / "optim")
    if optimizer:
        proved(optimizer, world, folder / "optim")
        shapes = {name: tensor.shape for name, tensor in model.items()}
        state["optimizer"] = _optimizer(optimizer, shapes, held, folder)
    return state, world


def _modules(path: Place) -> list[Any] | None:
    content = load_path(path)
    modules = content.get("modules") if isinstance(content, dict) else None
    return modules if isinstance(modules, list) else None


def _flat_pieces(modules: list[Any], path: Place) -> Iterator[tuple[str, tuple[int, ...], Piece, Stored]]:
    """Name, global shape, piece and the piece's elements of every parameter, those that the rank has nothing of too."""
    for module in modules:
        for handle in module["handles"] if isinstance(module, dict) else ():
            prefix = module.get("name") or ""
            data, names, shapes = (handle.get(f"flat_param.{key}") for key in ("data", "_fqns", "_shapes"))
            lists = isinstance(names, (list, tuple)) and isinstance(shapes, (list, tuple)) and len(names) == len(shapes)
            if not isinstance(data, Stored) or len(data.shape) != 1 or not lists:
                raise Damaged(f"{path}: a handle of module {prefix!r} has no flat parameter with names and shapes")
            table = _table(handle, len(names), path, prefix)
            end = data.shape[0] - (handle.get("flat_param._shard_numel_padded") or 0)
            for name, shape, (offset, piece) in zip(names, shapes, table, strict=True):
                called, shape = fqns.plain_fqn(f"{prefix}.{name}" if prefix else name), tuple(shape)
                if (
                    any(type(n) is not int or n < 0 for n in shape)
                    or piece.start + piece.numel > prod(shape)
                    or offset + piece.numel > end
                ):
                    raise Damaged(
                        f"{path}: {called} of shape {list(shape)} is said to have {piece} at {offset} of {end} elements"
                    )
                yield called, shape, piece, cut(data, offset, offset + piece.numel)


def _table(handle: dict[str, Any], count: int, path: Place, prefix: str) -> list[tuple[int, Piece]]:
    """For each parameter of a flat one where its piece begins in the rank's data, and which piece it is."""
    try:
        if "flat_param._shard_param_infos" in handle:
            pieces = [_info(info) for info in handle["flat_param._shard_param_infos"]]
        else:
            pieces = _old_table(handle, count)
    except (KeyError, TypeError, ValueError, AttributeError):
        pieces = []
    sound = all(min(offset, *piece) >= 0 for offset, piece in pieces)
    if len(pieces) != count or not sound:
        raise Damaged(
            f"{path}: the shard table of module {prefix!r} does not say which part of its {count} parameters this "
            "rank holds (neither _shard_param_infos of torch 2.1 and later nor _shard_param_offsets before)"
        )
    return pieces


def _info(info: Any) -> tuple[int, Piece]:
    # A named tuple of torch: in_shard, offset_in_shard, numel_in_shard, intra_param_start_idx, intra_param_end_idx.
    inside, offset, numel, start, last = info.args if isinstance(info, Record) else info
    if not inside:
        return 0, Piece(0, 0)
    if numel != last - start + 1:
        raise ValueError("its length is not that of its elements")
    return offset, Piece(start, numel)


def _old_table(handle: dict[str, Any], count: int) -> list[tuple[int, Piece]]:
    # Up to torch 2.0 pieces lie without gaps, from parameter number `_shard_indices[0]` on; ends are inclusive.
    first, spans = handle["flat_param._shard_indices"][0], handle["flat_param._shard_param_offsets"]
    if first > count:
        raise ValueError(f"it begins with parameter {first}")
    pieces, at = [(0, Piece(0, 0))] * first, 0
    for start, last in spans:
        pieces.append((at, Piece(start, last - start + 1)))
        at += last - start + 1
    return pieces + [(0, Piece(0, 0))] * (count - len(pieces))


def _optimizer(
    files: dict[int, Place], shapes: dict[str, tuple[int, ...]], held: list[dict[str, Piece]], folder: Place
) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors, from the ranks' own state dicts."""
    groups: list[Any] | None = None
    names: dict[int, str] = {}
    state: dict[int, dict[str, Any]] = {}
    for rank, path in files.items():
        saved = load_path(path)
        if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict) or "param_groups" not in saved:
            raise Damaged(f"{path} holds no state dict of an optimizer")
        if groups is None:
            groups = saved["param_groups"]
            with as_written(path):
                names = _names(saved, path)
        elif not alike(groups, saved["param_groups"]):
            raise Damaged(f"{path}: its param_groups are not those of {files[0]}: the files are of different saves")
        if not saved["state"].keys() <= names.keys():
            raise Damaged(f"{path} has state of parameters that are in no group")
        with as_written(path):
            for number, values in saved["state"].items():
                into, name = state.setdefault(number, {}), names[number]
                for key, value in values.items():
                    at = f"{key} of {name}"
                    into[key] = _added(into.get(key), value, shapes.get(name), held[rank].get(name), path, at)
    for values in state.values():
        values.update((key, value.stored()) for key, value in values.items() if isinstance(value, _Cut))
    with as_written(folder):
        return fqns.optimizer_state({"state": dict(sorted(state.items())), "param_groups": groups or []}, folder)


def _names(saved: dict[str, Any], path: Place) -> dict[int, str]:
    """Names of torch's integer ids: without them no flat piece can be assigned to its parameter."""
    names: dict[int, str] = {}
    for group in saved["param_groups"]:
        fqns_of_group = group.get("param_names")
        if not isinstance(fqns_of_group, (list, tuple)) or len(fqns_of_group) != len(group.get("params", ())):
            raise Unsupported(f"{path}: a parameter group has no param_names, so its pieces cannot be joined")
        names.update(
            (number, fqns.plain_fqn(name)) for number, name in zip(group["params"], fqns_of_group, strict=True)
        )
    return names


def _added(known: Any, value: Any, shape: tuple[int, ...] | None, piece: Piece | None, path: Place, at: str) -> Any:
    """What is known of a value of one parameter's state by the ranks before, with what this rank adds."""
    if isinstance(value, Stored) and value.shape and shape is not None:
        numel = prod(value.shape)
        if numel != (piece.numel if piece else 0) or value.shape not in ((numel,), shape):
            raise Damaged(
                f"{path}: {at} has shape {list(value.shape)}, but of that parameter of shape {list(shape)} the rank "
                f"holds {piece.numel if piece else 0} elements"
            )
        if known is None:
            known = _Cut(value.dtype, shape)
        if not isinstance(known, _Cut) or known.dtype != value.dtype:
            raise Damaged(f"{path}: {at} is {value.dtype}, on ranks before it is not")
        if piece is not None:
            known.pieces.append((piece.start, flat(value)))
        return known
    # The same on every rank: a step, a running mean of the gradient's norm, state of what FSDP does not manage.
    if known is None:
        return value
    if not alike(known, value):
        log.warning("%s: %s has another value than on ranks before, whose is taken", path, at)
    return known
