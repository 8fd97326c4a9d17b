"""Statistics against NumPy in double precision, for every type that a checkpoint can hold, in boxes smaller than it."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.inspect import compare, reading, statistics
from holdfast.ondisk.box import tiling_fault

BITS = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2", *(f"uint{n}" for n in range(1, 8)))
FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
WHOLE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
]  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of some dozen elements, so that every tensor here is one that does not fit."""
    monkeypatch.setattr(statistics, "BOX", 64)
    monkeypatch.setattr(reading, "BOX", 64)
    monkeypatch.setattr(reading, "STRETCH", 5)
    monkeypatch.setattr(reading.boxes_of, "__defaults__", (64,))
    monkeypatch.setattr(reading.groups, "__defaults__", (64,))


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found: dict[str, torch.Tensor] = {}
    for kind in FLOATS:
        values = torch.randn(7, 9) * 3
        values[2, 3] = 0.0
        values[4] = values[4].abs() + 0.01
        found[str(kind)] = values.to(kind)
    for kind in WHOLE:
        found[str(kind)] = torch.randint(0, 100, (5, 11)).to(kind)
    found["complex64"] = torch.randn(4, 13, dtype=torch.complex64)
    found["complex128"] = torch.randn(61, dtype=torch.complex128)
    odd = torch.randn(90)
    odd[::7], odd[5], odd[6] = math.nan, math.inf, -math.inf
    found["odd"] = odd
    found["transposed"] = torch.randn(12, 30).t()
    found["huge"] = torch.tensor([1e300, -1e300, 3e-300] * 20, dtype=torch.float64)
    found["tiny"] = torch.tensor([1e-200, -3e-200] * 20, dtype=torch.float64)
    found["one"] = torch.tensor(2.5)
    found["least"] = torch.tensor(-7, dtype=torch.int64)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Checkpoint:
    return holdfast.save({"m": states()}, tmp_path_factory.mktemp("saved") / "ckpt")


@pytest.mark.parametrize("name", states())
def test_every_type_as_numpy_says(saved: holdfast.Checkpoint, name: str) -> None:
    tensor = states()[name]
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    numbers: Any = tensor.to(wide).numpy().reshape(-1)
    numbers = np.abs(numbers) if tensor.is_complex() else numbers
    finite = numbers[np.isfinite(numbers)]
    found = statistics.statistics(saved, f"m/{name}", bins=8)
    assert (found.dtype, found.shape, found.count) == (str(tensor.dtype)[6:], tuple(tensor.shape), tensor.numel())
    assert (found.nan, found.inf) == (np.isnan(numbers).sum(), np.isinf(numbers).sum())
    assert found.zeros == (finite == 0).sum() and found.nbytes == tensor.nbytes
    assert (found.min, found.max) == pytest.approx(
        (finite.min(), finite.max()), rel=1e-15 if tensor.is_complex() else 0
    )
    largest = np.abs(finite).max() or 1.0
    told = (found.mean, found.norm, found.std if largest < 1e150 else 0.0)
    scaled = finite / largest
    right = (finite.mean(), largest * math.sqrt((scaled**2).sum()), finite.std() if largest < 1e150 else 0.0)
    assert told == pytest.approx(right, rel=1e-12, abs=1e-12 * largest)
    if finite.min() < finite.max() and largest < 1e150:
        counts, edges = np.histogram(finite, 8)
        assert found.edges == pytest.approx(edges, rel=1e-12, abs=1e-12 * largest)
        assert sum(found.counts) == finite.size
        # A value on an edge may be put to either side by the last bit of a division.
        assert np.abs(np.array(found.counts) - counts).sum() <= (0 if tensor.dtype.itemsize > 2 else 8)
    else:
        assert sum(found.counts) == finite.size and len(found.edges) == 9


@pytest.mark.parametrize("name", BITS)
def test_types_that_are_no_numbers(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.arange(32, dtype=torch.uint8).view(dtype)
    holdfast.save({"m": {"w": tensor}}, tmp_path / "c")
    found = statistics.statistics(holdfast.open(tmp_path / "c"), "m/w", bins=4)
    assert (found.count, found.nbytes, found.dtype) == (tensor.numel(), 32, name)
    if name == "float4_e2m1fn_x2":  # two numbers a byte: 0 to 31 have a 0 or 0.5 above, all sixteen below
        assert (found.min, found.max, found.zeros) == (-6.0, 6.0, 20)
    else:
        assert found.min is None and found.counts == () and found.zeros == 0


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, 0, 2), torch.tensor([math.nan]), torch.zeros(0, 4)])
def test_nothing_finite(tmp_path: Path, tensor: torch.Tensor) -> None:
    holdfast.save({"m": {"w": tensor}}, tmp_path / "c")
    found = statistics.statistics(holdfast.open(tmp_path / "c"), "m/w", bins=4)
    assert (found.min, found.max, found.mean, found.std, found.norm) == (None,) * 5
    assert (found.edges, found.counts, found.nan) == ((), (), tensor.numel())


def test_many_at_once_are_the_same(saved: holdfast.Checkpoint) -> None:
    all_of_them = list(statistics.statistics_of_all(saved, saved.tensors, bins=3))
    assert all_of_them == [statistics.statistics(saved, name, bins=3) for name in saved.tensors]


def test_an_unknown_name(saved: holdfast.Checkpoint) -> None:
    with pytest.raises(KeyError, match="did you mean m/odd"):
        statistics.statistics(saved, "m/odds")


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (2, 1, 100), (100, 1), (0, 3), (5, 0)])
@pytest.mark.parametrize("most", [1, 8, 24, 1000])
def test_boxes_tile_and_are_bounded(shape: tuple[int, ...], most: int) -> None:
    boxes = list(reading.boxes_of(shape, 4, most))
    assert tiling_fault(shape, boxes) is None
    assert all(box.size * 4 <= max(most, 4) for box in boxes)
    assert boxes == sorted(boxes)


def test_no_more_than_a_box_of_each_is_held(
    saved: holdfast.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, held = [], []
    read = holdfast.Checkpoint.read

    def noting(self: holdfast.Checkpoint, name: str, box: Any = None) -> torch.Tensor:
        held.append(sum(earlier() is not None for earlier in kept))
        found = read(self, name, box)
        asked.append(found.nbytes)
        kept.append(weakref.ref(found))
        return found

    kept: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(holdfast.Checkpoint, "read", noting)
    statistics.statistics(saved, "m/transposed")
    assert max(asked) <= 64 and sum(asked) == 12 * 30 * 4 and max(held) == 0
    statistics.statistics(saved, "m/transposed", bins=4)
    assert max(held) == 0
    other = holdfast.save({"m": {"transposed": states()["transposed"] + 1}}, tmp_path / "other")
    monkeypatch.setattr(compare, "BOX", 64)
    asked.clear()
    (found,) = compare.compare(saved, other, only="m/transposed")
    assert found.status == "changed" and len(asked) == 2 + 2 * 30 and max(held) == 1
