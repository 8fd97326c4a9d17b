"""What is wanted of a file, wherever it goes, comes right, summed, once, and through windows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.buffers import scatter
from holdfast.errors import Damaged
from holdfast.ondisk import blocks
from holdfast.ondisk.box import Box, runs, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.read import ranges, read
from holdfast.read.files import AsStored
from holdfast.read.ranges import Overlap, jobs_of, ranges_of, spans_of
from holdfast.read.read import read_boxes
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted
from holdfast.storage.local.local_place import LocalPlace
from tests.buffers.test_device import DEVICE, pretended
from tests.marks import examples

SMALL = {"BLOCK": 256, "SPAN": 512, "GAP": 24, "DIRECT_FROM": 64, "PACKED": 128, "PACKED_RUNS": 3}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 bytes, and all else in proportion."""
    for name, value in SMALL.items():
        patch.setattr(ranges, name, value)
    made_by = read.source_of
    patch.setattr(read, "source_of", lambda *args: replace(made_by(*args), gap=SMALL["GAP"]))


class OneFile(AsStored):
    """One file that holds one tensor, in one piece that begins ``at``."""

    def __init__(self, folder: Path, tensor: torch.Tensor, at: int) -> None:
        self._path = folder / "file"
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        self._path.write_bytes(bytes(at) + data + bytes(7))
        self.record = TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None, "0")
        self._piece = Piece("t", self.record.dtype, tuple(tensor.shape), len(data), at)
        size = SMALL["BLOCK"]
        self.sums = tuple(blocks.block_sum(data[i : i + size]) for i in range(0, len(data), size))

    def path(self, index: int) -> Path:
        return self._path

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None: ...

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[int, Piece, Sequence[str]]:
        return 0, self._piece, self.sums

    @contextmanager
    def opened(self, index: int) -> Iterator[Any]:
        yield self._path.open_to_read()[0], None

    def overlap(self, box: Box, view: torch.Tensor) -> Overlap:
        return Overlap(0, self._piece, self.sums, box, whole(self.record.shape), view, self.record.dtype)


shapes = st.lists(st.integers(1, 9), min_size=0, max_size=4) | st.tuples(st.integers(1, 60), st.integers(1, 60))
dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float64])
kinds = st.sampled_from(["plain", "transposed", "stepped", "cast", "cast and stepped", "device", "negative"])


def made(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(prod(shape), dtype=torch.float64) % 199).to(dtype).reshape(tuple(shape))


def view_of(kind: str, lengths: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if "cast" in kind:
        dtype = torch.complex128 if dtype.is_complex else torch.float64 if dtype != torch.float64 else torch.float32
    if kind == "transposed":
        return torch.zeros(tuple(reversed(lengths)), dtype=dtype).permute(tuple(reversed(range(len(lengths)))))
    if "stepped" in kind and lengths:
        return torch.zeros((*lengths[:-1], 2 * lengths[-1]), dtype=dtype)[..., ::2]
    if kind == "negative" and dtype.is_complex:
        return torch.zeros(tuple(lengths), dtype=dtype).conj()
    made = torch.zeros(tuple(lengths), dtype=dtype)
    return pretended(made) if kind == "device" else made


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(starts), tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True)))


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data(), shapes, dtypes, kinds, st.sampled_from([True, False, "blocks"]), st.sampled_from([0, 16, 13]))
def test_any_box_comes_to_any_view(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: Sequence[int], dtype: torch.dtype, kind: str,
    verify: Any, at: int,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        tensor = made(shape, dtype)
        files = OneFile(LocalPlace(tmp_path_factory.mktemp("f")), tensor, at)
        box = data.draw(boxes(shape))
        view = view_of(kind, box.lengths, dtype)
        patch.setattr(scatter, "streams_of", lambda kind: None)
        told: list[int] = []
        stats = read_boxes(files, [Wanted("t", files.record, box, view)], verify=verify, progress=told.append)
        expected = scatter.narrowed(tensor, box)
        assert torch.equal(view.as_subclass(torch.Tensor), expected.to(view.dtype))
        assert stats.needed == sum(told) == expected.numel() * tensor.itemsize
        if verify == "blocks":
            assert not stats.unverified
        assert stats.unverified <= (stats.needed if verify else 0)


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data(), shapes, dtypes, kinds, st.booleans(), st.integers(0, 100))
def test_ranges_hold_exactly_what_is_wanted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: Sequence[int], dtype: torch.dtype, kind: str,
    round_up: bool, gap: int,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        files = OneFile(LocalPlace(tmp_path_factory.mktemp("f")), made(shape, dtype), 0)
        box = data.draw(boxes(shape))
        overlap = files.overlap(box, view_of(kind, box.lengths, dtype))
        found = list(ranges_of(overlap, True, round_up=round_up, gap=gap))
        assert sum(r.wanted for r in found) == box.size * dtype.itemsize
        # In order, none twice, none larger than a window; whole blocks have their sums and no other range has one.
        end, block, nbytes = 0, SMALL["BLOCK"], files.overlap(box, overlap.view).piece.nbytes
        for r in found:
            assert r.begin >= end and 0 < r.nbytes <= block and r.begin // block == (r.begin + r.nbytes - 1) // block
            is_block = r.begin % block == 0 and r.nbytes == min(block, nbytes - r.begin)
            assert (r.sum is not None) == is_block and (is_block or not round_up)
            end = r.begin + r.nbytes
        # All that is wanted lies in them, and of what is far from it nothing does.
        run, starts = runs(whole(shape), box)
        covered = {b for r in found for b in range(r.begin, r.begin + r.nbytes)}
        wanted = {b for s in starts for b in range(s * dtype.itemsize, (s + run) * dtype.itemsize)}
        assert wanted <= covered
        if not round_up and gap == 0:
            assert wanted == covered


@settings(max_examples=examples(100))
@given(st.data(), shapes, dtypes, st.integers(0, 50))
def test_spans_begin_and_end_where_boxes_do(
    data: st.DataObject, shape: Sequence[int], dtype: torch.dtype, gap: int
) -> None:
    box = data.draw(boxes(shape))
    name, size = str(dtype).removeprefix("torch."), dtype.itemsize
    piece = Piece("t", name, tuple(shape), prod(shape) * size, 0)
    spans = spans_of(Overlap(0, piece, (), box, whole(shape), torch.empty(0), name), gap)
    run, starts = runs(whole(shape), box)
    found = list(spans.starts())
    assert found[0] == starts[0] * size and spans.end == (starts[-1] + run) * size == found[-1] + spans.nbytes
    assert all(b - a - spans.nbytes > gap for a, b in zip(found, found[1:], strict=False))
    assert spans.solid == (len(found) * spans.nbytes == box.size * size)


def test_an_altered_block_never_reaches_a_view(tmp_path: Path, small: None) -> None:
    tensor = made((40, 60), torch.float32)
    files = OneFile(tmp_path, tensor, 0)
    with files.path(0).open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    for box in (Box((0, 0), (40, 60)), Box((0, 7), (40, 9))):
        view = torch.zeros(box.lengths, dtype=torch.float64)
        with pytest.raises(Damaged, match=r"4864:5120"):
            read_boxes(files, [Wanted("t", files.record, box, view)], verify="blocks")
        right = scatter.narrowed(tensor, box).double()
        assert ((view == right) | (view == 0)).all()


def test_columns_that_are_read_past_are_verified_for_nothing(tmp_path: Path, small: None) -> None:
    """Columns so near to each other that their file is read in one go: its blocks are there to be summed."""
    tensor = made((64, 16), torch.float32)
    files = OneFile(tmp_path, tensor, 0)
    view = torch.zeros(64, 12)
    stats = read_boxes(files, [Wanted("t", files.record, Box((0, 2), (64, 12)), view)])
    assert torch.equal(view, tensor[:, 2:14])
    assert stats.unverified == 0 and stats.read == tensor.nbytes


@pytest.mark.parametrize("verify", [True, "blocks"])
def test_what_has_no_sums_is_never_rounded_up(tmp_path: Path, small: None, verify: Any) -> None:
    """Files of other formats: whole blocks would be read for nothing."""
    tensor = made((64, 100), torch.float32)
    files = OneFile(tmp_path, tensor, 0)
    files.sums = ()
    view = torch.zeros(64, 2)
    stats = read_boxes(files, [Wanted("t", files.record, Box((0, 40), (64, 2)), view)], verify=verify)
    assert torch.equal(view, tensor[:, 40:42])
    assert stats.read == stats.unverified == stats.needed == view.nbytes


@pytest.mark.parametrize("verify", [True, "blocks", False])
def test_slices_of_tall_tensors_are_never_listed(verify: Any) -> None:
    """Thousands of millions of runs: only as many as are read at a time are ever looked at."""
    rows, columns = 1 << 32, 1 << 20
    piece = Piece("t", "float32", (rows, columns), rows * columns * 4, 0)
    box = Box((0, 5), (rows, 2))
    view = torch.empty(2, dtype=torch.float64, device="meta").expand(rows, 2)
    sums = type("Sums", (), {"__getitem__": lambda self, i: str(i), "__len__": lambda self: 1})()
    overlap = Overlap(0, piece, sums, box, whole(piece.lengths), view, "float32")
    jobs = jobs_of(ranges_of(overlap, verify, round_up=verify == "blocks"))
    first = [next(jobs) for _ in range(3)]
    assert sum(r.wanted for job in first for r in job) >= 3 * 8


def test_no_more_than_a_few_windows_are_alive(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that cannot be read into costs windows, not a copy of it, however many runs it takes."""
    alive, most, lock = [0], [0], threading.Lock()
    made_by, done_by = scatter.RunBuffer.__init__, scatter.RunBuffer.arrived

    def init(self: scatter.RunBuffer, *args: Any) -> None:
        made_by(self, *args)
        assert self.nbytes <= SMALL["PACKED"]
        with lock:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

    def arrived(self: scatter.RunBuffer) -> None:
        done_by(self)
        if not self.left:
            with lock:
                alive[0] -= 1

    monkeypatch.setattr(scatter.RunBuffer, "__init__", init)
    monkeypatch.setattr(scatter.RunBuffer, "arrived", arrived)
    tensor = made((2000, 100), torch.float32)
    files = OneFile(tmp_path, tensor, 0)
    view = torch.zeros(2000, 10, dtype=torch.float64)
    read_boxes(files, [Wanted("t", files.record, Box((0, 40), (2000, 10)), view)], verify=False)
    assert torch.equal(view, tensor[:, 40:50].double())
    assert alive[0] == 0 and 1 <= most[0] <= 4 * read.READERS + 1


class Stream:
    """A device's queue: what is queued in it is noted."""

    def __init__(self) -> None:
        self.threads: set[int] = set()


def test_devices_are_filled_in_the_streams_of_the_caller(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that other threads queue come after what the caller queued, and before what it queues next."""
    mine, here = Stream(), threading.local()

    class Module:
        def current_stream(self, device: torch.device) -> Stream:
            assert device == DEVICE and threading.current_thread() is threading.main_thread()
            return mine

        def set_device(self, device: torch.device) -> None:
            here.device = device

        @contextmanager
        def stream(self, stream: Stream) -> Iterator[None]:
            assert here.device == DEVICE, "else a context is set up on the first device"
            here.stream = stream
            yield
            here.stream = None

    deliver = scatter.deliver

    def delivered(host: torch.Tensor, view: torch.Tensor) -> None:
        assert here.stream is mine
        mine.threads.add(threading.get_ident())
        deliver(host, view)

    monkeypatch.setattr(scatter, "streams_of", lambda kind: Module())
    monkeypatch.setattr(scatter, "deliver", delivered)
    tensor = made((64, 100), torch.float32)
    files = OneFile(tmp_path, tensor, 0)
    for box in (Box((0, 0), (64, 100)), Box((0, 40), (64, 3))):
        view = torch.zeros(box.lengths)
        read_boxes(files, [Wanted("t", files.record, box, pretended(view))])
        assert torch.equal(view, scatter.narrowed(tensor, box))
    assert mine.threads and threading.get_ident() not in mine.threads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
def test_a_real_device_is_filled_in_order(tmp_path: Path, dtype: torch.dtype, strided: bool) -> None:
    tensor = torch.arange(6_000_000, dtype=torch.float32).reshape(2000, 3000)
    files = OneFile(tmp_path, tensor, 0)
    memory = torch.zeros(3000, 2000, dtype=dtype, device="cuda").t() if strided else torch.zeros(
        2000, 3000, dtype=dtype, device="cuda"
    )  # fmt: skip
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        memory.fill_(7)
        read_boxes(files, [Wanted("t", files.record, whole((2000, 3000)), memory)], verify=False)
        doubled = memory * 2
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), (tensor.to(dtype) * 2))


def test_several_reads_share_their_threads_also_after_one_that_failed(tmp_path: Path, small: None) -> None:
    tensor = made((64, 64), torch.float32)
    files = OneFile(LocalPlace(tmp_path), tensor, 16)
    wrong = OneFile(LocalPlace(tmp_path), tensor, 16)
    wrong.sums = ("0" * 16, *wrong.sums[1:])

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")}

    before, own = threads(), set[threading.Thread]()
    with read.Readers() as readers:
        for _ in range(3):
            view = torch.zeros(64, 64)
            read_boxes(files, [Wanted("t", files.record, whole((64, 64)), view)], verify="blocks", readers=readers)
            assert torch.equal(view, tensor)
            with pytest.raises(Damaged):
                read_boxes(wrong, [Wanted("t", files.record, whole((64, 64)), view)], verify="blocks", readers=readers)
            own |= threads() - before
    assert 0 < len(own) <= read.READERS
    assert not any(thread.is_alive() for thread in own)
