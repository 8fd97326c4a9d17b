"""Statistics of a saved tensor, read in boxes: minimum, maximum, mean, NaN, a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.inspect.reading import BOX, boxes_of, groups, has_numbers, numbers, read_box, read_together
from holdfast.ondisk import dtypes
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.patterns import near

_Parts = Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Statistics:
    """The numbers of one tensor. NaN and infinities are counted, and left out of everything else.

    Of a complex tensor they are those of the absolute values. ``count``: elements; of a packed type each holds
    several numbers. ``std`` is that of the whole (divided by the number of values, not by one less). ``norm`` is the
    root of the sum of squares. ``edges`` are one more than ``counts``; a value at an inner edge counts above it.
    ``min``, ``max``, ``mean``, ``std`` and ``norm`` are None if nothing is finite, or the type holds no numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


def statistics(checkpoint: Checkpoint, name: str, *, bins: int = 0) -> Statistics:
    """The statistics of one tensor, with a histogram of ``bins`` equal bins between its least and greatest value.

    Reads it once, and for a histogram twice if it is larger than 64 MiB; takes some 110 MiB of memory whatever its
    size. Raises KeyError for an unknown name, Damaged for altered bytes.
    """
    record = checkpoint.records.get(name)
    if record is None:
        raise KeyError(f"{checkpoint.path} has no tensor {name!r}{near(name, checkpoint.records)}")
    if record.nbytes <= BOX:
        return statistics_of(name, record, read_together(checkpoint, [name])[name], bins=bins)
    return _streamed(checkpoint, name, record, bins)


def statistics_of_all(checkpoint: Checkpoint, names: Iterable[str], *, bins: int = 0) -> Iterator[Statistics]:
    """The statistics of many tensors, in order; small ones are read together. Raises KeyError and Damaged."""
    sizes = ((name, checkpoint.records[name].nbytes) for name in names)
    for group in groups(sizes):
        if checkpoint.records[group[0]].nbytes > BOX:
            yield statistics(checkpoint, group[0], bins=bins)
            continue
        for name, tensor in read_together(checkpoint, group).items():
            yield statistics_of(name, checkpoint.records[name], tensor, bins=bins)


def statistics_of(name: str, record: TensorRecord, tensor: torch.Tensor, *, bins: int = 0) -> Statistics:
    """The statistics of a tensor that has been read."""
    return _statistics(name, record, lambda: iter((tensor,)), bins)


def _streamed(checkpoint: Checkpoint, name: str, record: TensorRecord, bins: int) -> Statistics:
    boxes = list(boxes_of(record.shape, dtypes.itemsize(record.dtype)))
    return _statistics(name, record, lambda: (read_box(checkpoint, name, box) for box in boxes), bins)


def _statistics(name: str, record: TensorRecord, parts: _Parts, bins: int) -> Statistics:
    tally = _Tally()
    if has_numbers(record.dtype):
        for stretch in _stretches(parts()):
            tally.add(stretch)
    edges, counts = _histogram(tally, parts, bins) if bins and tally.finite else ((), ())
    known = tally.finite > 0
    return Statistics(
        name, record.dtype, record.shape, math.prod(record.shape), record.nbytes, tally.nan, tally.inf, tally.zeros,
        tally.low if known else None, tally.high if known else None, tally.mean if known else None,
        math.sqrt(tally.squares / tally.finite) if known else None, tally.norm if known else None, edges, counts,
    )  # fmt: skip


def _stretches(parts: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield from numbers(part)
        del part  # before the next one is read: else two are held


class _Tally:
    """Sums over stretches, merged so that rounding does not grow with the number of elements."""

    def __init__(self) -> None:
        self.finite = self.nan = self.inf = self.zeros = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = self.squares = self.norm = 0.0  # squares: of what each is off the mean

    def add(self, stretch: torch.Tensor) -> None:
        values = _finite(stretch)
        missing = stretch.numel() - values.numel()
        if missing:
            nan = int(torch.isnan(stretch).sum())
            self.nan, self.inf = self.nan + nan, self.inf + missing - nan
        count = values.numel()
        if not count:
            return
        least, most = torch.aminmax(values)
        self.low = min(self.low, least.item() + 0.0)  # no -0.0
        self.high = max(self.high, most.item() + 0.0)
        self.zeros += count - int(values.count_nonzero())
        mean = float(values.mean())
        squares = float((values - mean).square().sum())
        off, total = mean - self.mean, self.finite + count
        self.mean += off * count / total
        self.squares += squares + off * off * self.finite * count / total
        self.finite = total
        self.norm = math.hypot(self.norm, norm_of(values))


def norm_of(values: torch.Tensor) -> float:
    """The root of the sum of squares, also where the squares themselves would be too large or too small."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    if 1e-100 < largest < 1e100:
        return float(torch.linalg.vector_norm(values))
    return largest * float(torch.linalg.vector_norm(values / largest))


def _finite(stretch: torch.Tensor) -> torch.Tensor:
    """What is finite of a stretch; absolute values of complex numbers."""
    if stretch.is_complex():
        whole = torch.isfinite(stretch.real) & torch.isfinite(stretch.imag)
        return stretch[whole].abs()
    whole = torch.isfinite(stretch)
    return stretch if bool(whole.all()) else stretch[whole]


def _histogram(tally: _Tally, parts: _Parts, bins: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    low, high = tally.low, tally.high
    if low == high:  # one value, in the middle of a bin that is wide enough to differ from it
        half = max(0.5, abs(low) * 1e-3)
        low, high = low - half, high + half
    scale = 1.0 if math.isfinite(high - low) else 0.25
    low, high = low * scale, high * scale
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for stretch in _stretches(parts()):
        values = _finite(stretch) * scale
        places = ((values - low) / (high - low) * bins).long().clamp_(0, bins - 1)
        counts += torch.bincount(places, minlength=bins)
    edges = [(low + (high - low) * i / bins) / scale for i in range(bins)]
    return (*edges, high / scale), tuple(counts.tolist())
