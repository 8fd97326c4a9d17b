"""Pickles that are written: Python and torch read back what was meant, and only that can be meant."""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.export import pickles, torch_file
from holdfast.ondisk import dtypes
from tests.ondisk.test_values import same

_PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats(allow_nan=False) | st.text() | st.binary()
)
_LEAVES = _PLAIN | st.complex_numbers(allow_nan=False) | st.just(torch.bfloat16) | st.just(torch.Size([2, 3]))
_KEYS = st.text() | st.integers(0, 300) | st.tuples(st.none(), st.text())
_SMALL = st.sets(st.integers()) | st.binary().map(bytearray) | st.dictionaries(_KEYS, st.integers(0, 9)).map(Counter)
_TREES = st.recursive(
    _LEAVES | _SMALL,
    lambda x: (
        st.builds(lambda kind, items: kind(items), st.sampled_from([list, tuple]), st.lists(x))
        | st.builds(lambda kind, pairs: kind(pairs), st.sampled_from([dict, OrderedDict]), st.dictionaries(_KEYS, x))
    ),
    max_leaves=20,
)


@given(_TREES)
def test_python_and_torch_read_what_was_written(tree: Any) -> None:
    assert same(pickle.loads(pickles.dumps(tree)), tree)
    assert same(torch.load(io.BytesIO(torch_file.archive(tree)), weights_only=True), tree)


def test_many_texts_are_told_once_each() -> None:
    texts = [f"text {i}" for i in range(1000)]
    data = pickles.dumps([texts, texts])
    assert pickle.loads(data) == [texts, texts] and data.count(b"text 999") == 1


def test_nan_and_devices() -> None:
    loaded = torch.load(io.BytesIO(torch_file.archive([math.nan, torch.device("cuda", 1)])), weights_only=True)
    assert math.isnan(loaded[0]) and loaded[1] == torch.device("cuda:1")


def test_what_torch_could_not_load_is_refused() -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="an integer of 3001 bits"):
        pickles.dumps({"x": 1 << 3000})
    for odd in (frozenset({1}), deque([1]), defaultdict(list), np.arange(2)):
        with pytest.raises(holdfast.errors.Unsupported, match=rf"{type(odd).__qualname__} has no place"):
            pickles.dumps({"x": [odd]})


def _dtypes() -> list[str]:
    """Those of which torch saves and loads a tensor."""
    found = []
    for name, dtype in dtypes._BY_NAME.items():
        buffer = io.BytesIO()
        try:
            torch.save(torch.zeros(16, dtype=torch.uint8).view(dtype), buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception:
            continue
        found.append(name)
    assert {"float32", "bfloat16", "float8_e4m3fn", "complex128", "uint64", "bool"} <= set(found)
    return found


@pytest.mark.parametrize("name", _dtypes())
def test_every_dtype_that_torch_can_save(name: str) -> None:
    dtype = dtypes.torch_dtype(name)
    data = torch.arange(64, dtype=torch.uint8) % 2
    for tensor in (data.view(dtype).reshape(2, -1), data.view(dtype)[0].clone(), data.view(dtype)[:0].clone()):
        tree = pickles.tensor(name, tuple(tensor.shape), tensor.nbytes, "0")
        loaded = torch.load(io.BytesIO(torch_file.archive(tree, [tensor])), weights_only=True)
        assert loaded.dtype == dtype and loaded.shape == tensor.shape and loaded.is_contiguous()
        assert torch_file.data_of(loaded) == torch_file.data_of(tensor)
