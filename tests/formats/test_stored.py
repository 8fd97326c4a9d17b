"""Unread tensors, cut, joined and reshaped: read afterwards, they are what torch makes of the same tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import gather
from holdfast.formats.sources import Memory, Unpacked, all_of, file
from holdfast.formats.stored import (
    Stored,
    concatenated,
    cut,
    flat,
    float_scalar,
    from_flat,
    joined,
    of_bytes,
    plain,
    reshaped,
    strided,
)
from holdfast.ondisk import dtypes
from holdfast.storage.local.local_place import LocalPlace
from tests.marks import examples
from tests.ondisk.test_format import bytes_of
from tests.ondisk.test_format import of_bytes as tensor_of_bytes

WHERE = LocalPlace("some/file.bin")
DTYPES = sorted(dtypes._BY_NAME)

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def same(found: Stored, tensor: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, and whole by its own account."""
    assert found.fault() is None, found.fault()
    read = found.read()
    return read.dtype == tensor.dtype and read.shape == tensor.shape and bytes_of(read) == bytes_of(tensor)


def counted(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(prod(shape)).to(dtype).reshape(shape)


def held(tensor: torch.Tensor) -> Stored:
    return of_bytes(dtypes.name_of(tensor.dtype), tensor.shape, bytes_of(tensor), WHERE)


@st.composite
def tensors(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = shapes) -> torch.Tensor:
    """Of any type and any bits."""
    dtype, shape = dtypes.torch_dtype(draw(st.sampled_from(DTYPES))), draw(shapes)
    nbytes = prod(shape) * dtype.itemsize
    return tensor_of_bytes(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, shape)


@given(tensors())
def test_plain(tensor: torch.Tensor) -> None:
    assert same(held(tensor), tensor)
    again = plain(dtypes.name_of(tensor.dtype), tensor.shape, all_of(Memory(WHERE, bytes_of(tensor) + b"more")))
    assert same(again, tensor)


def test_equal_if_they_are_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    one, two = all_of(file(path)), all_of(file(path))
    assert plain("float32", (2, 3), one) == plain("float32", (2, 3), two)
    assert hash(plain("float32", (2, 3), one)) == hash(plain("float32", (2, 3), two))
    assert plain("float32", (2, 3), one) != plain("float32", (3, 2), one)
    assert plain("float32", (2, 3), one) != plain("float32", (2, 3), one.part(4, 24))
    assert strided("float32", (3, 2), (1, 3), one, 0) == strided("float32", (3, 2), (1, 3), two, 0)
    assert hash(strided("float32", (3, 2), (1, 3), one, 0)) == hash(strided("float32", (3, 2), (1, 3), two, 0))
    assert strided("float32", (3, 2), (1, 3), one, 0) != strided("float32", (3, 2), (1, 3), two, 1)
    assert strided("complex64", (3,), (1,), one, 0, conj=True) != strided("complex64", (3,), (1,), one, 0)
    assert of_bytes("uint8", (1,), b"a", WHERE) != of_bytes("uint8", (1,), b"a", WHERE)


# Views of storages


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A flat storage and a view of it: axes turned, cut with steps, doubled, windows that overlap."""
    size = draw(st.integers(1, 300))
    storage = counted((size,), draw(st.sampled_from([torch.int32, torch.uint8, torch.float64, torch.complex128])))
    shape, strides, room = [], [], size - 1
    offset = draw(st.integers(0, room))
    room -= offset
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.integers(0, max(room, 1)) | st.integers(0, 3))
        length = draw(st.integers(0, min(room // stride, 9) + 1 if stride else 6))
        shape.append(length)
        strides.append(stride)
        room -= max(length - 1, 0) * stride
    return storage, storage.as_strided(shape, strides, offset)


@contextmanager
def small_tiles(tile: int) -> Iterator[None]:
    before = gather.TILE, gather.READ, gather.SHORT
    gather.TILE, gather.READ, gather.SHORT = tile, 2 * tile, tile // 8
    try:
        yield
    finally:
        gather.TILE, gather.READ, gather.SHORT = before


@settings(max_examples=examples(400))
@given(views(), st.sampled_from([16, 64, 500, 1 << 20]))
def test_views(view: tuple[torch.Tensor, torch.Tensor], tile: int) -> None:
    storage, tensor = view
    data = all_of(Memory(WHERE, bytes_of(storage)))
    found = strided(dtypes.name_of(tensor.dtype), tensor.shape, tensor.stride(), data, int(tensor.storage_offset()))
    with small_tiles(tile):
        assert same(found, tensor)
    lies_plain = tensor.is_contiguous()
    assert all(isinstance(s.source, Unpacked) != lies_plain for _, s in found.pieces)


@given(tensors(full_shapes), st.data())
def test_views_of_any_type(tensor: torch.Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(tensor.dim())))
    turned = tensor.permute(order)
    found = strided(
        dtypes.name_of(tensor.dtype), turned.shape, turned.stride(), all_of(Memory(WHERE, bytes_of(tensor))), 0
    )
    assert same(found, turned)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [64, 1 << 20])
def test_conjugates_and_negatives(dtype: torch.dtype, tile: int) -> None:
    # No zeros: torch itself is of two minds about their sign.
    storage = torch.randn(60, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)
    for shape, strides in (((60,), (1,)), ((5, 7), (1, 5)), ((3, 4, 2), (20, 1, 4))):
        for conj, neg in ((True, False), (False, True), (True, True)):
            if conj and not dtype.is_complex:
                continue
            tensor = storage.as_strided(shape, strides)
            tensor = tensor.conj() if conj else tensor
            tensor = torch._neg_view(tensor) if neg else tensor
            data = all_of(Memory(WHERE, bytes_of(storage)))
            found = strided(dtypes.name_of(dtype), shape, strides, data, 0, conj=conj, neg=neg)
            with small_tiles(tile):
                assert same(found, tensor)


@pytest.mark.slow
def test_a_large_view_takes_bounded_memory(tmp_path: Path) -> None:
    # In a process of its own, whose memory before and after can be compared: 200 MB turned, and every 50th column.
    path = tmp_path / "storage"
    with path.open("wb") as target:
        target.truncate(200_000_000)
    code = (
        "import resource, sys, torch\n"
        "from holdfast.storage.local.local_place import LocalPlace\n"
        "from holdfast.formats.sources import all_of, file\n"
        "from holdfast.formats.stored import strided\n"
        "data = all_of(file(LocalPlace(sys.argv[1])))\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "strided('float32', (10, 10), (1, 10), data, 0).pieces[0][1].read(0, 4)\n"
        "before = peak()\n"
        "for shape, strides in (((10000, 5000), (1, 10000)), ((10000, 100), (5000, 50)),"
        " ((12500000, 4), (1, 12500000))):\n"
        "    (_, stretch), = strided('float32', shape, strides, data, 0).pieces\n"
        "    assert stretch.read(stretch.nbytes - 4, 4) == bytes(4)\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=250,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 160, ran.stdout


def test_views_that_leave_their_storage_or_claim_too_much() -> None:
    data = all_of(Memory(WHERE, bytes(400)))
    wrong: list[tuple[Any, Any, Any]] = [
        ((101,), (1,), 0), ((100,), (1,), 1), ((2,), (100,), 0), ((1,), (1,), 100), ((2, 2), (1,), 0), ((2,), (-1,), 5),
        ((-2,), (1,), 0), ((2,), (1,), -1), ((1 << 62, 1 << 62), (1 << 62, 1), 0), ((1 << 70,), (1,), 0),
        ((2,), (1,), 1 << 70), (("2",), (1,), 0), (((2,),), (1,), 0), ((2.0,), (1,), 0), ((1,) * 65, (1,) * 65, 0),
        ((2,), (1,), None), ((None,), (1,), 0),
    ]  # fmt: skip
    for shape, strides, offset in wrong:
        with pytest.raises(Damaged, match=str(WHERE)):
            strided("float32", shape, strides, data, offset)
    assert strided("float32", (0, 5), (5, 1), data, 0).pieces == ()
    assert strided("float32", (1000, 1000), (0, 0), data, 5).nbytes == 4_000_000
    with pytest.raises(Unsupported, match="spread over only 1 elements"):
        strided("float32", (1 << 20, 1 << 20), (0, 0), data, 0)
    with pytest.raises(Unsupported, match="no type 'float3'"):
        strided("float3", (1,), (1,), data, 0)
    with pytest.raises(Damaged, match=str(WHERE)):
        plain("float32", (101,), data)
    with pytest.raises(Damaged, match="too large"):
        float_scalar(1e300, WHERE)
    assert float_scalar(3.0, WHERE).read() == torch.tensor(3.0)


def test_a_storage_that_ends_before_it_should(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(400))
    found = strided("float32", (10, 10), (1, 10), all_of(file(path)), 0)
    path.write_bytes(bytes(399))
    with pytest.raises(Damaged, match="ends at byte"):
        found.read()


# The algebra


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Cut points of ``0:length``, ends included."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length]


@given(tensors(full_shapes), st.data())
def test_joined(tensor: torch.Tensor, data: st.DataObject) -> None:
    axes = [list(pairwise(data.draw(cuts(n)))) for n in tensor.shape]
    parts = []
    for spans in data.draw(st.permutations(list(product(*axes)))):
        part = tensor
        for d, (a, b) in enumerate(spans):
            part = part.narrow(d, a, b - a)
        parts.append((tuple(a for a, _ in spans), held(part)))
    parts += data.draw(st.lists(st.sampled_from(parts), max_size=2))  # replicas
    found = joined(dtypes.name_of(tensor.dtype), tensor.shape, parts)
    assert same(found, tensor)
    full = [part for part in parts if prod(part[1].shape)]
    lost = [part for part in full if part[0] != full[0][0] or part[1].shape != full[0][1].shape]
    assert "in no box" in str(joined(found.dtype, found.shape, lost).fault())


@given(tensors(full_shapes), st.data())
def test_from_flat(tensor: torch.Tensor, data: st.DataObject) -> None:
    elements = tensor.reshape(-1)
    spans = [(a, b) for a, b in pairwise(data.draw(cuts(tensor.numel())))]
    parts = [(a, held(elements[a:b])) for a, b in data.draw(st.permutations(spans))]
    found = from_flat(dtypes.name_of(tensor.dtype), tensor.shape, parts)
    assert same(found, tensor)
    if tensor.numel() > 1:
        assert "in no box" in str(from_flat(found.dtype, found.shape, [(0, held(elements[:-1]))]).fault())


@given(tensors(full_shapes.filter(bool)), st.data())
def test_concatenated(tensor: torch.Tensor, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    parts = [tensor.narrow(dim, a, b - a) for a, b in pairwise(data.draw(cuts(tensor.shape[dim])))]
    assert same(concatenated([held(part) for part in parts], dim), tensor)


Step = Callable[[torch.Tensor, Stored], tuple[torch.Tensor, Stored]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[torch.Tensor, Stored]:
    """A tensor after a few random steps, done to torch's and to the unread one alike."""
    shape = draw(full_shapes)
    tensor = counted(shape, draw(st.sampled_from([torch.int32, torch.int64])))
    found = held(tensor)
    for _ in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from(["cut", "reshaped", "flat", "doubled", "split"]))
        if step == "cut" and tensor.dim():
            a, b = sorted(draw(st.tuples(*[st.integers(0, tensor.shape[0])] * 2)))
            tensor, found = tensor[a:b], cut(found, a, b)
        elif step == "flat":
            try:
                tensor, found = tensor.reshape(-1), flat(found)
            except Unsupported:
                _assert_not_all_runs(found)
        elif step == "reshaped" and tensor.numel():
            n = draw(st.sampled_from([k for k in range(1, tensor.numel() + 1) if tensor.numel() % k == 0]))
            try:
                tensor, found = tensor.reshape(n, 1, -1), reshaped(found, (n, 1, tensor.numel() // n))
            except Unsupported:
                _assert_not_all_runs(found)
        elif step == "doubled" and tensor.dim() and tensor.numel() < 500:
            dim = draw(st.integers(0, tensor.dim() - 1))
            tensor, found = torch.cat([tensor, tensor], dim), concatenated([found, found], dim)
        elif step == "split" and tensor.dim() and tensor.numel():
            dim = draw(st.integers(0, tensor.dim() - 1))
            pieces = [
                (tuple(a if d == dim else 0 for d in range(tensor.dim())), held(tensor.narrow(dim, a, b - a)))
                for a, b in pairwise(draw(cuts(tensor.shape[dim])))
            ]
            found = joined(found.dtype, tensor.shape, pieces)
    return tensor, found


def _assert_not_all_runs(found: Stored) -> None:
    # Only a part whose elements are no neighbours in the flat tensor may be refused.
    numbers = counted(found.shape)
    for box, _ in found.pieces:
        part = numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1)
        if part.tolist() != list(range(part[0], part[0] + part.numel())):
            return
    raise AssertionError(found.pieces)


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(programs())
def test_any_steps(made: tuple[torch.Tensor, Stored]) -> None:
    tensor, found = made
    assert same(found, tensor)


def test_steps_keep_to_the_file(tmp_path: Path) -> None:
    path, tensor = tmp_path / "a", counted((6, 4))
    path.write_bytes(b"head" + bytes_of(tensor))
    whole = plain("int32", (6, 4), all_of(file(path)).part(4, 96))
    ((_, stretch),) = cut(whole, 2, 5).pieces
    assert (stretch.source, stretch.begin, stretch.nbytes) == (file(path), 4 + 2 * 16, 48)
    ((_, stretch),) = reshaped(whole, (2, 12)).pieces
    assert (stretch.begin, stretch.nbytes) == (4, 96)


def test_what_does_not_fit_is_damage_and_names_the_file() -> None:
    one = held(counted((4, 3)))
    line = held(counted((6,)))
    wrong: list[Callable[[], Any]] = [
        lambda: joined("float32", (4, 3), [((0, 0), one)]),
        lambda: joined("int32", (4, 3), [((0,), one)]),
        lambda: joined("int32", (4, 3, 1), [((0, 0), one)]),
        lambda: from_flat("int32", (4, 3), [(0, one)]),
        lambda: from_flat("int32", (4, 3), [(-1, line)]),
        lambda: from_flat("int32", (4, 3), [(7, line)]),
        lambda: from_flat("float32", (4, 3), [(0, line)]),
        lambda: concatenated([one, line]),
        lambda: concatenated([one, one], 2),
        lambda: concatenated([one, one], -1),
        lambda: concatenated([one, held(counted((4, 3), torch.int64))]),
        lambda: cut(one, 3, 2), lambda: cut(one, -1, 2), lambda: cut(one, 0, 5),
        lambda: cut(held(torch.tensor(1)), 0, 0),

        lambda: reshaped(one, (4, 4)), lambda: reshaped(one, (-4, -3)),
    ]  # fmt: skip
    for make in wrong:
        with pytest.raises(Damaged, match=str(WHERE)):
            make()
    with pytest.raises(ValueError, match="nothing"):
        concatenated([])


def test_faults() -> None:
    one = held(counted((4, 3)))
    outside = joined("int32", (4, 3), [((1, 0), one)])
    assert "outside" in str(outside.fault())
    overlap = joined("int32", (4, 3), [((0, 0), one), ((1, 0), held(counted((2, 3))))])
    assert "overlap" in str(overlap.fault())
    ((box, stretch),) = one.pieces
    assert "bytes instead of" in str(Stored("int32", (4, 3), ((box, stretch.part(0, 44)),)).fault())
    assert "in no box" in str(Stored("int32", (4, 3), ()).fault())
