"""Values as foreign files hold them, turned into the plain ones that a state of ours holds."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.events import log
from holdfast.formats.machine import arrays
from holdfast.formats.machine.inert import expanded
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.stored import Opaque, Stored
from holdfast.ondisk import dtypes
from holdfast.storage.place import Place

MAX_LEAVES = 4_000_000
"""More than any state has; what claims more refers to itself."""

MAX_DEPTH = 100


@dataclass(frozen=True)
class PerRank:
    """A leaf whose value differs by rank: one for each, in the order of the ranks."""

    values: tuple[Any, ...]


def simplified(node: Any, path: Place) -> Any:
    """A leaf or container as our formats know them: what stands in a record, without the record.

    An enum is its value, a namespace its attributes, a set a list, a time its text, a duration its seconds.
    """
    if isinstance(node, Name):
        kind, _, name = node.text.rpartition(".")
        return dtypes.torch_dtype(name) if kind == "torch" and dtypes.known(name) else node.text
    if isinstance(node, (set, frozenset)):
        return sorted(node, key=str)
    if isinstance(node, bytearray):
        return bytes(node)
    if isinstance(node, Opaque):
        raise Unsupported(node.reason)
    if not isinstance(node, Record):
        return node
    if arrays.is_array(node):
        return arrays.array_of(node, path)
    if node.name.startswith("torch.") and node.name.rpartition(".")[2] in _TENSORS:
        raise Unsupported(f"a {node.name} is a part of a tensor that is not known here")
    if node.name == "_io.BytesIO" and isinstance(node.state, tuple) and node.state:
        return node.state[0]
    if node.name.startswith("datetime."):
        return _time(node)
    if node.items:
        return node.items
    if node.elements:
        return node.elements
    if node.state is not None:
        return node.state
    return node.args[0] if len(node.args) == 1 else list(node.args)


_TENSORS = frozenset({
    "DTensor", "ShardedTensor", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage", "_rebuild_sparse_csr_tensor",
})  # fmt: skip


_TIMES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


def _time(node: Record) -> Any:
    kind, args = node.name.rpartition(".")[2], node.args
    try:
        if kind == "timedelta":
            return datetime.timedelta(*args).total_seconds()
        if kind in _TIMES and args and isinstance(args[0], bytes):
            return _TIMES[kind](args[0]).isoformat()
    except (TypeError, ValueError, OverflowError):
        pass
    return list(args)


def materialized(value: Any, path: Place) -> Any:
    """A value of one rank with its tensors read."""
    too_many = f"{path}: a value of a rank is nested {MAX_DEPTH} deep or contains itself over and over"
    if expanded(value, MAX_LEAVES) is None:  # walking so far would take half a minute
        raise Damaged(too_many)

    def made(node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Damaged(too_many)
        try:
            node = simplified(node, path)
        except Unsupported as error:
            log.warning("%s: None stands for a part of a value of one rank: %s", path, error)
            return None
        if isinstance(node, Stored):
            return node.read()
        if isinstance(node, dict):
            return {key: made(inner, depth + 1) for key, inner in node.items()}
        if isinstance(node, (list, tuple)) and not isinstance(node, torch.Size):
            return type(node)(made(inner, depth + 1) for inner in node)
        return node

    return made(value, 0)
