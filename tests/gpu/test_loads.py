"""Loads into tensors of a device, whatever their layout, in the order of its streams; training goes on as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.inspect.statistics import statistics
from tests.gpu import states
from tests.gpu.lab import REAL, Lab
from tests.tearing import differences

MAKERS = {**states.OPTIMIZERS, **(states.CAPTURABLE if REAL else {})}


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same types, shapes and strides, filled with something else."""
    made = {}
    for name, tensor in tensors.items():
        plain = tensor.resolve_conj().resolve_neg()
        other = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
        if any(stride == 0 and n > 1 for stride, n in zip(plain.stride(), plain.shape, strict=True)):
            other = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        other.view(torch.uint8).fill_(99) if other.is_contiguous() and other.dim() else None
        made[name] = other
    return made


@pytest.mark.parametrize("how", ["load", "state_dict", "read"])
@pytest.mark.slow
def test_into_tensors_of_every_kind(how: str, lab: Lab, tmp_path: Path) -> None:
    there = states.every_kind("cpu", 3)
    holdfast.save({"s": there}, tmp_path / "c")
    here = empty_like({name: tensor.to(lab.kind) for name, tensor in there.items()})
    if how == "load":
        holdfast.load(tmp_path / "c", {"s": here})
    elif how == "state_dict":
        holdfast.open(tmp_path / "c").state_dict(into={"s": here})
    else:
        checkpoint = holdfast.open(tmp_path / "c")
        for name, tensor in here.items():
            checkpoint.read(f"s/{name}", into=tensor)
    assert differences({name: tensor.cpu() for name, tensor in here.items()}, there) == []


def test_casts(lab: Lab, tmp_path: Path) -> None:
    there = torch.randn(3000, 2000)
    holdfast.save({"t": there}, tmp_path / "c")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        here = torch.zeros(2000, 3000, dtype=dtype, device=lab.kind).t()
        holdfast.load(tmp_path / "c", {"t": here}, cast=True)
        assert torch.equal(here.cpu(), there.to(dtype))


@pytest.mark.slow
def test_boxes(lab: Lab, tmp_path: Path) -> None:
    there = states.noise((3000, 2000), torch.float32, "cpu", 1)
    holdfast.save({"t": there}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    for box in [(slice(5, 17),), (slice(0, 3000), slice(1999, 2000)), (slice(2990, 3000), slice(3, 1001))]:
        here = torch.zeros_like(there[box]).to(lab.kind)
        checkpoint.read("t", box, into=here)
        assert differences({"t": here.cpu()}, {"t": there[box].contiguous()}) == []


@pytest.mark.slow
def test_a_load_keeps_to_the_order_of_the_stream_that_called_it(lab: Lab, tmp_path: Path) -> None:
    """What was queued before comes before it, what is queued next comes after, whichever threads copy."""
    there = states.noise((5_000_001,), torch.int32, "cpu", 1)
    holdfast.save({"t": there}, tmp_path / "c")
    with lab.another_stream():
        here = torch.zeros(5_000_001, dtype=torch.int32, device=lab.kind)
        lab.busy(200)
        here.fill_(7)
        holdfast.load(tmp_path / "c", {"t": here})
        doubled = here * 2
    lab.synchronize()
    assert torch.equal(doubled.cpu(), there * 2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.fast_cases("fresh-AdamW")
def test_training_goes_on_bit_for_bit(name: str, stepped: bool, lab: Lab, tmp_path: Path) -> None:
    """Into optimizers that have state and into those that have none yet; with the device's random numbers."""
    whole = states.Training(MAKERS[name], lab.kind, 3)
    whole.run(4)
    holdfast.save(whole.state, tmp_path / "c")
    whole.run(3)
    resumed = states.Training(MAKERS[name], lab.kind, 9)
    resumed.run(2 if stepped else 0)
    state = resumed.state
    holdfast.load(tmp_path / "c", state)
    resumed.count = state["step"]
    resumed.run(3)
    assert differences(resumed.copy(), whole.copy()) == []
    where = {key: tensor.device for key, tensor in whole.tensors()}
    assert {key: tensor.device for key, tensor in resumed.tensors()} == where


@pytest.mark.slow
def test_the_device_s_random_numbers_come_back(lab: Lab, tmp_path: Path) -> None:
    state = {"rng": holdfast.RNG()}
    torch.randn(5, device=lab.kind)
    holdfast.save(state, tmp_path / "c")
    first = torch.randn(100, device=lab.kind).cpu()
    torch.randn(5, device=lab.kind)
    holdfast.load(tmp_path / "c", state)
    assert torch.equal(torch.randn(100, device=lab.kind).cpu(), first)


@pytest.mark.slow
def test_between_the_device_and_the_host(lab: Lab, tmp_path: Path) -> None:
    """Saved from one, loaded into the other; and a state of which a part lies on each, in one file."""
    near = {f"n{number}": states.noise((1000, 7), torch.float32, "cpu", number) for number in range(20)}
    far = {f"f{number}": states.noise((1000, 7), torch.float32, lab.kind, number + 50) for number in range(20)}
    mixed = {name: tensor for pair in zip(near.items(), far.items(), strict=True) for name, tensor in pair}
    with holdfast.Saver(worker="thread") as saver:
        lab.late(20)
        saver.save({"m": mixed}, tmp_path / "c").wait()
    there = {name: tensor.cpu() for name, tensor in mixed.items()}
    swapped = {n: torch.zeros_like(t, device="cpu" if n[0] == "f" else lab.kind) for n, t in mixed.items()}
    holdfast.load(tmp_path / "c", {"m": swapped})
    assert differences({name: tensor.cpu() for name, tensor in swapped.items()}, there) == []


@pytest.mark.slow
def test_an_optimizer_whose_state_is_offloaded(lab: Lab, tmp_path: Path) -> None:
    """Parameters on the device, moments in pinned memory of the host, brought over for each step."""
    training = states.Training(states.OPTIMIZERS["AdamW foreach"], lab.kind, 3)
    training.run(2)

    def move(kind: str) -> None:
        for kept in training.optimizer.state.values():
            for key, value in kept.items():
                if value.dim():
                    there = value.to(kind)
                    kept[key] = there.pin_memory() if kind == "cpu" and REAL else there

    move("cpu")
    with holdfast.Saver() as saver:
        for number in range(3):
            training.learn()
            there = training.copy()
            lab.late(30)
            saving = saver.save(training.state, tmp_path / str(number))
            saving.wait_staged()
            move(lab.kind)
            training.update()
            move("cpu")
            saving.wait()
    other = states.Training(states.OPTIMIZERS["AdamW foreach"], lab.kind, 4)
    holdfast.load(tmp_path / "2", other.state)
    assert differences(other.copy(), there) == []


@pytest.mark.parametrize("how", ["blocking", "thread", "process"])
@pytest.mark.slow
def test_a_default_device(how: str, lab: Lab, tmp_path: Path) -> None:
    """Of the user's: our own memory stays in the host."""
    torch.set_default_device(lab.kind)
    try:
        training = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 3)
        training.run(2)
        state: dict[str, Any] = {**training.state, "turned": torch.randn(30, 40).t(), "none": torch.empty(0, 3)}
        state["mine"] = holdfast.PerRank({"t": torch.randn(6)})
        if how == "blocking":
            holdfast.save(state, tmp_path / "c")
        else:
            with holdfast.Saver(worker=how) as saver:
                saver.prepare(state)
                saver.save(state, tmp_path / "c").wait()
        other = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 4)
        target = {**other.state, "turned": torch.zeros(30, 40).t(), "none": torch.empty(0, 3)}
        target["mine"] = holdfast.PerRank(None)
        holdfast.load(tmp_path / "c", target)
        assert differences(other.copy(), training.copy()) == []
        assert differences({"t": target["turned"].cpu()}, {"t": state["turned"].cpu()}) == []
        checkpoint = holdfast.open(tmp_path / "c")
        assert checkpoint.read("turned").device.type == "cpu"
        assert statistics(checkpoint, "turned", bins=5).count == 1200
    finally:
        torch.set_default_device(None)
