"""OLMo's safetensors files: state dicts under encoded key paths, and OLMo-core 0.1's flat pieces with an index."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import msgspec

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import fqns
from holdfast.formats.huggingface.safetensors_files import load_path
from holdfast.formats.machine import pickles
from holdfast.formats.machine.torch_files import load_pickle
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.members import member
from holdfast.formats.olmo.ranks import as_written
from holdfast.formats.sources import all_of, file
from holdfast.formats.stored import Stored, cut, from_flat, joined, reshaped
from holdfast.ondisk import dtypes
from holdfast.storage.place import Place

MAX_PICKLED = 1 << 28
"""Bytes of one pickled value; hyperparameters and names take some KiB."""

INDEX = "metadata.json"


def _key_of(text: str, path: Place) -> tuple[tuple[str | int, ...], bool] | None:
    """The key path, and whether the value is pickled, that a key stands for; None if it is a plain name."""
    try:
        data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        if not data.startswith(b"\x80"):
            return None
        (keys, pickled), end = pickles.load(data, path)
    except (binascii.Error, UnicodeError, ValueError, TypeError):
        return None
    sound = end == len(data) and isinstance(keys, tuple) and keys and all(type(k) in (str, int) for k in keys)
    return (keys, pickled) if sound and isinstance(pickled, bool) else None


def is_encoded(path: Place) -> bool:
    """Whether a file is one of these: its first key, and so all of them, is encoded."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    keys = load_path(path).tensors
    return bool(keys) and _key_of(next(iter(keys)), path) is not None


def read_encoded(path: Place) -> dict[Any, Any]:
    """The nested dict of a file. Raises Damaged."""
    tree: dict[Any, Any] = {}
    for text, tensor in load_path(path).tensors.items():
        key = _key_of(text, path)
        if key is None:
            raise Damaged(f"{path}: key {text[:60]!r} is none of OLMo's, while others are")
        at, steps = tree, key[0]
        for step in steps[:-1]:
            at = at.setdefault(step, {})
            if not isinstance(at, dict):
                raise Damaged(f"{path}: {'.'.join(map(str, steps))} lies below a value")
        if steps[-1] in at:
            raise Damaged(f"{path} holds {'.'.join(map(str, steps))} twice")
        at[steps[-1]] = unpickled(tensor, path) if key[1] else tensor
    return tree


def unpickled(tensor: Stored, path: Place) -> Any:
    """The value whose pickle a tensor of bytes is."""
    if tensor.dtype != "uint8" or len(tensor.shape) != 1 or tensor.nbytes > MAX_PICKLED:
        raise Damaged(f"{path}: a {tensor.dtype} of shape {list(tensor.shape)} is no pickled value")
    return load_pickle(b"".join(stretch.read() for _, stretch in tensor.pieces), path)


class _Spec(msgspec.Struct):
    flattened_offsets: list[tuple[int, int]] | None = None
    local_shape: list[int] | None = None
    global_offset: list[int] | None = None


class _Tensor(msgspec.Struct):
    shape: list[int]
    dtype: str
    shard_spec_per_file: dict[str, _Spec] | None = None
    flattened_offsets_per_file: dict[str, list[Any]] | None = None  # how versions before 0.1 called it

    def specs(self) -> dict[str, _Spec]:
        if self.flattened_offsets_per_file is not None:
            return {
                name: _Spec(
                    [tuple(offsets)] if offsets and isinstance(offsets[0], int) else [tuple(pair) for pair in offsets]
                )
                for name, offsets in self.flattened_offsets_per_file.items()
            }
        return self.shard_spec_per_file or {}


class _Index(msgspec.Struct):
    tensors: dict[str, _Tensor]


def _index_of(folder: Place) -> dict[str, _Tensor] | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    data = all_of(file(path)).read()
    if b'"shard_spec_per_file"' not in data and b'"flattened_offsets_per_file"' not in data:
        return None
    with damaged_as(f"{path} is no valid index of tensors"):
        return msgspec.json.decode(data, type=_Index).tensors


def read_core(folder: Place) -> dict[str, Stored] | None:
    """The tensors of a folder of flat pieces, joined; None if there is no index of such."""
    index = _index_of(folder)
    if index is None:
        return None
    opened: dict[str, dict[str, Stored]] = {}

    def held(name: str, key: str) -> Stored:
        if name not in opened:
            opened[name] = load_path(member(folder, name, INDEX)).tensors
        if key not in opened[name]:
            raise Damaged(f"{folder / name} does not hold {key} as {INDEX} says")
        return opened[name][key]

    with as_written(folder / INDEX):
        return {key: _joined(key, tensor, held, folder / INDEX) for key, tensor in index.items()}


def _joined(key: str, described: _Tensor, held: Callable[[str, str], Stored], path: Place) -> Stored:
    dtype, shape = dtypes.name_of_code(described.dtype), tuple(described.shape)
    if dtype is None:
        raise Unsupported(f"{path}: {key} is of type {described.dtype}, which is not known")
    if any(n < 0 for n in shape):
        raise Damaged(f"{path}: {key} is said to have shape {list(shape)}")
    runs: list[tuple[int, Stored]] = []
    boxes: list[tuple[tuple[int, ...], Stored]] = []
    for name, spec in described.specs().items():
        spans, lengths, offsets = spec.flattened_offsets, spec.local_shape, spec.global_offset
        if spans is not None:
            at = 0
            for start, stop in spans:
                if not 0 <= start <= stop <= prod(shape):
                    raise Damaged(f"{path}: {key} of shape {list(shape)} is said to have {start}:{stop} in {name}")
                if start < stop:
                    runs.append((start, cut(held(name, key), at, at + stop - start)))
                at += stop - start
            if at and held(name, key).shape != (at,):
                raise Damaged(f"{path}: {key} has {at} elements in {name}, where {held(name, key).shape} lie")
        elif lengths is not None and offsets is not None and len(lengths) == len(offsets) == len(shape):
            if 0 not in lengths:
                boxes.append((tuple(offsets), reshaped(held(name, key), lengths)))
        else:
            raise Damaged(f"{path} does not say which part of {key} is in {name}")
    for part in (*(r for _, r in runs), *(b for _, b in boxes)):
        if part.dtype != dtype:
            raise Damaged(f"{path}: {key} is {dtype}, its file has {part.dtype}")
    return from_flat(dtype, shape, runs) if runs else joined(dtype, shape, boxes)


def core_optimizer(flat: Mapping[str, Stored], path: Place) -> dict[str, Any]:
    """An optimizer's state dict out of the tensors of an ``optim`` folder of OLMo-core 0.1.

    ``state.<fqn>.__<key>`` are its tensors, ``param_group<i>`` its groups, pickled; their number and the keys that
    occur (``num_param_groups``, ``state_keys``) follow from these, and are compared.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups: dict[int, Any] = {}
    rest: dict[str, Any] = {}
    for name, tensor in flat.items():
        fqn, separator, key = name.removeprefix("state.").rpartition(".__")
        number = name.removeprefix("param_group")
        if name.startswith("state.") and separator:
            state.setdefault(fqn, {})[key] = tensor
        elif name.startswith("param_group") and number.isdecimal():
            groups[int(number)] = _named(unpickled(tensor, path), path)
        elif name not in ("num_param_groups", "state_keys"):
            rest[name] = tensor
    number_of_groups = flat.get("num_param_groups")
    count = (
        int(number_of_groups.read())
        if number_of_groups is not None and not number_of_groups.shape and number_of_groups.fault() is None
        else len(groups)
    )
    if groups.keys() != {*range(count)}:
        raise Damaged(f"{path} is said to have {count} parameter groups, but has {sorted(groups)}")
    keys = unpickled(flat["state_keys"], path) if "state_keys" in flat else None
    if keys is not None and {k for values in state.values() for k in values} - {*keys}:
        raise Damaged(f"{path} holds state beside its keys {keys}")
    ordered = [groups[number] for number in sorted(groups)]
    with as_written(path):
        return fqns.optimizer_state({"state": state, "param_groups": ordered, **rest}, path)


def _named(group: Any, path: Place) -> dict[str, Any]:
    if not isinstance(group, dict) or len(group.get("_param_names", ())) != len(group.get("params", ())):
        raise Damaged(f"{path}: a parameter group without its parameters' names")
    return {**{k: v for k, v in group.items() if k != "_param_names"}, "param_names": group["_param_names"]}
