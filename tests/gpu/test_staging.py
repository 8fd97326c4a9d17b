"""From a device to a file: beside the stream that trains, after what was queued, into memory that is pinned once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.buffers import device as staging
from holdfast.buffers.memory import buffer
from holdfast.write import buffer as buffers
from holdfast.write import pool
from holdfast.write.pool import Ring
from holdfast.write.worker import start
from tests.gpu import standin, states
from tests.gpu.lab import Lab
from tests.tearing import differences

MIB = 1 << 20
MOST = 64 * MIB
"""Bytes that a save may take on the device beyond the state."""

SEGMENTS = 64 * MIB
"""Bytes by which that may grow where torch's allocator takes whole segments: 20 MiB for what is over 1 MiB."""


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def saved(path: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    return {name: checkpoint.read(f"s/{name}") for name in state}


@pytest.mark.parametrize("how", ["blocking", "thread", "process", "process in waves", "thread, another stream"])
@pytest.mark.slow
def test_every_kind_of_tensor_comes_to_its_file(how: str, lab: Lab, tmp_path: Path) -> None:
    state = states.every_kind(lab.kind, 1)
    expected = on_host(state)
    if how == "blocking":
        holdfast.save({"s": state}, tmp_path / "c")
    else:
        limit = 2 * buffers.CHUNK if "waves" in how else None
        with holdfast.Saver(worker=how.split()[0].rstrip(","), memory_limit=limit) as saver:
            if "another" in how:
                with lab.another_stream():
                    lab.busy()
                    state["large"].zero_()
                    saver.save({"s": state}, tmp_path / "c").wait()
                expected["large"].zero_()
            else:
                saver.save({"s": state}, tmp_path / "c").wait()
    assert differences(saved(tmp_path / "c", state), expected) == []
    assert lab.copied, "and the device copied it"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_a_save_has_what_was_queued_before_it_and_nothing_that_came_after(seed: int, lab: Lab, tmp_path: Path) -> None:
    """The device is far behind when the save is called, and the copies are late when training goes on."""
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, seed)
    training.run(2)
    with holdfast.Saver(worker="thread") as saver:
        saver.prepare(training.state)
        lab.late()
        lab.busy()
        with torch.no_grad():
            for tensor in dict(training.tensors()).values():
                tensor.add_(seed + 1)
        saving = saver.save(training.state, tmp_path / "c")
        expected = training.copy()
        training.run(3)
        checkpoint = saving.wait()
    assert differences(_flat(checkpoint), expected) == []
    assert differences(training.copy(), expected), "training went on"


def _flat(checkpoint: holdfast.Checkpoint) -> dict[str, torch.Tensor]:
    """By the names of `Training.tensors`."""
    found = {}
    for name in checkpoint.tensors:
        section, _, rest = name.partition("/")
        if section == "model":
            found[rest] = checkpoint.read(name)
        elif section == "optimizer":
            parameter, _, key = rest.removeprefix("state/").rpartition("/")
            found[f"{parameter}/{key}"] = checkpoint.read(name)
    return found


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.slow
def test_the_call_waits_for_nothing_on_the_device(worker: str, lab: Lab, tmp_path: Path) -> None:
    """Not for what is queued, and not for its own copies: training goes on at once."""
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 1)
    training.run(1)
    with holdfast.Saver(worker=worker) as saver:
        saver.prepare(training.state)
        saver.save(training.state, tmp_path / "first").wait()
        still_stuck = lab.stuck()
        saving = saver.save(training.state, tmp_path / "c")
        assert still_stuck(), "the call came back while the device had not yet come to it"
        training.learn()
        assert still_stuck() and not saving.done
        lab.synchronize()
        saving.wait().verify()


@pytest.mark.slow
def test_the_arena_is_pinned_once_and_let_go(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is allocated and pinned by `prepare`; saves that fit into it take it as it is."""
    seen: list[str] = []
    made: list[int] = []
    pin, unpin, allocate = staging.pin, staging.unpin, buffers.StagingBuffer._allocate
    monkeypatch.setattr(staging, "pin", lambda at, nbytes: (seen.append(f"pin {nbytes}"), pin(at, nbytes))[1])
    monkeypatch.setattr(staging, "unpin", lambda at: (seen.append("unpin"), unpin(at)))
    monkeypatch.setattr(
        buffers.StagingBuffer, "_allocate", lambda self, count: (made.append(count), allocate(self, count))
    )
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 1)
    training.run(1)
    with holdfast.Saver() as saver:
        saver.prepare(training.state)
        assert len(made) == 1 and seen == [f"pin {made[0]}"]
        for number in range(4):
            training.learn()
            saver.save(training.state, tmp_path / str(number))
            training.update()
        saver.wait()
    assert len(made) == 1 and seen[1:] == ["unpin"]


@pytest.mark.slow
def test_memory_that_cannot_be_pinned_serves_as_well(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "pin", lambda address, nbytes: False)
    state = states.every_kind(lab.kind, 2, large=300_001)
    expected = on_host(state)
    with holdfast.Saver(worker="thread") as saver:
        saver.save({"s": state}, tmp_path / "c").wait()
    assert differences(saved(tmp_path / "c", state), expected) == []


def test_a_refused_pin_leaves_no_error_behind(lab: Lab) -> None:
    memory = buffer(4 * MIB)
    assert staging.pin(memory.address, 4 * MIB)
    assert not staging.pin(memory.address, 4 * MIB), "it is pinned already"
    ones = torch.ones(1000, device=lab.kind).sum()
    lab.synchronize()
    assert ones == 1000
    staging.unpin(memory.address)


@pytest.mark.parametrize("how", ["blocking", "thread", "process"])
@pytest.mark.slow
def test_a_copy_is_queued_and_the_host_goes_on(how: str, lab: Lab) -> None:
    """So it is into pinned memory. Into other memory CUDA would hold the host up until it is done."""
    ones = torch.ones(buffers.CHUNK, dtype=torch.uint8, device=lab.kind)
    ones = ones if lab.fake is None else standin.pretended(ones)
    with Ring() as ring:
        slot = ring.take([64 * MIB], pinned=True)
        if how != "blocking":
            slot = buffers.StagingBuffer(1, start(how))
            slot.reserve(4 * buffers.CHUNK, pinned=True, touch=True)
        slot.begin()
        window = slot.take(buffers.CHUNK, 1.0)
        assert window is not None
        lab.late(2000)
        copier = staging.Copier(staging.Moments())
        copier.copy(ones, 0, buffers.CHUNK, window.address)
        moment = copier.moment()
        assert not moment.events[0][1].query(), "the host is here, and the device has not yet come to it"
        moment.wait()
        assert bytes(window.view) == b"\1" * buffers.CHUNK
        slot.give(window)
        if how != "blocking":
            slot.worker.close()
            slot.close()


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.slow
def test_in_waves_no_window_is_used_twice_at_a_time(limit: int, lab: Lab, tmp_path: Path) -> None:
    """A state of dozens of small windows goes through two: each is landed and written before it is filled again."""
    window = 8192
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "CHUNK", window)
        patch.setattr(pool, "StagingBuffer", partial(buffers.StagingBuffer, chunk_bytes=window))
        training = states.Training(states.OPTIMIZERS["AdamW foreach"], lab.kind, 3)
        training.run(2)
        with holdfast.Saver(worker="thread", memory_limit=limit * window) as saver:
            for number in range(3):
                training.learn()
                expected = training.copy()
                lab.late(20)
                saving = saver.save(training.state, tmp_path / str(number))
                training.update()
                assert differences(_flat(saving.wait()), expected) == []


@pytest.mark.parametrize("busy", ["wait", "skip"])
@pytest.mark.slow
def test_two_slots_take_two_saves_at_a_time(busy: str, lab: Lab, tmp_path: Path) -> None:
    training = states.Training(states.OPTIMIZERS["SGD"], lab.kind, 4)
    training.run(1)
    expected, savings = [], []
    with holdfast.Saver(worker="thread", slots=2, busy=busy) as saver:
        for number in range(5):
            training.learn()
            expected.append(training.copy())
            lab.late(30)
            savings.append(saver.save(training.state, tmp_path / str(number)))
            training.update()
        for saving, there in zip(savings, expected, strict=True):
            if not (busy == "skip" and saving.settled() is False and saving.skipped):
                assert differences(_flat(saving.wait()), there) == []
    assert sum(not saving.skipped for saving in savings) >= 2


@pytest.mark.parametrize("what", ["contiguous", "scattered", "incremental"])
@pytest.mark.slow
def test_a_save_takes_little_memory_of_the_device(what: str, lab: Lab, tmp_path: Path) -> None:
    """Ten saves: what they allocate beside the state, and what the allocator keeps of it, does not add up."""
    count = (16 if lab.fake is None else 1) * MIB
    large = [torch.randn(count, device=lab.kind).view(1024, -1) for _ in range(8)]
    if what == "scattered":
        large = [tensor.t() for tensor in large]
    small = [torch.randn(n + 1, device=lab.kind) for n in range(500)]
    model = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in [*large, *small]])
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    del large, small
    grown = lab.watch_memory()
    with holdfast.Saver(worker="thread") as saver:
        for number in range(10):
            base = tmp_path / str(number - 1) if what == "incremental" and number else None
            saver.save(state, tmp_path / str(number), base=base).wait()
            with torch.no_grad():
                model[-1].add_(1)
            if number > 1 and what != "incremental":
                shutil.rmtree(tmp_path / str(number - 2))
    allocated, kept = grown()
    assert allocated <= MOST and kept <= MOST + SEGMENTS
