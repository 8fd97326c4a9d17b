"""State dicts as trees: a copy of one, what differs between two, and the whole of one that lies on several ranks.

The judge compares with these, never with anything of holdfast. Tensors are equal if their bytes are.
"""

from __future__ import annotations

import copy
import io
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

SEQUENCES = (list, tuple, deque)


@dataclass(frozen=True)
class Difference:
    """Where two trees differ. ``slight``: the same value as another Python type, which may not matter."""

    path: str
    text: str
    slight: bool = False

    def __str__(self) -> str:
        return f"{self.path or 'it'}: {self.text}"


@dataclass(frozen=True)
class Differs:
    """Stands in a whole state where ranks have different values and nothing says how they belong together."""

    values: tuple[Any, ...]


def copied(tree: Any) -> Any:
    """A deep copy: by `copy.deepcopy`, or if a tensor of it cannot be copied so, by ``torch.save`` and ``load``."""
    try:
        return copy.deepcopy(tree)
    except Exception:
        pass
    try:
        file = io.BytesIO()
        torch.save(tree, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    except Exception:
        return _copied_by_hand(tree)


def _copied_by_hand(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = _copied_by_hand(value)
        return made
    if type(tree) in (list, tuple):
        return type(tree)(_copied_by_hand(value) for value in tree)
    try:
        return copy.deepcopy(tree)
    except Exception:
        return tree


def own_state(node: Any) -> Any:
    """The state of everything in ``node`` as its own ``state_dict()`` gives it, copied."""
    if isinstance(node, torch.Tensor):
        return copied(node.detach())
    if hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
        return copied(node.state_dict())
    if isinstance(node, dict):
        return {key: own_state(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [own_state(value) for value in node]
    return copied(node)


def load_own(node: Any, saved: Any) -> Any:
    """Put back what `own_state` gave, by each object's own ``load_state_dict``. Returns what now stands there."""
    if isinstance(node, torch.Tensor):
        with torch.no_grad():
            node.copy_(saved)
    elif hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
        node.load_state_dict(copied(saved))
    elif isinstance(node, dict):
        for key in node:
            node[key] = load_own(node[key], saved[key])
    elif isinstance(node, list):
        node[:] = [load_own(value, other) for value, other in zip(node, saved, strict=True)]
    elif isinstance(node, tuple):
        return tuple(load_own(value, other) for value, other in zip(node, saved, strict=True))
    else:
        return copied(saved)
    return node


def differences(a: Any, b: Any, path: str = "") -> Iterator[Difference]:
    """Every leaf in which two trees differ."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        yield from _tensors(a, b, path)
    elif isinstance(a, dict) and isinstance(b, dict):
        yield from _dicts(a, b, path)
    elif isinstance(a, SEQUENCES) and isinstance(b, SEQUENCES):
        if type(a) is not type(b):
            yield Difference(path, f"a {type(a).__name__} is now a {type(b).__name__}", slight=True)
        if getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
            yield Difference(path, f"as long as {getattr(a, 'maxlen', None)} is now {getattr(b, 'maxlen', None)}")
        if len(a) != len(b):
            yield Difference(path, f"{len(a)} items are now {len(b)}")
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from differences(one, other, f"{path}/{index}")
    else:
        yield from _values(a, b, path)


def _dicts(a: dict[Any, Any], b: dict[Any, Any], path: str) -> Iterator[Difference]:
    gone = [key for key in a if key not in b]
    added = [key for key in b if key not in a]
    if gone:
        yield Difference(path, f"{gone[:4]} lost", slight=all(_is_nothing(a[key]) for key in gone))
    if added:
        yield Difference(path, f"{added[:4]} added", slight=all(_is_nothing(b[key]) for key in added))
    for key in a:
        if key in b:
            yield from differences(a[key], b[key], f"{path}/{key}")


def _is_nothing(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _tensors(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        yield Difference(path, f"{_shown(a)} is now {_shown(b)}")
        return
    lazy = [is_lazy(t) for t in (a, b)]
    if any(lazy):
        if not all(lazy):
            yield Difference(path, "is made on one side alone")
        return
    kinds = [
        torch.Tensor if isinstance(t, torch.nn.Parameter) and type(t) is torch.nn.Parameter else type(t) for t in (a, b)
    ]
    if kinds[0] is not kinds[1]:
        yield Difference(path, f"a {type(a).__name__} is now a {type(b).__name__}")
    elif isinstance(a, DTensor):
        if a.placements != b.placements or a.shape != b.shape:
            yield Difference(path, f"{a.placements} of {list(a.shape)} is now {b.placements} of {list(b.shape)}")
        yield from _tensors(a._local_tensor, b._local_tensor, path)
    elif a.dtype != b.dtype or a.shape != b.shape:
        yield Difference(path, f"{a.dtype} of {list(a.shape)} is now {b.dtype} of {list(b.shape)}")
    elif not _equal(a, b):
        yield Difference(path, f"other numbers ({_shown(a)} is now {_shown(b)})")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach(), b.detach()
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    if hasattr(a, "__tensor_flatten__") and type(a) is not torch.Tensor:
        names, context = a.__tensor_flatten__()
        others, other_context = b.__tensor_flatten__()
        same = names == others and str(context) == str(other_context)
        return same and all(not list(differences(getattr(a, n), getattr(b, n))) for n in names)
    if a.is_quantized:
        return (
            a.qscheme() == b.qscheme()
            and torch.equal(a.int_repr(), b.int_repr())
            and torch.equal(a.dequantize(), b.dequantize())
        )
    if a.is_sparse:
        a, b = a.coalesce(), b.coalesce()
        return _equal(a.indices(), b.indices()) and _equal(a.values(), b.values())
    if a.layout is not torch.strided:
        return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    try:
        return torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
    except RuntimeError:
        return torch.equal(a, b)


def _values(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if a is b or (callable(a) and callable(b)):
        return
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            yield Difference(path, "another array")
        return
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        yield from _tensors(a.get_state(), b.get_state(), path)
        return
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return
    try:
        same = bool(a == b)
    except Exception:
        same = False
    if same:
        if type(a) is not type(b):
            yield Difference(path, f"{_shown(a)} is now the {type(b).__name__} {_shown(b)}", slight=True)
    elif type(a) is type(b) and getattr(a, "__dict__", None):
        yield from _dicts(vars(a), vars(b), path)
    else:
        yield Difference(path, f"{_shown(a)} is now {_shown(b)}")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if (
            not is_lazy(value)
            and value.numel() == 1
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and not value.is_quantized
        ):
            return f"tensor {value.item()!r}"
        if is_lazy(value):
            return "a tensor that is not made yet"
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Differs):
        return "different on each rank"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}…"


def whole(tree: Any, shapes: set[tuple[int, ...]]) -> Any:
    """What lies on the ranks as one process would have it. Collective.

    Sharded tensors are gathered by torch. Plain tensors that differ are the rows of one of ``shapes``, or `Differs`.
    """
    gathered = _map_tensors(tree, lambda t: _gathered(t) if isinstance(t, DTensor) else t.detach().clone())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gathered)
    return _joined(everyone, shapes)


def _gathered(tensor: DTensor) -> torch.Tensor:
    return tensor.detach().full_tensor().clone()


def _map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return _filled(tree, {key: _map_tensors(value, change) for key, value in tree.items()})
    if type(tree) in SEQUENCES:
        return _sequence(tree, [_map_tensors(value, change) for value in tree])
    return tree


def _sequence(like: Any, items: list[Any]) -> Any:
    return deque(items, like.maxlen) if isinstance(like, deque) else type(like)(items)


def _filled(like: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """``values`` as a dict of the same kind, with the metadata that a module's state dict has."""
    made = copy.copy(like)
    for key, value in values.items():
        made[key] = value  # the update of a Counter adds
    return made


def _joined(trees: list[Any], shapes: set[tuple[int, ...]]) -> Any:
    first = trees[0]
    if isinstance(first, dict) and all(isinstance(t, dict) and t.keys() == first.keys() for t in trees):
        return _filled(first, {key: _joined([tree[key] for tree in trees], shapes) for key in first})
    if type(first) in SEQUENCES and all(type(t) is type(first) and len(t) == len(first) for t in trees):
        return _sequence(first, [_joined(list(items), shapes) for items in zip(*trees, strict=True)])
    if all(not list(differences(first, tree)) for tree in trees[1:]):
        return first
    if all(isinstance(t, torch.Tensor) and t.dim() for t in trees):
        rows = (sum(t.shape[0] for t in trees), *first.shape[1:])
        if tuple(rows) in shapes and len({t.shape[1:] for t in trees}) == 1:
            return torch.cat(trees)
    return Differs(tuple(trees))


def differing(tree: Any, path: str = "") -> Iterator[str]:
    """Paths of what differs between ranks."""
    if isinstance(tree, Differs):
        yield path
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from differing(value, f"{path}/{key}")
    elif isinstance(tree, SEQUENCES):
        for index, value in enumerate(tree):
            yield from differing(value, f"{path}/{index}")
