"""Bare tensors hold still for the next step of the optimizers that own them, whichever these are by then."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import holdfast
import holdfast.dcp as dcp
from holdfast.buffers import stable
from holdfast.state import stepped
from tests import meshes, pool
from tests.buffers.test_stable import Gate
from tests.dcp import savers
from tests.marks import examples
from tests.owning import ACTS, Owning, cloned, run
from tests.tearing import WINDOW, differences, patched

LONG = 240.0
KINDS = [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad]
acts = st.lists(st.sampled_from(list(ACTS)), max_size=3)
limits = st.sampled_from([None, 2 * WINDOW])


@pytest.fixture(autouse=True)
def nobody_steps_yet() -> Iterator[None]:
    """Optimizers of other tests may be waiting for the garbage collector."""
    stepped._seen.clear()
    yield
    savers.close_all()


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(
    st.sampled_from(KINDS), st.sampled_from(["thread", "thread", "process"]), st.integers(1, 2), limits,
    st.lists(acts, min_size=1, max_size=4),
)  # fmt: skip
def test_a_save_of_bare_tensors_is_the_state_at_its_call(
    tmp_path_factory: pytest.TempPathFactory, kind: Any, worker: str, slots: int, limit: int | None,
    then: list[list[str]],
) -> None:  # fmt: skip
    with patched():
        assert run(tmp_path_factory.mktemp("bare"), kind, worker, slots, limit, then) == []


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(
    st.sampled_from(KINDS), st.sampled_from(["thread", "process"]), st.integers(1, 3), limits,
    st.tuples(st.integers(0, 30_000), st.integers(0, 3000)), st.lists(acts, min_size=1, max_size=6),
)  # fmt: skip
def test_a_save_of_bare_tensors_is_the_state_at_its_call_many_more_times(
    tmp_path_factory: pytest.TempPathFactory, kind: Any, worker: str, slots: int, limit: int | None,
    hold: tuple[int, int], then: list[list[str]],
) -> None:  # fmt: skip
    with patched(hold=hold[0], small=hold[1]):
        assert run(tmp_path_factory.mktemp("bare"), kind, worker, slots, limit, then) == []


@pytest.mark.parametrize("act", ["step", "step with closure", "replace", "hand over"])
def test_without_hook_and_guard_these_tests_see_the_tear(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stable.Copying, "hold_step", lambda self: None)
    monkeypatch.setattr(stable, "check_still", lambda changed: None)
    owning, gate = Owning(1, torch.optim.AdamW), Gate()
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        there = cloned(owning.state())
        saving = saver.save(owning.state(), tmp_path / "c")
        assert gate.reached.wait(LONG)
        ACTS[act](owning)
        gate.open.set()
        saving.wait()
    torn = differences(holdfast.open(tmp_path / "c").state_dict(), there)
    assert any("/parameters" in name for name in torn) and not any("/ema" in name for name in torn)


def on_ranks(layout: str, root: str, through: str) -> list[str]:
    """Model and optimizer state as torch's `get_state_dict` gives them, on real ranks, with an EMA beside them."""
    state = meshes.build(layout, 5, steps=2)
    model, optimizer = state["model"], state["optimizer"]
    ema = {name: tensor.clone() for name, tensor in get_model_state_dict(model).items()}
    expected, savings, told = [], [], []
    with patched(), holdfast.Saver(worker="thread", slots=2) as saver:
        for number in range(4):
            model(torch.randint(0, 11, (4, 5))).square().mean().backward()
            bare = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
            bare |= {"ema": ema}
            expected.append(_local(bare))
            if through == "dcp":
                savings.append(dcp.async_save(bare, checkpoint_id=f"{root}/{number}"))
            else:
                savings.append(saver.save(bare, f"{root}/{number}"))
                told.append(savings[-1].timing.bytes_in_call)
            for tensor in ema.values():
                tensor.add_(1)
            if number % 2 == 0:
                optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        for saving in savings:
            saving.result(LONG) if through == "dcp" else saving.wait()
    wrong = []
    parameters = sum(t.nbytes for t in _flat(expected[0]["model"]))
    if any(in_call > 2 * parameters for in_call in told):
        wrong.append(f"more than the EMA and the buffers was copied in the call: {told} of {parameters}")
    for number, there in enumerate(expected):
        into = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "ema": ema}
        dcp.load(into, checkpoint_id=f"{root}/{number}")
        wrong += differences(_local(into), there, f"{number}")
    savers.close_all()
    return wrong


def _local(node: Any) -> Any:
    """A copy, with the local parts of DTensors in their place."""
    if isinstance(node, dict):
        return {key: _local(value) for key, value in node.items()}
    return cloned(node.to_local() if isinstance(node, DTensor) else node)


def _flat(node: Any) -> list[torch.Tensor]:
    return [t for value in node.values() for t in _flat(value)] if isinstance(node, dict) else [node]


@pytest.mark.parametrize("layout", ["FSDP2 2", "TP 2", "DDP 2"])
@pytest.mark.parametrize("through", ["dcp", "Saver"])
@pytest.mark.fast_cases("dcp-FSDP2 2", "Saver-TP 2", "Saver-DDP 2")
def test_no_tear_of_what_get_state_dict_gives(layout: str, through: str, tmp_path: Path) -> None:
    assert pool.run(2, on_ranks, layout, str(tmp_path), through) == [[], []]


# What is copied when


def _trained(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.randn(3000))
    parameter.grad = torch.ones(3000)
    optimizer = kind([parameter], lr=0.1, **settings)
    optimizer.step()
    return parameter, optimizer


def _bytes_beside(state: Any, folder: Path) -> tuple[int, int]:
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, folder)
        saving.wait()
    return saving.timing.bytes_beside, saving.timing.bytes_in_call


def test_what_has_an_owner_is_copied_beside_training_and_the_rest_in_the_call(tmp_path: Path) -> None:
    parameter, optimizer = _trained()
    state = {"w": parameter.detach(), "kept": dict(optimizer.state[parameter]), "copy": parameter.detach().clone()}
    owned = 3 * parameter.nbytes + 4
    assert _bytes_beside(state, tmp_path / "c") == (owned, parameter.nbytes)
    with patched(hold=0, small=0):  # then it is staged in the call, and with it its whole section
        assert _bytes_beside({"a": state, "b": parameter.data}, tmp_path / "d") == (
            parameter.nbytes,
            owned + parameter.nbytes,
        )


def test_parameters_of_a_module_whose_optimizer_is_not_in_the_state(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert _bytes_beside({"m": model}, tmp_path / "a") == (0, 808)
    model(torch.randn(4, 50)).sum().backward()
    optimizer.step()
    assert _bytes_beside({"m": model}, tmp_path / "b") == (400, 408), "all but the buffers"


class Modal(torch.optim.SGD):
    """As those of schedulefree, it exchanges its parameters outside of a step."""

    def eval(self) -> None:
        self.param_groups[0]["params"][0].data.add_(1)


class InBackward(torch.optim.SGD):
    step = torch.optim.Optimizer.step


def test_an_optimizer_that_changes_parameters_in_other_ways_owns_nothing(tmp_path: Path) -> None:
    parameter, optimizer = _trained(Modal)
    assert _bytes_beside({"w": parameter.detach()}, tmp_path / "a")[0] == 0
    parameter, optimizer = _trained()
    stepped.note(optimizer, captured=True)  # its replays run no hook
    stepped.note(optimizer, captured=False)
    assert _bytes_beside({"w": parameter.detach()}, tmp_path / "b")[0] == 0


def test_memory_between_the_elements_of_a_parameter_is_not_its_own(tmp_path: Path) -> None:
    grid = torch.randn(30, 20)
    parameter = nn.Parameter(grid[:, 0])
    parameter.grad = torch.ones(30)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.step()
    assert _bytes_beside({"other": grid[:20, 1]}, tmp_path / "c")[0] == 0


def test_an_optimizer_that_is_gone_owns_nothing_and_is_not_kept(tmp_path: Path) -> None:
    parameter, optimizer = _trained()
    assert _bytes_beside({"w": parameter.detach()}, tmp_path / "a")[0] == parameter.nbytes
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    assert _bytes_beside({"w": parameter.detach()}, tmp_path / "b")[0] == 0


def test_one_that_cannot_be_hashed_trains_on_and_owns_nothing(tmp_path: Path) -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    parameter, optimizer = _trained(Equal)
    assert optimizer is not None and _bytes_beside({"w": parameter.detach()}, tmp_path / "c")[0] == 0


# Who waits


@pytest.mark.parametrize("owner", ["the same", "a new one", "one that has it too"])
def test_the_call_returns_before_the_copy_and_the_next_step_waits_for_it(owner: str, tmp_path: Path) -> None:
    parameter, optimizer = _trained()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2)), parameter], lr=1.0)
    there, gate, done = parameter.detach().clone(), Gate(nth=1), threading.Event()
    if owner == "one that has it too":
        other.step()
        there = parameter.detach().clone()
    steps = optimizer if owner == "the same" else other
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save({"w": parameter.detach()}, tmp_path / "c")
        assert gate.reached.wait(LONG)
        thread = threading.Thread(target=lambda: (steps.step(), done.set()))
        thread.start()
        assert not done.wait(0.1) and torch.equal(parameter.detach(), there)
        gate.open.set()
        assert done.wait(LONG)
        thread.join()
        saving.wait()
    assert torch.equal(holdfast.open(tmp_path / "c").read("w"), there)
    assert not torch.equal(parameter.detach(), there)


def test_a_step_over_other_memory_waits_for_nothing(tmp_path: Path) -> None:
    parameter, optimizer = _trained()
    other, its = _trained()
    gate = Gate(nth=1)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save({"w": parameter.detach()}, tmp_path / "c")
        assert gate.reached.wait(LONG)
        thread = threading.Thread(target=its.step)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive() and optimizer is not None
        gate.open.set()
        saving.wait()


@pytest.mark.parametrize("through", ["the tensor", "the parameter of a tensor.data", "a view", "NumPy"])
def test_a_change_by_hand_fails_the_save_by_name_and_the_next_one_copies_in_the_call(
    through: str, tmp_path: Path
) -> None:
    parameter, optimizer = _trained()
    bare = parameter.data if through == "the parameter of a tensor.data" else parameter.detach()
    gate = Gate(nth=2)
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        saving = saver.save({"w": bare}, tmp_path / "first")
        assert gate.reached.wait(LONG)
        with torch.no_grad():
            if through == "NumPy":
                parameter.detach().numpy()[:] *= 2
            else:
                {"the tensor": bare, "a view": parameter[5:9]}.get(through, parameter).mul_(2)
        gate.open.set()
        with pytest.raises(holdfast.SaveFailed, match=r"w changed while .*wait_staged"):
            saving.wait()
        assert not (tmp_path / "first").exists()
        there = bare.clone()
        saving = saver.save({"w": bare}, tmp_path / "second")
        bare.mul_(2)
        saving.wait()
    assert saving.timing.bytes_beside == 0 and optimizer is not None
    assert torch.equal(holdfast.open(tmp_path / "second").read("w"), there)


def changed_through_a_dtensor(root: str) -> list[str]:
    """torch does not count a change through a DTensor in its local part."""
    state, gate, said = meshes.build("FSDP2 2", 5, steps=2), Gate(nth=1), []
    weight = state["model"].head.weight
    with patched(copy=gate), holdfast.Saver(worker="thread") as saver:
        for number, tensor in enumerate([weight, weight.detach()]):
            saving = saver.save({"w": weight.detach(), "also": tensor}, f"{root}/{number}")
            assert gate.reached.wait(LONG)
            with torch.no_grad():
                (weight if number == 0 else tensor).zero_()
            gate.open.set()
            said.append(str(pytest.raises(holdfast.SaveFailed, saving.wait).value))
            saver._distrusted.clear()
            gate.open.clear(), gate.reached.clear()
    dist.barrier()
    return said


def test_a_change_through_a_dtensor_is_seen(tmp_path: Path) -> None:
    for said in pool.run(2, changed_through_a_dtensor, str(tmp_path)):
        assert all("changed while it was being copied" in text for text in said)


# async_save


def test_async_save_returns_before_the_copy_unless_its_stager_stages_at_once(tmp_path: Path) -> None:
    parameter, optimizer = _trained()
    there, gate = parameter.detach().clone(), Gate(nth=1)
    with patched(copy=gate):
        future = dcp.async_save({"m": {"w": parameter.detach()}}, checkpoint_id=tmp_path / "a")
        assert gate.reached.wait(LONG) and not future.done()
        gate.open.set()
        optimizer.step()
        future.result(LONG)
        assert torch.equal(holdfast.open(tmp_path / "a").read("m/w"), there)
        there = parameter.detach().clone()
        future = dcp.async_save(
            {"m": {"w": parameter.detach()}},
            checkpoint_id=tmp_path / "b",
            async_stager=dcp.staging.BlockingAsyncStager(),
        )
        parameter.data.zero_()  # which torch does not count
        future.result(LONG)
    assert torch.equal(holdfast.open(tmp_path / "b").read("m/w"), there)
