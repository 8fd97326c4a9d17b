"""Values: every kind comes back as it went, everything else is refused by path, nothing is executed."""

from __future__ import annotations

import collections
import decimal
import enum
import math
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ondisk import values
from holdfast.ondisk.values import Refused

floats = st.one_of(st.floats(), st.sampled_from([-0.0, 1.0, 1e22, 5e-324, math.inf, -math.inf]))
big = st.integers(-(1 << 200), 1 << 200)
plain = st.one_of(
    st.none(), st.booleans(), big, st.integers(-4, 4).map(lambda k: (1 << 63) + k), floats, st.text(), st.binary(),
    st.builds(complex, floats, floats),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.lists(st.integers(0, 1 << 40), max_size=4).map(torch.Size),
)  # fmt: skip


def through_json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def same(a: object, b: object) -> bool:
    """Equal, of one type, and with the same bits where they are floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = list(zip(a.items(), b.items(), strict=False))
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (list, tuple, collections.deque)) and isinstance(b, (list, tuple, collections.deque)):
        return getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)) and isinstance(b, (set, frozenset)):
        return bool(values.encode(a) == values.encode(b))
    return a == b


@given(plain)
def test_every_kind_comes_back(value: object) -> None:
    assert same(values.decode(through_json(values.encode(value))), value)


def test_what_json_has_is_written_plainly() -> None:
    for value in (None, True, 7, -(1 << 63), (1 << 63) - 1, 1.5, "text"):
        assert values.encode(value) is value
    assert values.encode(1 << 63) == {"$": "int", "v": "9223372036854775808"}
    assert values.encode(math.inf) == {"$": "float", "v": "inf"}
    assert values.encode(b"\x00\xff") == {"$": "bytes", "v": "AP8="}
    assert values.encode(torch.bfloat16) == {"$": "dtype", "v": "bfloat16"}
    assert values.encode(torch.Size([2, 3])) == {"$": "size", "v": [2, 3]}


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Pair(NamedTuple):
    a: int
    b: int


REFUSED = [
    lambda: 0, print, int, math, object(), {object()}, range(3), decimal.Decimal("1"), Colour.RED, Text("x"),
    Pair(1, 2), np.longdouble(1), np.datetime64(1, "s"), np.array([None]), np.ma.array([1]), np.zeros(2, [("a", "i4")]),
    np.zeros(2, np.longdouble), ..., NotImplemented, iter([]), Refused("", ""), 1 << 20_000, "lone \ud800",
    memoryview(b"x"), slice(1), collections.Counter, torch.float32.to_complex, collections.UserDict(),
    frozenset({1 << 20_000}),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(Refused) as caught:
        values.encode(value)
    assert caught.value.path == "" and caught.value.reason
    with pytest.raises(Refused) as caught:
        values.encode_tree({"a": [0, (1, {"b": value})]}, str)
    assert caught.value.path == "/a/1/1/b"


def test_a_key_is_refused_by_its_path_too() -> None:
    for key in ((1, (Colour.RED,)), Colour.RED, "\ud800", object(), Pair(1, 2), np.datetime64(1, "s")):
        with pytest.raises(Refused) as caught:
            values.encode_tree({"a": {key: 1}}, str)
        assert caught.value.path == "/a"


def test_a_loader_without_a_state_is_told_what_to_do() -> None:
    with pytest.raises(Refused, match=r"DataLoader does not tell where it is.*StatefulDataLoader"):
        values.encode(torch.utils.data.DataLoader(torch.ones(2)))


def test_code_is_called_code() -> None:
    with pytest.raises(Refused, match="nothing executable"):
        values.encode(print)


tags = st.sampled_from([
    "int", "float", "bytes", "complex", "dtype", "device", "size", "tuple", "nn", "load", "set", "frozenset", "deque",
    "OrderedDict", "Counter", "defaultdict", "dict", "bytearray", "array", "floats", "tree", "tensor",
])  # fmt: skip
odd_texts = st.sampled_from(["<f4", "|O", "<U3", "list", "AAAA"])
odd = st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text()), tags, odd_texts)
inner = st.recursive(
    odd, lambda x: st.one_of(st.lists(x, max_size=3), st.fixed_dictionaries({"$": tags, "v": x})), max_leaves=6
)


@given(st.fixed_dictionaries({"$": tags, "v": inner}))
def test_tags_that_nobody_wrote_are_refused(value: dict[str, Any]) -> None:
    try:
        found = values.decode(value)
    except ValueError:
        return
    assert same(values.decode_tree(through_json(values.encode_tree(found, str)), torch.tensor), found)


@pytest.mark.parametrize("value", [
    {"$": "pickle", "v": "gASVAAAA"}, {}, {"$": "int"}, {"$": "int", "v": "x"}, {"$": "bytes", "v": "?"},
    {"$": "bytes", "v": 7},
    {"$": "complex", "v": []}, {"$": "dtype", "v": "nn"}, {"$": "dtype", "v": "load"}, {"$": "dtype", "v": None},
    {"$": "device", "v": "nowhere"}, {"$": "size", "v": ["a"]}, {"$": ["int"], "v": 1},
], ids=str)  # fmt: skip
def test_a_damaged_tag_is_a_value_error(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        values.decode(value)


keys = st.one_of(st.text(max_size=4), st.just("$"), st.integers(-3, 3), st.booleans(), st.none(), st.binary(max_size=2))
leaves = st.one_of(plain, st.integers(0, 9).map(lambda n: torch.arange(n)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_trees_come_back(tree: object) -> None:
    stored: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> str:
        stored.append(tensor)
        return str(len(stored) - 1)

    text = through_json(values.encode_tree(tree, keep))
    assert same(values.decode_tree(text, lambda reference: stored[int(reference)]), tree)
