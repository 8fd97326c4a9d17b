"""NumPy's arrays and scalars read from pickles, without NumPy, against what NumPy reads of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine import arrays
from holdfast.formats.machine.arrays import array_of, is_array
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.machine.torch_files import load_pickle
from holdfast.formats.stored import Opaque, Stored
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import hostile
from tests.marks import examples
from tests.ondisk.test_format import bytes_of

WHERE = LocalPlace("some/file.pt")
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
CODES = sorted(arrays._DTYPES)


def read(value: Any, protocol: int = 2) -> Any:
    found = load_pickle(pickle.dumps(value, protocol), WHERE)
    return array_of(found, WHERE) if is_array(found) else found


def same(found: Any, array: np.ndarray) -> bool:
    """Equal in type, shape and every bit, in whatever order and with whatever ends the array's bytes lie."""
    native = array.astype(array.dtype.newbyteorder("="))
    tensor = found.read()
    return (
        str(tensor.dtype) == f"torch.{native.dtype.name}"
        and tensor.shape == array.shape
        and bytes_of(tensor) == native.tobytes()
    )


@st.composite
def any_arrays(draw: st.DrawFn) -> np.ndarray:
    order = draw(st.sampled_from("<>"))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    array = np.frombuffer(draw(st.binary(min_size=4096, max_size=4096)), order + draw(st.sampled_from(CODES)))
    array = array[: int(np.prod(shape))].reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()) and array.ndim:
        array = array[::2]
    return array.copy(order="K") if draw(st.booleans()) else array


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(any_arrays(), st.sampled_from(PROTOCOLS))
def test_arrays(array: np.ndarray, protocol: int) -> None:
    if array.dtype.kind == "b":
        array = array.view("u1").astype(bool)  # a bool is a 0 or a 1
    found = read(array, protocol)
    assert isinstance(found, Stored) and found.fault() is None and same(found, array)


@given(npst.scalar_dtypes().flatmap(lambda dtype: npst.arrays(dtype, 1)), st.sampled_from(PROTOCOLS))
def test_scalars(array: np.ndarray, protocol: int) -> None:
    scalar = array[0]
    found = read(scalar, protocol)
    if scalar.dtype.str[1:] not in arrays._LAYOUTS:  # dates, durations, long doubles
        assert isinstance(found, Opaque) and scalar.dtype.str[1:3] in found.reason
        return
    assert type(found) is type(scalar.item())
    assert found == scalar.item() or (found != found and scalar != scalar)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_texts_and_objects_are_lists(protocol: int) -> None:
    for array in (
        np.array([["ab", "c"], ["", "dé"]]), np.array(["ab", "日本"], dtype=">U3"), np.array([b"ab", b"c"]),
        np.array([[1, "a", None], [2.5, b"x", (1,)]], dtype=object), np.array("text"), np.array([], dtype="U3"),
        np.array([[], []], dtype=object), np.array(["", ""]),
    ):  # fmt: skip
        assert read(array, protocol) == array.tolist()
    assert read(np.str_("xé"), protocol) == "xé" and read(np.bytes_(b"ab"), protocol) == b"ab"
    assert read(np.asfortranarray(np.array([[1, "a"], [2, "b"]], dtype=object)), protocol) == [[1, "a"], [2, "b"]]


def test_what_torch_has_no_type_for() -> None:
    for array in (
        np.array(["2020-01-01"], dtype="M8[D]"), np.array([3], dtype="m8[h]"), np.array([1.5], dtype=np.longdouble),
        np.array([("a", 1)], dtype=[("x", "U3"), ("y", "i4")]), np.array([b"12"], dtype="V2"),
        np.array(["a"], dtype=np.dtypes.StringDType()),
    ):  # fmt: skip
        try:
            found = read(array)
        except Unsupported as error:
            assert str(WHERE) in str(error)
        else:
            assert found == ["a"]


def test_kinds_of_arrays_and_names_of_types(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", dtype="f4", mode="w+", shape=(2, 3))
    mapped[:] = 7
    assert same(read(mapped), np.full((2, 3), 7, "f4"))
    assert read(np.float32) == Name("numpy.float32")
    dtype = read(np.dtype("f4"))
    assert isinstance(dtype, Record) and dtype.args[0] == "f4"
    odd = hostile.called(hostile.name("numpy", "dtype"), hostile.name("ml_dtypes", "bfloat16"), b"\x89\x88")
    data = hostile.called(hostile.name("numpy.core.multiarray", "scalar"), odd, b"C\x02\x80\x3f")
    assert isinstance(load_pickle(data + b".", WHERE), Opaque)
    data = hostile.called(
        hostile.name("numpy._core.numeric", "_frombuffer"),
        b"C\x04\x80\x3f\x00\x40",
        odd,
        b"K\x02\x85",
        hostile.text("C"),
    )
    assert array_of(load_pickle(data + b".", WHERE), WHERE).read().tolist() == [1.0, 2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_generators(protocol: int) -> None:
    state = read(np.random.RandomState(3).get_state(), protocol)
    assert state[0] == "MT19937" and same(array_of(state[1], WHERE), np.random.RandomState(3).get_state()[1])
    for kind in (np.random.PCG64, np.random.MT19937, np.random.SFC64, np.random.Philox, np.random.PCG64DXSM):
        found = read(np.random.Generator(kind(1)), protocol)
        assert isinstance(found, Record) and found.name.startswith("numpy.random.")


def test_one_array_named_twice_is_one_tensor(tmp_path: Path) -> None:
    array = np.arange(4.0)
    torch.save({"model": {"w": torch.ones(1)}, "a": array, "b": [array] * 3}, tmp_path / "c.pt")
    checkpoint = holdfast.open(tmp_path / "c.pt")
    assert checkpoint.manifest.aliases.keys() == {"b/0", "b/1", "b/2"}
    assert checkpoint.read("b/2").tolist() == array.tolist()


DTYPE = hostile.called(hostile.name("numpy", "dtype"), hostile.text("f4"), b"\x89\x88") + (
    b"(K\x03" + hostile.text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
EMPTY = hostile.called(
    hostile.name("numpy.core.multiarray", "_reconstruct"), hostile.name("numpy", "ndarray"), b"K\x00\x85", b"C\x01b"
)
BROKEN = {
    "no state": EMPTY,
    "half a state": EMPTY + b"(K\x01K\x02\x85tb",
    "no shape": EMPTY + b"(K\x01N" + DTYPE + b"\x89C\x04aaaatb",
    "a negative shape": EMPTY + b"(K\x01J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86" + DTYPE + b"\x89C\x04aaaatb",
    "very many empty lists": EMPTY + b"(K\x01J\xff\xff\xff\x7fK\x00\x86" + DTYPE + b"\x89]tb",
    "a shape of texts": EMPTY + b"(K\x01X\x01\x00\x00\x001\x85" + DTYPE + b"\x89C\x04aaaatb",
    "too many axes": EMPTY + b"(K\x01(" + b"K\x01" * 100 + b"t" + DTYPE + b"\x89C\x04aaaatb",
    "too few bytes": EMPTY + b"(K\x01K\x02\x85" + DTYPE + b"\x89C\x04aaaatb",
    "no bytes": EMPTY + b"(K\x01K\x01\x85" + DTYPE + b"\x89Ntb",
    "too few objects": EMPTY + b"(K\x01K\x02\x85" + DTYPE + b"\x89]tb",
    "axes in no order": EMPTY + b"(K\x01K\x01\x85" + DTYPE + b"K\x05\x85C\x04aaaatb",
    "axes twice": EMPTY + b"(K\x01K\x01K\x01\x86" + DTYPE + b"K\x00K\x00\x86C\x04aaaatb",
    "an order of a text": EMPTY + b"(K\x01K\x01\x85" + DTYPE + hostile.text("Q") + b"C\x04aaaatb",
    "a huge item": EMPTY + b"(K\x01K\x01\x85"
    + hostile.called(hostile.name("numpy", "dtype"), hostile.text("U999999999999")) + b"\x89C\x04aaaatb",
    "a text that is none": EMPTY + b"(K\x01K\x01\x85"
    + hostile.called(hostile.name("numpy", "dtype"), hostile.text("U1")) + b"\x89C\x04\xff\xff\xff\xfftb",
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arrays(name: str) -> None:
    with pytest.raises((Damaged, Unsupported), match=str(WHERE)):
        array_of(load_pickle(BROKEN[name] + b".", WHERE), WHERE)


@pytest.mark.parametrize("kind", [b"N", DTYPE, hostile.called(hostile.name("numpy", "dtype"), hostile.text(""))])
@pytest.mark.parametrize("data", [b"N", b"C\x03abc", hostile.text("a"), b"]"])
def test_broken_scalars(kind: bytes, data: bytes) -> None:
    scalar = hostile.called(hostile.name("numpy.core.multiarray", "scalar"), kind, data)
    try:
        assert isinstance(load_pickle(scalar + b".", WHERE), Opaque)
    except Damaged as error:
        assert str(WHERE) in str(error)
