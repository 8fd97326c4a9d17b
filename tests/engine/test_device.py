"""Copies from a device, without one: tensors that pretend to lie there, and streams that do everything too late.

What is queued on a `Stream` here runs only when somebody waits for it. So whoever forgets to wait, or to make one
stream wait for another, gets wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.engine import device, outgoing, still, stream, sums
from holdfast.engine.arena import Slot
from holdfast.engine.device import Copier, Moments
from holdfast.engine.image import Image, OpenFiles, Written
from holdfast.engine.memory import buffer
from holdfast.engine.stage import host_tensor
from holdfast.engine.worker import ThreadWorker
from holdfast.engine.write import Writing
from holdfast.ondisk import datafile
from holdfast.ondisk.datafile import Piece

DEVICE = torch.device("cuda", 0)


class Pretended(torch.Tensor):
    """Says that it lies on a device; its bytes are on the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


def pretended(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(Pretended)


class Stream:
    """Work in order, done when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()

    def queue(self, work: Callable[[], object]) -> int:
        with self._lock:
            self._work.append(work)
            return len(self._work)

    def run(self, until: int) -> None:
        with self._lock:
            while self._done < until:
                self._done += 1
                self._work[self._done - 1]()

    def wait_event(self, event: Event) -> None:
        self.queue(event.synchronize)


class Training(Stream):
    """The stream that trains: its work is done at once."""

    def queue(self, work: Callable[[], object]) -> int:
        work()
        return 0


class Event:
    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.queue(lambda: None)

    def synchronize(self) -> None:
        self._stream.run(self._until)


class Device:
    """What stands in for `torch.cuda`; ``copies`` are the sizes of all copies to the host."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.training = Training(DEVICE)
        self.copies: list[int] = []
        self._here = threading.local()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._here, "stream", self.training)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Device:
    return pretend(monkeypatch)


def pretend(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Put the stand-in where `torch.cuda` would be used."""
    made = Device()

    class Host:
        def __init__(self, address: int, nbytes: int) -> None:
            self.to, self.nbytes = host_tensor(address, nbytes), nbytes

        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
            assert non_blocking and source.nbytes == self.nbytes
            made.copies.append(self.nbytes)
            made.current_stream().queue(lambda: self.to.copy_(source.as_subclass(torch.Tensor)))

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            assert made.current_stream() is not made.training, "memory of the side stream is made on the side stream"
            return pretended(torch.empty(size, dtype=dtype))

        def _foreach_copy_(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
            made.current_stream().queue(lambda: torch._foreach_copy_(to, source))

    def contiguous_parts(source: torch.Tensor) -> Iterator[torch.Tensor]:
        for part in real(source):
            on_its_way = part.data_ptr() != source.data_ptr()
            assert not on_its_way or made.current_stream() is not made.training, "made beside the copies, not after"
            yield part

    real = stream.contiguous_parts
    monkeypatch.setattr(stream, "contiguous_parts", contiguous_parts)
    monkeypatch.setattr(sums, "contiguous_parts", contiguous_parts)
    monkeypatch.setattr(device, "streams_of", lambda kind: made if kind == "cuda" else None)
    monkeypatch.setattr(device, "host_tensor", Host)
    monkeypatch.setattr(device, "torch", Torch())
    return made


# The copier


def test_neighbours_go_in_one_copy(fake: Device) -> None:
    tensors = [pretended(torch.arange(n, dtype=torch.uint8)) for n in (3, 5, 1, 7)]
    memory, copier = buffer(4096), Copier(Moments())
    at = 0
    for tensor in tensors:
        copier.copy(tensor, 0, tensor.nbytes, memory.address + at)
        at += tensor.nbytes
    assert not fake.copies
    moment = copier.moment()
    assert fake.copies == [16] and bytes(memory.view[:16]) == bytes(16), "queued, and not done yet"
    moment.wait()
    assert bytes(memory.view[:at]) == b"".join(bytes(range(n)) for n in (3, 5, 1, 7))


def test_what_is_no_neighbour_or_too_large_goes_alone(fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SMALL", 10)
    monkeypatch.setattr(device, "BATCH", 14)
    memory, copier = buffer(4096), Copier(Moments())

    def copy(nbytes: int, at: int) -> None:
        copier.copy(pretended(torch.full((nbytes,), nbytes, dtype=torch.uint8)), 0, nbytes, memory.address + at)

    copy(4, 0)
    copy(4, 8)  # leaves a gap
    copy(10, 12)
    copy(6, 22)  # the batch is full
    copy(11, 28)  # too large for any
    copy(2, 39)
    copier.moment().wait()
    assert fake.copies == [4, 14, 6, 11, 2]
    expected = bytes([4] * 4 + [0] * 4 + [4] * 4 + [10] * 10 + [6] * 6 + [11] * 11 + [2] * 2)
    assert bytes(memory.view[: len(expected)]) == expected


def test_copies_come_after_what_the_save_was_called_after(fake: Device) -> None:
    """The moment of the save is recorded in the stream that trains; the side stream waits for it."""
    other = Stream(DEVICE)
    tensor = pretended(torch.zeros(4, dtype=torch.uint8))
    other.queue(lambda: tensor.fill_(7))
    event = Event()
    event.record(other)
    memory, copier = buffer(4096), Copier(Moments([(DEVICE, event)]))
    copier.copy(tensor, 0, 4, memory.address)
    copier.moment().wait()
    assert bytes(memory.view[:4]) == b"\7" * 4


def test_a_step_on_the_device_comes_after_the_copies(fake: Device) -> None:
    tensor = pretended(torch.ones(4, dtype=torch.uint8))
    memory, copier = buffer(4096), Copier(Moments())
    copier.copy(tensor, 0, 4, memory.address)
    copying = still.Copying()
    copying.release(copier.moment())
    copying.hold_step()
    fake.training.queue(lambda: tensor.zero_())
    assert bytes(memory.view[:4]) == b"\1" * 4


def test_moments_are_of_devices_alone(fake: Device) -> None:
    tensors = [torch.ones(1), pretended(torch.ones(1)), pretended(torch.ones(1))]
    assert device.devices_of(tensors) == [DEVICE]
    assert Moments.now([]).events == [] and Copier(Moments()).moment().events == []
    assert [where for where, _ in Moments.now(device.devices_of(tensors)).events] == [DEVICE]


def test_there_are_streams_for_devices_alone() -> None:
    assert device.streams_of("cpu") is None and device.streams_of("no such device") is None
    assert device.streams_of("cuda") is torch.cuda
    with Copier(Moments()).on(torch.device("cpu")):
        pass


def test_nothing_is_pinned_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert device.pin(0, 4096) is False


# Writing

sizes = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(4000, 20_000))
kinds = st.sampled_from(["plain", "transposed", "on the host"])


@st.composite
def images(draw: st.DrawFn) -> list[Image]:
    made = []
    for number in range(draw(st.integers(1, 3))):
        pieces, sources = [], []
        for i, (n, kind) in enumerate(draw(st.lists(st.tuples(sizes, kinds), min_size=1, max_size=12))):
            values = torch.arange(2 * n, dtype=torch.int64).mul(31 * i + number + 7).to(torch.uint8).reshape(n, 2)
            tensor = values.t() if kind == "transposed" else values
            pieces.append(Piece(f"t{i:02}", "uint8", tuple(tensor.shape), tensor.nbytes))
            sources.append(tensor if kind == "on the host" else pretended(tensor))
        order = {p.key: source for p, source in zip(pieces, sources, strict=True)}
        pieces = datafile.arrange(pieces)
        made.append(Image(f"s{number}/f.safetensors", f"s{number}", pieces, [order[p.key] for p in pieces], {}))
    return made


def write_all(images: list[Image], folder: Path, windows: int) -> tuple[list[Written], list[bytes]]:
    for image in images:
        (folder / image.section).mkdir(parents=True)
    worker, files = ThreadWorker(), OpenFiles()
    slot = Slot(0, worker, window=8192)
    slot.reserve(windows * 8192)
    told: list[int] = []
    writing = Writing(
        images, folder, save="0" * 16, rank=0, slot=slot, files=files, progress=told.append, after=Moments()
    )
    for image in reversed(images):
        writing.stage(image)
    writing.copier.moment()
    writing.land()
    writing.wait_written()
    writing.finish()
    writing.close()
    files.close()
    slot.begin()  # every window is back
    worker.close()
    assert sum(told) == sum(written.bytes for written in writing.parts())
    return writing.parts(), [(folder / image.path).read_bytes() for image in images]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(images(), st.integers(1, 5), st.integers(1, 3000), st.integers(1, 6000))
def test_files_from_a_device_are_those_from_the_host(
    tmp_path_factory: pytest.TempPathFactory, images: list[Image], windows: int, small: int, batch: int
) -> None:
    plain = [
        Image(i.path, i.section, i.pieces, [s.as_subclass(torch.Tensor) for s in i.sources], i.shapes) for i in images
    ]
    expected = write_all(plain, tmp_path_factory.mktemp("host"), windows)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(device, "SMALL", small)
        patch.setattr(device, "BATCH", batch)
        assert write_all(images, tmp_path_factory.mktemp("device"), windows) == expected


# Whole saves


@pytest.fixture
def pretending(fake: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every tensor of a save lies on the device."""
    real = outgoing.images_of

    def images_of(*args: Any) -> list[Image]:
        return [
            Image(i.path, i.section, i.pieces, [pretended(s) for s in i.sources], i.shapes) for i in real(*args)
        ]  # fmt: skip

    monkeypatch.setattr(outgoing, "images_of", images_of)
    monkeypatch.setattr(still, "devices_of", lambda tensors: [DEVICE])
    return fake


@pytest.mark.parametrize("hold", [0, 1 << 20], ids=["staged at once", "copied aside"])
def test_what_may_change_at_any_moment_is_copied_first(
    hold: int, pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that `save` has only queued on a device come before whatever the caller does next there."""
    monkeypatch.setattr(still, "HOLD", hold)
    monkeypatch.setattr(still, "SMALL", hold)
    averages = {f"w{i}": torch.full((1000, 7), float(i)).t() for i in range(5)}
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save({"ema": averages}, tmp_path / "c")
        for tensor in averages.values():
            tensor.mul_(-1).sub_(1)
        checkpoint = saving.wait()
        checkpoint.verify()
        for i in range(5):
            assert (checkpoint.read(f"ema/w{i}") == i).all()
    assert pretending.copies


def test_steps_on_a_device_wait_for_the_copies_alone(pretending: Device, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Saver(worker="thread", slots=2) as saver:
        for step in range(6):
            model(torch.ones(1, 50)).sum().backward()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            saving = saver.save(state, tmp_path / str(step))
            optimizer.step()
            saved = saving.wait().state_dict()["model"]
            for name, value in before.items():
                assert torch.equal(saved[name], value)
                assert not torch.equal(model.state_dict()[name], value)


def test_values_of_a_rank_that_lie_on_a_device_are_waited_for(
    fake: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[torch.Tensor]] = []
    monkeypatch.setattr(still, "devices_of", lambda tensors: seen.append(list(tensors)) or [])
    mine = torch.arange(5)
    with holdfast.Saver(worker="thread") as saver:
        saver.save({"mine": holdfast.PerRank({"t": mine})}, tmp_path / "c").wait()
    assert any(torch.equal(t, mine) for t in seen[0] if t.shape == mine.shape), "else no copy would wait for its clone"


def test_a_save_that_fails_while_a_device_copies_gives_every_window_back(
    pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": {"t": torch.ones(1000)}, "b": {"t": torch.ones(1000)}}
    real = sums.Sums.feed
    with holdfast.Saver(worker="thread") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(sums.Sums, "feed", lambda self, view: 1 / 0)
            with pytest.raises(holdfast.SaveFailed, match="ZeroDivisionError"):
                saver.save(state, tmp_path / "c").wait()
        assert sums.Sums.feed is real and not (tmp_path / "c").exists()
        saver.save(state, tmp_path / "c").wait().verify()
