"""Leaves that are no tensors, and containers of them, as JSON and back; nothing executable can be written or read.

The state encodes, and the checkpoint decodes. Never guesses: an unknown type is refused.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Any

import msgspec
import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.ondisk import containers, scalars
from holdfast.ondisk.scalars import JSON as JSON
from holdfast.ondisk.scalars import Refused as Refused

MAX_DEPTH = 200
"""Containers within containers."""

_INT64 = 1 << 63
_NATIVE = frozenset({type(None), bool, int, float, str})
SINGLE = _NATIVE | {bytes, complex}
"""Types that cannot hold anything else."""

_FIRST_TAGS = frozenset({"int", "float", "bytes", "complex", "dtype", "device", "size"})
"""What a reader of version 1 knows in a manifest; in a value of one rank it also knows tuple, dict and tensor."""

FAULTS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError)
"""What decoding raises for what `encode` cannot have made."""

TensorAt = Callable[[torch.Tensor], str]
TensorOf = Callable[[str], torch.Tensor]


def encode(value: object) -> JSON:
    """One leaf as JSON: plain where JSON has it, else ``{"$": tag, "v": …}``. Raises Refused."""
    if type(value) in (set, frozenset):
        return scalars.encode_set(value)  # type: ignore[arg-type]
    if scalars.is_array(value):
        return scalars.encode_array(value)
    if isinstance(value, torch.Tensor):
        return scalars.encode_tensor(value)
    return scalars.encode(value)


def decode(value: JSON) -> Any:
    """The inverse of `encode` and of `packing.packed`.

    Raises ValueError for what they cannot have made, or made for a newer torch, Unsupported for an array without NumPy.
    """
    if not isinstance(value, dict):
        return value
    try:
        return _untagged(value.get("$"), value.get("v"), _no_tensor)
    except Unsupported:
        raise
    except FAULTS as error:
        raise ValueError(f"{_shown(value)} is no value: {error}") from None


def decoded(value: JSON, path: str, where: object) -> Any:
    """`decode` of the value at ``path`` of the file ``where``. Raises Damaged or Unsupported, naming both."""
    try:
        return decode(value)
    except Unsupported as error:
        raise Unsupported(f"{where}: {path[:200]}: {error}") from None
    except ValueError as error:
        raise Damaged(f"{where}: {path[:200]}: {error}") from None


def _shown(value: dict[str, JSON]) -> str:
    inner = value.get("v")
    return str({**value, "v": inner[:200]} if isinstance(inner, (str, list)) else value)[:200]


def version_of(value: JSON) -> int:
    """The version of the format that a value of a manifest needs."""
    return 2 if isinstance(value, dict) and str(value.get("$")) not in _FIRST_TAGS else 1


def version_of_tree(tree: JSON) -> int:
    """The version of the format that a value of one rank needs."""
    tag = tree.get("$") if isinstance(tree, dict) else None
    if tag == "tensor":
        return 1
    if tag == "dict":
        return max((max(version_of(key), version_of_tree(value)) for key, value in tree["v"]), default=1)
    if tag is not None and tag != "tuple":
        return version_of(tree)
    inside = tree["v"] if tag == "tuple" else list(tree.values()) if isinstance(tree, dict) else tree
    if not isinstance(inside, list) or not {dict, list} & set(map(type, inside)):
        return 1
    return max(map(version_of_tree, inside))


# Containers


def encode_tree(value: object, tensor_at: TensorAt | None, depth: int = 0) -> JSON:
    """A nested value as one JSON text: containers inside, tensors as references.

    ``tensor_at(tensor)`` stores a tensor and returns the reference that stands for it; None keeps small ones inside.
    Raises Refused.
    """
    if isinstance(value, torch.Tensor):
        return scalars.encode_tensor(value) if tensor_at is None else {"$": "tensor", "v": tensor_at(value)}
    kind = containers.kind_of(value)
    if kind is None:
        return encode(value)
    if depth >= MAX_DEPTH:
        raise Refused("", f"it is nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, dict):
        return _encode_mapping(kind, value, tensor_at, depth)
    items = encode_items(value, tensor_at, depth)
    if kind == "deque":
        return {"$": kind, "v": [value.maxlen, items]}  # type: ignore[attr-defined]
    return items if kind == "list" else {"$": kind, "v": items}


# Loops and not comprehensions: where containers are nested deep, each costs a frame of Python's stack.


def encode_items(
    items: Any, tensor_at: TensorAt | None, depth: int, names: Iterable[object] | None = None
) -> list[JSON]:
    if is_json(items):
        return list(items)
    encoded = []
    for at, item in zip(count() if names is None else names, items, strict=False):
        try:
            encoded.append(encode_tree(item, tensor_at, depth + 1))
        except Refused as error:
            raise Refused(f"/{at}{error.path}", error.reason) from None
    return encoded


def _encode_mapping(kind: str, value: dict[Any, Any], tensor_at: TensorAt | None, depth: int) -> JSON:
    inside = encode_items(value.values(), tensor_at, depth, value)
    if kind == "dict" and "$" not in value and are_texts(value):
        return dict(zip(value, inside, strict=True))
    pairs = list(map(list, zip(encode_keys(value), inside, strict=True)))
    if kind == "defaultdict":
        return {"$": kind, "v": [containers.factory_of(value), pairs]}
    return {"$": kind, "v": pairs}


def encode_keys(keys: Collection[Any]) -> list[JSON]:
    """The keys of a dict, in their order. Raises Refused."""
    if is_json(keys):
        return list(keys)
    plain = [scalars.plain_key(key) for key in keys]
    for key in plain:
        containers.check_key(key)
    return [scalars.encode_key(key) for key in plain]


def are_texts(keys: Collection[Any]) -> bool:
    """Whether all of these are plain texts that JSON can hold."""
    return set(map(type, keys)) <= {str} and _are_unicode(keys)


def is_json(items: Collection[Any]) -> bool:
    """Whether each of these stands for itself in JSON: no containers, nothing that needs a tag."""
    kinds = set(map(type, items))
    if not kinds <= _NATIVE:
        return False
    if int in kinds:
        numbers = items if kinds == {int} else [item for item in items if type(item) is int]
        if min(numbers) < -_INT64 or max(numbers) >= _INT64:
            return False
    if float in kinds:
        numbers = items if kinds == {float} else [item for item in items if type(item) is float]
        if not all(map(math.isfinite, numbers)):
            return False
    return str not in kinds or _are_unicode(items if kinds == {str} else [i for i in items if type(i) is str])


def _are_unicode(texts: Collection[str]) -> bool:
    joined = "".join(texts)
    if joined.isascii():
        return True
    try:
        joined.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_tree(value: JSON, tensor_of: TensorOf) -> Any:
    """The inverse of `encode_tree`; ``tensor_of(reference)`` fetches a tensor."""
    if isinstance(value, list):
        return _items(value, tensor_of)
    if not isinstance(value, dict):
        return value
    tag = value.get("$")
    if tag is None:
        return dict(zip(value, _items(list(value.values()), tensor_of), strict=True))
    return _untagged(tag, value.get("v"), tensor_of)


def _untagged(tag: object, inner: Any, tensor_of: TensorOf) -> Any:
    if tag == "tensor":
        return tensor_of(inner)
    if tag == "tuple":
        return tuple(_items(inner, tensor_of))
    if tag in ("dict", "OrderedDict", "Counter"):
        return containers.built_mapping(str(tag), _pairs(inner, tensor_of))
    if tag == "map":
        keys, inner = inner
        return dict(zip(_keys(keys), _items(inner, tensor_of), strict=True))
    if tag == "defaultdict":
        factory, pairs = inner
        return containers.built_mapping(tag, _pairs(pairs, tensor_of), factory)
    if tag == "deque":
        maxlen, inner = inner
        items = _items(inner, tensor_of)
        if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
            raise ValueError(f"a deque of {len(items)} of at most {maxlen}")
        return containers.built_sequence(tag, items, maxlen)
    if tag in ("set", "frozenset"):
        return scalars.decode_set(str(tag), inner)
    if tag == "array":
        return scalars.decode_array(inner)
    if tag == "inline":
        return scalars.decode_tensor(inner)
    if tag == "floats":
        return decode_floats(inner)
    if tag == "tree":
        return _decode_text(inner, tensor_of)
    return scalars.decode(tag, inner)


def _items(inner: Any, tensor_of: TensorOf) -> list[Any]:
    if not isinstance(inner, list):
        raise ValueError("a container is a list of what it holds")
    if not {list, dict} & set(map(type, inner)):
        return list(inner)
    items = []
    for item in inner:
        items.append(decode_tree(item, tensor_of))
    return items


def _pairs(inner: Any, tensor_of: TensorOf) -> Iterable[tuple[Any, Any]]:
    keys = _keys([key for key, _ in inner])
    return zip(keys, _items([value for _, value in inner], tensor_of), strict=True)


def _keys(keys: Any) -> list[Any]:
    if not isinstance(keys, list):
        raise ValueError("keys are a list")
    return [scalars.decode_key(key) for key in keys] if {list, dict} & set(map(type, keys)) else keys


def _no_tensor(reference: object) -> Any:
    raise ValueError("a reference to a tensor, where there is none")


def little(numbers: array[float]) -> array[float]:
    """Numbers with their bytes in the order of the file, or back."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def decode_floats(text: Any) -> list[float]:
    """What the text of a ``floats`` holds."""
    numbers = array("d")
    numbers.frombytes(base64.b64decode(text, validate=True))
    return little(numbers).tolist()


def _decode_text(text: Any, tensor_of: TensorOf) -> Any:
    if not isinstance(text, str):
        raise ValueError("a tree is a text")
    tree = msgspec.json.decode(text)
    # A tree without tags is plain JSON.
    return decode_tree(tree, tensor_of) if '"$"' in text else tree
