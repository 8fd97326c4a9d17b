"""Long containers of plain values, each as one value of a manifest instead of a name for every element.

The walk over a state packs with it, `values` decodes. Never packs what holds a tensor.
"""

from __future__ import annotations

import base64
import sys
from array import array
from itertools import chain
from typing import Any

import msgspec
import torch

from holdfast.ondisk import containers, scalars, values
from holdfast.ondisk.values import JSON

LONG = 1024
"""A container whose leaves would take as many names is kept as one value."""


def is_long(node: object) -> bool:
    """Whether a container of values is kept as one value, since its leaves would take `LONG` names or more."""
    return _names(node) >= LONG


def _names(node: Any) -> int:
    """How many names the leaves of a container would take, `LONG` at most; a long container inside takes one."""
    if containers.kind_of(node) is None:
        return 1
    inside = containers.children(node)
    if len(inside) >= LONG:
        return LONG
    total = 0
    for child in inside:
        names = 1 if type(child) in values.SINGLE else _names(child)
        total += 1 if names >= LONG else names
        if total >= LONG:
            return LONG
    return max(total, 1)


def packed(node: Any) -> JSON:
    """A container of values as one value: a list of floats as their bytes, anything else as one text. Raises Refused.

    It is text so that reading a manifest makes no objects of values that may never be asked for.
    """
    if type(node) is list and _are_floats(node):
        return {"$": "floats", "v": base64.b64encode(values.little(array("d", node)).tobytes()).decode()}
    tree: JSON = node
    if type(node) is dict and not values.are_texts(node):
        items = list(node.values())
        inside = items if _is_native(items) else values.encode_items(items, _refuse_tensor, 0, node)
        tree = {"$": "map", "v": [values.encode_keys(node), inside]}
    elif not _is_native(node):
        tree = values.encode_tree(node, _refuse_tensor)
    return {"$": "tree", "v": msgspec.json.encode(tree).decode()}


def _is_native(node: Any) -> bool:
    """Whether JSON has all of a nest as it is: lists, dicts by texts, and what stands for itself."""
    level: list[Any] = [node]
    for _ in range(values.MAX_DEPTH):
        lists = [item for item in level if type(item) is list]
        dicts = [item for item in level if type(item) is dict]
        single = [item for item in level if type(item) is not list and type(item) is not dict]
        if not values.is_json(single) or not set(map(type, chain.from_iterable(dicts))) <= {str}:
            return False
        keys: set[str] = set().union(*dicts)
        if "$" in keys or not values.are_texts(keys):
            return False
        if not lists and not dicts:
            return True
        level = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
    return False


def unpacked(value: JSON) -> JSON:
    """A value of a manifest as plain as JSON can say it: for people, and for programs that know no tags of ours."""
    tag = value.get("$") if isinstance(value, dict) else None
    if tag == "floats":
        return [scalars.encode(number) for number in values.decode_floats(value["v"])]
    return msgspec.json.decode(value["v"]) if tag == "tree" else value


def _are_floats(items: list[Any]) -> bool:
    kinds = set(map(type, items))
    if kinds == {float}:
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and kinds <= {float, numpy.float64, numpy.float32, numpy.float16}


def _refuse_tensor(tensor: torch.Tensor) -> str:
    raise values.Refused("", "a tensor among values that are kept as one")
