"""Steps beside saves on a device: whoever changes what is being copied waits, or the save says that it is torn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.buffers import stable
from tests import tearing
from tests.gpu import states
from tests.gpu.lab import REAL, Lab, a_lab, needs_cuda, trials
from tests.tearing import differences

MAKERS = {**states.OPTIMIZERS, **(states.CAPTURABLE if REAL else {})}
"""Torch makes capturable optimizers for devices alone."""

SECONDS = 20.0 if REAL else 2.0
"""Of random training for each kind of trial."""


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.slow
def test_a_save_is_the_state_at_its_call_whatever_happens_next(worker: str, lab: Lab, tmp_path: Path) -> None:
    """Random optimizers, memory limits and moments; copies that are late, and a device that is far behind."""
    for number, draw in enumerate(trials(SECONDS, least=8, most=400)):
        kind, hold = draw.choice(list(tearing.OPTIMIZERS)), draw.choice(tearing.HOLDS)
        slots, limit = draw.randint(1, 3), draw.choice([None, 2 * tearing.WINDOW])
        when = [draw.choice(tearing.MOMENTS) for _ in range(draw.randint(1, 4))]
        delays: list[Callable[..., None]] = [lambda milliseconds: None, lab.late, lab.busy]
        delay = draw.choice(delays)
        with tearing.patched(hold=hold[0], small=hold[1]):
            found = tearing.run(
                tmp_path / str(number), kind, worker, slots, limit, when, device=lab.kind,
                delay=lambda delay=delay, ms=draw.choice([1, 10, 40]): delay(ms),
            )  # fmt: skip
        assert found == [], (number, kind, hold, slots, limit, when)
        shutil.rmtree(tmp_path / str(number))
    assert lab.copied


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.fast_cases("AdamW-")
def test_a_step_that_is_too_early_waits(name: str, scaled: bool, lab: Lab, tmp_path: Path) -> None:
    """Copies that come late; the step comes at once. Every optimizer of torch's in every way to step."""
    training = states.Training(MAKERS[name], lab.kind, 3, scaled=scaled)
    training.run(2)
    with holdfast.Saver(worker="thread") as saver:
        for number in range(3):
            training.learn()
            there = training.copy()
            lab.late(30)
            saving = saver.save(training.state, tmp_path / str(number))
            training.update()
            training.run(2)
            saving.wait()
            other = states.Training(MAKERS[name], lab.kind, 4, scaled=scaled)
            holdfast.load(tmp_path / str(number), other.state)
            assert differences(other.copy(), there) == []


def test_without_the_hook_these_tests_would_see_the_tear(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delays are long enough: a step that waits for nothing changes what is still to be copied."""
    monkeypatch.setattr(stable.Copying, "hold_step", lambda self: None)
    monkeypatch.setattr(stable, "check_still", lambda changed: None)
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 3)
    training.run(2)
    training.learn()
    with holdfast.Saver(worker="thread") as saver:
        saver.prepare(training.state)
        there = training.copy()
        lab.late(1000)
        saving = saver.save(training.state, tmp_path / "c")
        training.update()
        assert lab.under_way() or lab.fake is not None
        saving.wait()
    other = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 4)
    holdfast.load(tmp_path / "c", other.state)
    assert differences(other.copy(), there)


@pytest.mark.parametrize("first", ["nothing", "a step", "wait_staged", "a load"])
@pytest.mark.slow
def test_a_change_by_hand_is_seen_unless_something_waited(first: str, lab: Lab, tmp_path: Path) -> None:
    training = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 3)
    training.run(1)
    holdfast.save(training.state, tmp_path / "before")
    torch.ones(3, device=lab.kind).clamp_(-0.001, 0.001)  # loading a kernel may wait for others
    with holdfast.Saver(worker="thread") as saver:
        saver.prepare(training.state)
        training.learn()
        there = training.copy()
        lab.late(500)
        saving = saver.save(training.state, tmp_path / "c")
        if first == "a step":
            training.update()
        elif first == "wait_staged":
            saving.wait_staged()
        elif first == "a load":
            holdfast.load(tmp_path / "before", training.state)
        with torch.no_grad():
            training.model.up.weight.clamp_(-0.001, 0.001)
        if first == "nothing":
            with pytest.raises(holdfast.SaveFailed, match=r"model/up.weight changed while .*wait_staged"):
                saving.wait()
            there = training.copy()
            saver.save(training.state, tmp_path / "c").wait()  # no longer trusted: copied before the call returns
        else:
            saving.wait()
    other = states.Training(states.OPTIMIZERS["AdamW fused"], lab.kind, 4)
    holdfast.load(tmp_path / "c", other.state)
    assert differences(other.copy(), there) == []


@pytest.mark.slow
def test_buffers_and_averages_may_change_at_once(lab: Lab, tmp_path: Path) -> None:
    """More than is copied aside: staged on the device before anything else that the caller queues there."""
    averages = {f"w{i}": states.noise((1 << 20,), torch.float32, lab.kind, i) for i in range(24)}
    there = {name: tensor.cpu().clone() for name, tensor in averages.items()}
    with holdfast.Saver(worker="thread") as saver:
        lab.late(50)
        saving = saver.save({"ema": averages}, tmp_path / "c")
        for tensor in averages.values():
            tensor.zero_()
        checkpoint = saving.wait()
    assert differences({name: checkpoint.read(f"ema/{name}") for name in averages}, there) == []


@pytest.mark.slow
def test_a_scaled_run_goes_on_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    """GradScaler, autocast and dropout: scale, growth and the device's random numbers come back."""
    whole = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 3, scaled=True)
    whole.run(4)
    with holdfast.Saver(worker="thread") as saver:
        saver.save(whole.state, tmp_path / "c")
        whole.run(3)
    resumed = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 9, scaled=True)
    state = resumed.state
    holdfast.load(tmp_path / "c", state)
    resumed.count = state["step"]
    resumed.run(3)
    assert resumed.scaler is not None and whole.scaler is not None
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    assert differences(resumed.copy(), whole.copy()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.slow
def test_other_types_of_parameters(dtype: torch.dtype, lab: Lab, tmp_path: Path) -> None:
    training = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 3, dtype=dtype)
    training.run(2)
    with holdfast.Saver() as saver:
        training.learn()
        there = training.copy()
        lab.late(30)
        saving = saver.save(training.state, tmp_path / "c")
        training.update()
        saving.wait()
    other = states.Training(states.OPTIMIZERS["AdamW"], lab.kind, 4, dtype=dtype)
    holdfast.load(tmp_path / "c", other.state)
    assert differences(other.copy(), there) == []


class HalfMoments(torch.optim.Optimizer):
    """Moments in eight bits, as quantized optimizers keep them: a float8 tensor and a scale for each parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept["moment"] = torch.zeros_like(parameter).to(torch.float8_e4m3fn)
                    kept["scale"] = torch.ones((), device=parameter.device)
                moment = kept["moment"].float() * kept["scale"] * 0.9 + parameter.grad.float()
                kept["scale"].copy_(moment.abs().amax().clamp_min(1e-12) / 448)
                kept["moment"].copy_((moment / kept["scale"]).to(torch.float8_e4m3fn))
                parameter.add_(moment.to(parameter.dtype), alpha=-group["lr"])


@pytest.mark.slow
def test_moments_of_eight_bits(lab: Lab, tmp_path: Path) -> None:
    training = states.Training(HalfMoments, lab.kind, 3, dtype=torch.bfloat16)
    training.run(2)
    with holdfast.Saver(worker="thread") as saver:
        training.learn()
        there = training.copy()
        lab.late(30)
        saving = saver.save(training.state, tmp_path / "c")
        training.update()
        saving.wait()
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in there.values())
    other = states.Training(HalfMoments, lab.kind, 4, dtype=torch.bfloat16)
    holdfast.load(tmp_path / "c", other.state)
    assert differences(other.copy(), there) == []


# CUDA graphs


def graph_of(training: states.Training) -> Callable[[], None]:
    """A whole step of a training as a CUDA graph, once warmed up; the batch is the same each time."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        training.run(3)
    torch.cuda.current_stream().wait_stream(warm_up)
    training.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.learn()
        training.optimizer.step()
    return graph.replay


def replayed(training: states.Training, lab: Lab) -> Callable[[], None]:
    """A step that runs no hooks: a CUDA graph, or on the stand-in a step without them."""
    if lab.fake is None:
        return graph_of(training)
    hooks = training.optimizer._optimizer_step_pre_hooks
    training.run(3)

    def replay() -> None:
        kept = dict(hooks)
        hooks.clear()
        training.optimizer.zero_grad()
        training.learn()
        training.optimizer.step()
        hooks.update(kept)

    return replay


GRAPHED = states.CAPTURABLE["AdamW capturable"] if REAL else states.OPTIMIZERS["AdamW foreach"]


@pytest.mark.parametrize("captured", ["before the first save", "after a save"])
@pytest.mark.slow
def test_a_step_from_a_graph_after_a_wait(captured: str, lab: Lab, tmp_path: Path) -> None:
    """Replays run no hook, so `wait_staged` comes before them; and a capture has nothing to wait for."""
    training = states.Training(GRAPHED, lab.kind, 3)
    training.run(1)
    with holdfast.Saver(worker="thread") as saver:
        if captured == "after a save":
            saver.save(training.state, tmp_path / "first").wait()
        replay = replayed(training, lab)
        for number in range(3):
            replay()
            there = training.copy()
            lab.late(50)
            saving = saver.save(training.state, tmp_path / str(number))
            saving.wait_staged()
            replay()
            saving.wait()
            other = states.Training(GRAPHED, lab.kind, 4)
            holdfast.load(tmp_path / str(number), other.state)
            assert differences(other.copy(), there) == []
            assert differences(training.copy(), there), "the graph stepped"


@pytest.mark.slow
def test_a_graph_goes_on_over_tensors_that_were_loaded_into(lab: Lab, tmp_path: Path) -> None:
    """A load fills the tensors that a graph has captured, in place."""
    training = states.Training(GRAPHED, lab.kind, 3)
    training.run(1)
    replay = replayed(training, lab)
    holdfast.save(training.state, tmp_path / "c")
    there = training.copy()
    replay()
    after = training.copy()
    holdfast.load(tmp_path / "c", training.state)
    assert differences(training.copy(), there) == []
    replay()
    assert differences(training.copy(), after) == []


@needs_cuda
@pytest.mark.slow
def test_the_lab_s_delays_delay(lab: Lab) -> None:
    """Else all tests of late copies would pass for nothing."""
    still_stuck = lab.stuck()
    assert still_stuck()
    lab.synchronize()
    lab.late(500)
    assert lab.under_way()
    lab.synchronize()
    assert not lab.under_way()


@pytest.mark.slow
def test_a_lab_ends_what_it_began() -> None:
    with a_lab() as made:
        made.late()
    with a_lab() as made:
        assert not made.under_way() and not made.copied
