"""No torn snapshots: training changes everything at every moment that it may, while a save copies slowly."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.buffers import stable
from holdfast.ondisk import dtypes
from tests import meshes, pool
from tests.marks import examples
from tests.tearing import (
    HOLDS,
    MOMENTS,
    OPTIMIZERS,
    SLOW,
    WINDOW,
    build,
    differences,
    patched,
    run,
    snapshot,
    step,
    train,
    what_was_saved,
)

LONG = 240.0
moments = st.sampled_from(MOMENTS)
limits = st.sampled_from([None, 2 * WINDOW])
holds = st.sampled_from(HOLDS)


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(
    st.sampled_from(list(OPTIMIZERS)), st.sampled_from(["thread", "thread", "process"]), st.integers(1, 2), limits,
    holds, st.lists(moments, min_size=1, max_size=3),
)  # fmt: skip
def test_a_save_is_the_state_at_its_call_whatever_happens_next(
    tmp_path_factory: pytest.TempPathFactory, kind: str, worker: str, slots: int, limit: int | None,
    hold: tuple[int, int], when: list[str],
) -> None:  # fmt: skip
    with patched(hold=hold[0], small=hold[1]):
        assert run(tmp_path_factory.mktemp("torn"), kind, worker, slots, limit, when) == []


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(
    st.sampled_from(list(OPTIMIZERS)), st.sampled_from(["thread", "process"]), st.integers(1, 3), limits,
    st.tuples(st.integers(0, 30_000), st.integers(0, 3000)), st.lists(moments, min_size=1, max_size=6),
)  # fmt: skip
def test_a_save_is_the_state_at_its_call_many_more_times(
    tmp_path_factory: pytest.TempPathFactory, kind: str, worker: str, slots: int, limit: int | None,
    hold: tuple[int, int], when: list[str],
) -> None:  # fmt: skip
    with patched(hold=hold[0], small=hold[1]):
        assert run(tmp_path_factory.mktemp("torn"), kind, worker, slots, limit, when) == []


def on_ranks(layout: str, root: str, worker: str, hold: int) -> list[str]:
    """The same on real ranks, with a model that is sharded or replicated; torch gathers what was there."""
    state = {**meshes.build(layout, 5, steps=2), "bare": torch.arange(50.0), "step": 0}
    mine = holdfast.PerRank(torch.full((3,), float(dist.get_rank())))
    expected, savings = [], []
    with patched(hold=hold, small=hold), holdfast.Saver(worker=worker, slots=2) as saver:
        for number in range(4):
            state["model"](torch.randint(0, 11, (4, 5))).square().mean().backward()
            expected.append((meshes.gathered(state), state["bare"].clone(), mine.value.clone(), number))
            state["step"] = number
            savings.append(saver.save({**state, "mine": mine}, Path(root, str(number))))
            state["bare"].add_(1)
            mine.value.add_(7)
            with torch.no_grad():
                for buffer in state["model"].buffers():
                    buffer.add_(1)
            state["optimizer"].step()
            if number % 2:
                state["optimizer"].step()
    wrong = []
    for saving, (full, bare, own, number) in zip(savings, expected, strict=True):
        target = {**meshes.build(layout, 6, steps=1), "bare": torch.zeros(50), "step": -1}
        theirs = holdfast.PerRank(None)
        holdfast.load(saving.path, {**target, "mine": theirs}, only=["model", "optimizer", "bare", "mine"])
        wrong += differences(meshes.gathered(target), full, f"{number}")
        wrong += differences([target["bare"], theirs.value], [bare, own], f"{number}/beside")
    return wrong


@pytest.mark.parametrize(("layout", "worker"), [("FSDP2 2", "thread"), ("DDP 2", "process"), ("FSDP1 2", "thread")])
@pytest.mark.parametrize("hold", [0, 1 << 20], ids=["staged at once", "copied aside"])
@pytest.mark.fast_cases("staged at once-FSDP1 2-thread")
def test_no_tear_on_two_ranks(layout: str, worker: str, hold: int, tmp_path: Path) -> None:
    assert pool.run(2, on_ranks, layout, str(tmp_path), worker, hold) == [[], []]


# Would these tests see a tear?


class Gate:
    """Copies that stop before the n-th until they may go on."""

    def __init__(self, nth: int = 2) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._count, self._nth = 0, nth

    def __call__(self, *args: Any) -> None:
        self._count += 1
        if self._count >= self._nth:
            self.reached.set()
            assert self.open.wait(LONG)
        SLOW(*args)


def test_without_the_hook_a_step_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable.Copying, "hold_step", lambda self: None)
    state, gate = build("AdamW", 1), Gate()
    train(state)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "c")
        assert gate.reached.wait(LONG)
        step(state)
        gate.open.set()
        with pytest.raises(holdfast.SaveFailed, match="changed while it was being copied"):
            saving.wait()
    assert not (tmp_path / "c").exists()


def test_without_hook_and_guard_these_tests_see_the_tear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable.Copying, "hold_step", lambda self: None)
    monkeypatch.setattr(stable, "check_still", lambda changed: None)
    state, gate = build("AdamW", 1), Gate(nth=8)
    train(state)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "c")
        assert gate.reached.wait(LONG)
        step(state)
        gate.open.set()
        saving.wait()
    assert any("net/" in name for name in differences(what_was_saved(tmp_path / "c", "AdamW"), there))


def test_with_the_hook_a_step_waits(tmp_path: Path) -> None:
    state, gate, stepped = build("AdamW", 1), Gate(), threading.Event()
    train(state)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "c")
        thread = threading.Thread(target=lambda: (step(state), stepped.set()))
        thread.start()
        assert gate.reached.wait(LONG) and not stepped.wait(0.1)
        gate.open.set()
        assert stepped.wait(LONG)
        thread.join()
        saving.wait()
    assert saving.timing.stall > 0.05, "and the time that it waited is told"
    assert differences(what_was_saved(tmp_path / "c", "AdamW"), there) == []


# What nothing but a step may change


def test_a_change_by_hand_fails_the_save_and_the_next_one_copies_before_it_returns(tmp_path: Path) -> None:
    state, gate = build("SGD", 1), Gate()
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "first")
        assert gate.reached.wait(LONG)
        with torch.no_grad():
            state["net"].wide.weight.clamp_(-0.01, 0.01)
        gate.open.set()
        with pytest.raises(holdfast.SaveFailed, match=r"net/wide.weight changed while .*wait_staged"):
            saving.wait()
        assert not (tmp_path / "first").exists()

        gate.open.clear()
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "second")
        assert gate.reached.wait(LONG)
        with torch.no_grad():
            state["net"].wide.weight.mul_(2)
        gate.open.set()
        saving.wait()
    assert differences(what_was_saved(tmp_path / "second", "SGD"), there) == []


def test_several_changes_by_hand_are_counted(tmp_path: Path) -> None:
    state, gate = build("SGD", 1), Gate()
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "c")
        state["net"].load_state_dict(build("SGD", 2)["net"].state_dict())
        gate.open.set()
        with pytest.raises(holdfast.SaveFailed, match="net/embed.weight and 7 more changed"):
            saving.wait()


def test_once_staged_a_change_by_hand_is_legal(tmp_path: Path) -> None:
    state = build("AdamW", 1)
    train(state)
    step(state)
    with patched(), holdfast.Saver(worker="thread") as saver:
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "c")
        saving.wait_staged()
        with torch.no_grad():
            for parameter in state["net"].parameters():
                parameter.zero_()
            for kept in state["optimizer"].state.values():
                kept["exp_avg"].zero_()
        saving.wait()
    assert differences(what_was_saved(tmp_path / "c", "AdamW"), there) == []


def test_wait_staged_gives_up_in_time(tmp_path: Path) -> None:
    state, gate = build("SGD", 1), Gate()
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "c")
        for wait in (saving.wait_staged, saving.wait):
            with pytest.raises(TimeoutError, match="after 0.05 s"):
                wait(0.05)
        gate.open.set()
        saving.wait_staged(LONG)
        saving.wait(LONG)


def test_a_load_waits_for_a_save_that_still_copies(tmp_path: Path) -> None:
    state, gate = build("AdamW", 1), Gate()
    train(state)
    step(state)
    holdfast.save(state, tmp_path / "old")
    old = snapshot(state)
    train(state)
    step(state)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "new")
        threading.Timer(0.3, gate.open.set).start()
        holdfast.load(tmp_path / "old", state)
        assert gate.open.is_set(), "a load has changed tensors that were still being copied"
        saving.wait()
    assert differences(snapshot(state), old) == []
    assert differences(what_was_saved(tmp_path / "new", "AdamW"), there) == []


def test_a_failed_save_holds_nobody(tmp_path: Path) -> None:
    state = build("AdamW", 1)
    train(state)
    (tmp_path / "file").touch()
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "file")
        step(state)
        saving.wait_staged(LONG)
        holdfast.save(state, tmp_path / "c")
        holdfast.load(tmp_path / "c", state)
        with pytest.raises(holdfast.SaveFailed, match="is a file"):
            saving.wait(LONG)


@pytest.mark.slow
def test_a_compiled_step_waits_too(tmp_path: Path) -> None:
    state = build("AdamW", 1)
    train(state)
    step(state)
    compiled = torch.compile(lambda: state["optimizer"].step(), backend="eager")
    with patched(), holdfast.Saver(worker="thread") as saver:
        for number in range(3):
            there = snapshot(state)
            saving = saver.save(state, tmp_path / str(number))
            compiled()
            saving.wait()
            assert differences(what_was_saved(saving.path, "AdamW"), there) == []


def test_every_dtype_is_copied_aside(tmp_path: Path) -> None:
    state = {}
    for name, dtype in dtypes._BY_NAME.items():
        memory = torch.arange(64, dtype=torch.uint8) % 2
        try:
            state[name] = memory.view(dtype)
        except RuntimeError:
            continue
    state["conj"] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    state["neg"] = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    state["expanded"] = torch.tensor([1.0]).expand(3)
    holdfast.save({"t": state}, tmp_path / "blocking")
    with holdfast.Saver(worker="thread") as saver:
        saver.save({"t": state}, tmp_path / "background").wait()
    one, two = (holdfast.open(tmp_path / name) for name in ("blocking", "background"))
    assert list(one.tensors) == list(two.tensors) and len(one.tensors) > 25
    files = [next((tmp_path / name / "t").iterdir()).read_bytes() for name in ("blocking", "background")]
    assert len({data[8 + int.from_bytes(data[:8], "little") :] for data in files}) == 1


# A step with a closure, which runs forward and backward


def test_a_step_with_a_closure_waits_when_that_has_run(tmp_path: Path) -> None:
    state, gate, ran, stepped = build("AdamW", 1), Gate(), threading.Event(), threading.Event()
    train(state)

    def closure() -> None:
        train(state)
        ran.set()

    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        there = snapshot(state)
        saving = saver.save(state, tmp_path / "c")
        assert gate.reached.wait(LONG)
        thread = threading.Thread(target=lambda: (state["optimizer"].step(closure=closure), stepped.set()))
        thread.start()
        assert ran.wait(LONG), "forward and backward ran while it was being copied"
        assert not stepped.wait(0.1)
        gate.open.set()
        assert stepped.wait(LONG)
        thread.join()
        saving.wait()
    assert differences(what_was_saved(tmp_path / "c", "AdamW"), there) == []


TORCHS = [
    found
    for name in dir(torch.optim)
    for found in [getattr(torch.optim, name)]
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", TORCHS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("positional", [False, True])
def test_torchs_optimizers_change_nothing_before_their_closure_has_run(kind: Any, positional: bool) -> None:
    weights, told = nn.Parameter(torch.ones(2, 2)), []
    optimizer = kind([weights])

    def tensors() -> list[torch.Tensor]:
        return [weights, *(v for kept in optimizer.state.values() for v in kept.values() if torch.is_tensor(v))]

    def closure() -> torch.Tensor:
        gradient = 2 * weights.detach()
        weights.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        told.append("ran")
        return weights.square().sum()

    def hold() -> None:
        told.append(stable.changed(before))

    optimizer.register_step_pre_hook(partial(stable.before_change, hold=hold))
    for number in range(2):
        before = stable.watch((str(i), tensor) for i, tensor in enumerate(tensors()))
        optimizer.step(closure) if positional else optimizer.step(closure=closure)
        assert told[:2] == ["ran", []]
        assert number or stable.changed(before)
        told.clear()


class Hasty(torch.optim.SGD):
    """Changes its parameters before it calls its closure."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        closure()


def test_others_wait_before_they_begin() -> None:
    weights = nn.Parameter(torch.ones(2))
    optimizer, told = Hasty([weights]), []
    optimizer.register_step_pre_hook(partial(stable.before_change, hold=lambda: told.append(weights.tolist())))
    optimizer.step(lambda: told.append("ran"))
    assert told == [[1.0, 1.0], "ran"]
