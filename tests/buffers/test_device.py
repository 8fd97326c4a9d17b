"""Copies from a device, without one: on a stand-in that does everything as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.buffers import device, stable
from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.memory import buffer
from holdfast.commit import gather, plain_tensors
from holdfast.ondisk import datafile
from holdfast.ondisk.datafile import Piece
from holdfast.ranks.ranks import ranks_of
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.urls import location
from holdfast.write import filling
from holdfast.write.buffer import StagingBuffer
from holdfast.write.datafiles import DataFile, OpenFiles, Written
from holdfast.write.worker import ThreadWorker
from holdfast.write.write import Writing
from tests.gpu.standin import DEVICE, Device, Event, Stream, pretend, pretend_states, pretended
from tests.marks import examples

LONG = 240.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Device:
    return pretend(monkeypatch)


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


def test_where_a_device_has_no_memory_left_small_ones_go_one_by_one(
    fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(device.torch), "cat", full)
    memory, copier = buffer(4096), Copier(Moments())
    for at, byte in enumerate(b"holdfast"):
        copier.copy(pretended(torch.tensor([byte], dtype=torch.uint8)), 0, 1, memory.address + at)
    copier.moment().wait()
    assert fake.copies == [1] * 8 and bytes(memory.view[:8]) == b"holdfast"


def test_on_a_device_without_streams_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Host:
        def __init__(self, address: int, nbytes: int) -> None:
            pass

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            waited.append(not non_blocking)

    monkeypatch.setattr(device, "streams_of", lambda kind: None)
    monkeypatch.setattr(device, "host_tensor", Host)
    copier = Copier(Moments())
    copier.copy(pretended(torch.zeros(4)), 0, 16, 0)
    copier.copy(pretended(torch.zeros(1 << 20)), 0, 4 << 20, 16)
    copier.moment()
    assert waited == [True, True]


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
    copying = stable.Copying()
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


def test_an_error_of_pinning_is_not_left_to_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the last error of a thread until somebody asks: else that is a kernel of the user's."""
    left: list[int] = []

    class Cuda:
        OutOfMemoryError = torch.OutOfMemoryError

        def __init__(self) -> None:
            self.cuda = self

        def is_available(self) -> bool:
            return True

        def cudart(self) -> Cuda:
            return self

        def cudaHostRegister(self, *_: int) -> int:
            left.append(712)
            return 712

        def ones(self, *_: object, device: str) -> None:
            assert device == "cuda"
            raise RuntimeError(f"CUDA error: {left.pop()}")

    monkeypatch.setattr(device, "torch", Cuda())
    assert device.pin(4096, 4096) is False and not left
    assert "cannot pin 4096 bytes of staging memory (CUDA error 712)" in caplog.text


# Writing

sizes = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(4000, 20_000))
kinds = st.sampled_from(["plain", "transposed", "on the host"])


@st.composite
def images(draw: st.DrawFn) -> list[DataFile]:
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
        made.append(DataFile(f"s{number}/f.safetensors", f"s{number}", pieces, [order[p.key] for p in pieces], {}))
    return made


def write_all(images: list[DataFile], folder: Path, windows: int) -> tuple[list[Written], list[bytes]]:
    for image in images:
        (folder / image.section).mkdir(parents=True)
    worker, opened = ThreadWorker(), OpenFiles()
    buffer = StagingBuffer(0, worker, chunk_bytes=8192)
    buffer.reserve(windows * 8192)
    told: list[int] = []
    writing = Writing(images, location(folder), save="0" * 16, rank=0, buffer=buffer, opened=opened, after=Moments())
    writing.progress.report = told.append
    for image in reversed(images):
        writing.stage([image.section])
    writing.copier.moment()
    writing.land()
    writing.wait_written()
    writing.finish()
    writing.close()
    opened.close()
    buffer.begin()  # every chunk is back
    worker.close()
    assert sum(told) == sum(written.bytes for written in writing.written())
    return writing.written(), [(folder / image.path).read_bytes() for image in images]


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(images(), st.integers(1, 5), st.integers(1, 3000), st.integers(1, 6000))
def test_files_from_a_device_are_those_from_the_host(
    tmp_path_factory: pytest.TempPathFactory, images: list[DataFile], windows: int, small: int, batch: int
) -> None:
    plain = [
        DataFile(i.path, i.section, i.pieces, [s.as_subclass(torch.Tensor) for s in i.sources], i.shapes)
        for i in images
    ]
    expected = write_all(plain, LocalPlace(tmp_path_factory.mktemp("host")), windows)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(device, "SMALL", small)
        patch.setattr(device, "BATCH", batch)
        assert write_all(images, LocalPlace(tmp_path_factory.mktemp("device")), windows) == expected


# Whole saves


@pytest.fixture
def pretending(fake: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every tensor of a save lies on the device."""
    pretend_states(monkeypatch)
    return fake


@pytest.mark.parametrize("how", ["blocking", "background"])
def test_training_waits_for_copies_and_not_for_the_space_of_files(how: str, pretending: Device, tmp_path: Path) -> None:
    """Space for 20 GB took three seconds on a file system in memory. A blocking save asks for it first."""
    state = {"model": {f"w{i}": torch.full((500_000,), float(i)) for i in range(4)}}
    copied: list[int] = []

    def watch(call: disk.Call, do: Callable[[], Any]) -> Any:
        if call.verb == "reserve":
            copied.append(sum(pretending.copies))
        return do()

    with disk.hooked(watch):
        if how == "blocking":
            holdfast.save(state, tmp_path / "c")
        else:
            with holdfast.Saver(worker="thread") as saver:
                saver.save(state, tmp_path / "c")
    assert copied == [0 if how == "blocking" else 8_000_000]
    holdfast.open(tmp_path / "c").verify()


@pytest.mark.parametrize("hold", [0, 1 << 20], ids=["staged at once", "copied aside"])
def test_what_may_change_at_any_moment_is_copied_first(
    hold: int, pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that `save` has only queued on a device come before whatever the caller does next there."""
    monkeypatch.setattr(stable, "HOLD", hold)
    monkeypatch.setattr(stable, "SMALL", hold)
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


def test_a_load_waits_for_copies_that_are_only_queued(
    pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(50, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    holdfast.save(state, tmp_path / "before")
    with torch.no_grad():
        model.weight.fill_(1)
    gate, real = threading.Event(), filling.FilledFile.land_first
    monkeypatch.setattr(filling.FilledFile, "land_first", lambda self: (gate.wait(LONG), real(self)))
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "c")
        assert saving.copying._released.wait(LONG) and pretending.streams[0].left
        holdfast.load(tmp_path / "before", state)
        assert not (model.weight == 1).any()
        gate.set()
        saved = saving.wait().read("model/weight")
    assert (saved == 1).all()


def test_a_step_that_is_captured_waits_for_nothing(pretending: Device, tmp_path: Path) -> None:
    """A stream that is captured may wait for no event of before: CUDA would end the capture with an error."""
    model = torch.nn.Linear(50, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    with holdfast.Saver(worker="thread") as saver:
        saver.save(state, tmp_path / "c").wait()
        pretending.training.capturing = True
        state["optimizer"].step()
        pretending.training.capturing = False
        state["optimizer"].step()


@pytest.mark.parametrize("first", ["nothing", "a step", "wait_staged"])
def test_a_change_that_waits_for_nothing_is_seen_although_all_is_queued(
    first: str, pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copies are made: by hand it fails the save, after a step or a wait it is as it should be."""
    model = torch.nn.Linear(50, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    gate, real = threading.Event(), filling.FilledFile.land_first
    monkeypatch.setattr(filling.FilledFile, "land_first", lambda self: (gate.wait(LONG), real(self)))
    model(torch.ones(1, 50)).sum().backward()
    with holdfast.Saver(worker="thread") as saver:
        there = model.weight.clone()
        saving = saver.save(state, tmp_path / "c")
        assert saving.copying._released.wait(LONG) and pretending.streams[0].left
        if first == "a step":
            state["optimizer"].step()
        elif first == "wait_staged":
            saving.wait_staged()
        with torch.no_grad():
            model.weight.clamp_(-0.01, 0.01)
        gate.set()
        if first == "nothing":
            with pytest.raises(holdfast.SaveFailed, match=r"model/weight changed while .*wait_staged"):
                saving.wait()
        else:
            assert torch.equal(saving.wait().read("model/weight"), there)
        again = saver.save(state, tmp_path / "d")
        there = model.weight.clone()
        assert again.copying._released.wait(LONG)
        again.wait()
    assert torch.equal(holdfast.open(tmp_path / "d").read("model/weight"), there)


def test_values_of_a_rank_that_lie_on_a_device_are_waited_for(
    fake: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[torch.Tensor]] = []
    monkeypatch.setattr(stable, "devices_of", lambda tensors: seen.append(list(tensors)) or [])
    mine = torch.arange(5)
    with holdfast.Saver(worker="thread") as saver:
        saver.save({"mine": holdfast.PerRank({"t": mine})}, tmp_path / "c").wait()
    assert any(torch.equal(t, mine) for t in seen[0] if t.shape == mine.shape), "else no copy would wait for its clone"


def test_a_save_that_fails_while_a_device_copies_gives_every_window_back(
    pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": {"t": torch.ones(1000)}, "b": {"t": torch.ones(1000)}}
    real = filling.Sums.feed
    with holdfast.Saver(worker="thread") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(filling.Sums, "feed", lambda self, view: 1 / 0)
            with pytest.raises(holdfast.SaveFailed, match="ZeroDivisionError"):
                saver.save(state, tmp_path / "c").wait()
        assert filling.Sums.feed is real and not (tmp_path / "c").exists()
        saver.save(state, tmp_path / "c").wait().verify()


def test_a_save_that_fails_waits_for_what_it_has_queued(
    pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is still to come would go into a window of the next save."""
    monkeypatch.setattr(device, "SMALL", 0)
    real = Copier.copy

    def copy(self: Copier, *args: Any) -> None:
        if pretending.copies:
            raise RuntimeError("CUDA error")
        real(self, *args)

    with holdfast.Saver(worker="thread") as saver:
        with monkeypatch.context() as patch, pytest.raises(holdfast.SaveFailed, match="CUDA error"):
            patch.setattr(Copier, "copy", copy)
            saver.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "c").wait()
        assert pretending.copies == [4000] and not pretending.streams[0].left
        saver.save({"a": torch.zeros(1000)}, tmp_path / "c").wait().verify()


def test_plain_tensors_are_summed_beside_training(pretending: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that trains a sum would wait for all that is queued there, and be early if another one trains."""
    state = {"small": torch.ones(9), "large": torch.ones(1 << 20), "turned": torch.ones(600, 700).t()}
    collected = gather.collect({"a": state}, ranks_of(None))
    moments, real, streams = Moments.now(device.devices_of(collected.tensors())), plain_tensors.copy_bytes, []

    def copy_bytes(*args: Any) -> None:
        streams.append(pretending.current_stream())
        real(*args)

    monkeypatch.setattr(plain_tensors, "copy_bytes", copy_bytes)
    assert set(plain_tensors.sums_of(collected, Copier(moments))) == {"a/small", "a/large", "a/turned"}
    assert streams == pretending.streams * 3


def test_all_saves_share_a_side_stream(pretending: Device, tmp_path: Path) -> None:
    """Memory that one stream of a device has freed serves no other: with one for each save it would add up."""
    with holdfast.Saver(worker="thread", slots=2) as saver:
        for number in range(5):
            state = {"t": torch.full((1000,), float(number))}
            saver.save(state, tmp_path / str(number))
    assert len(pretending.streams) == 1 and len(pretending.copies) == 5
    assert [holdfast.open(tmp_path / str(number)).read("t")[0] for number in range(5)] == [0, 1, 2, 3, 4]


def test_a_save_that_training_waits_for_copies_into_pinned_windows_and_unpins_them(
    pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, seen = filling.Sums.feed, []
    monkeypatch.setattr(
        filling.Sums, "feed", lambda self, view: (seen.append(dict(pretending.pinned)), feed(self, view))
    )
    holdfast.save({"t": torch.ones(9_000_000)}, tmp_path / "c").verify()
    assert [list(sizes.values()) for sizes in seen] == [[36_003_840]] * 3 and not pretending.pinned
    with monkeypatch.context() as patch, pytest.raises(holdfast.SaveFailed):
        patch.setattr(Copier, "moment", lambda self: 1 / 0)
        holdfast.save({"t": torch.ones(9)}, tmp_path / "d")
    assert not pretending.pinned


@pytest.mark.parametrize("nth", range(3))  # the moments of two windows, and of the whole
def test_a_device_that_fails_while_copies_are_queued_costs_one_save(
    nth: int, pretending: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": {"t": torch.ones(1000)}, "b": {"t": torch.ones(1000)}}
    real, calls = Copier.moment, iter(range(1000))

    def moment(self: Copier) -> Moments:
        if next(calls) == nth:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)

    with holdfast.Saver(worker="thread") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(Copier, "moment", moment)
            with pytest.raises(holdfast.SaveFailed, match="out of memory"):
                saver.save(state, tmp_path / "c").wait()
            assert not (tmp_path / "c").exists()
        saver.save(state, tmp_path / "next").wait().verify()
