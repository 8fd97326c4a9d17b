"""What is remembered of a state must never differ from what a fresh walk finds, whatever was changed in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected, Recall, collect
from tests.marks import examples

State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def new_state() -> State:
    net = Net()
    groups = [{"params": list(net.first.parameters())}, {"params": list(net.last.parameters()), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    other = torch.optim.SGD(net.norm.parameters(), lr=0.1, momentum=0.9)
    return {"net": net, "optimizer": optimizer, "others": [other], "loose": torch.ones(3), "step": 0}


def step(state: State) -> None:
    state["net"](torch.randn(5, 4)).sum().backward()
    for optimizer in (state["optimizer"], *state["others"]):
        optimizer.step()
    state["step"] += 1


def replace_parameter(state: State) -> None:
    state["net"].last.weight = nn.Parameter(torch.randn(4, 6))


def swap_memory(state: State) -> None:
    state["net"].first.weight.data = torch.randn(6, 4)


def change_strides(state: State) -> None:
    weight = state["net"].last.weight
    weight.data = weight.data.t().contiguous().t()


def change_type(state: State) -> None:
    state["net"].half() if state["net"].first.weight.dtype == torch.float32 else state["net"].float()


def tie(state: State) -> None:
    state["net"].last.weight = state["net"].first.weight


def add_module(state: State) -> None:
    state["net"].add_module(f"more{len(list(state['net'].children()))}", nn.Linear(2, 2))


def replace_buffer(state: State) -> None:
    state["net"].norm.running_mean = torch.randn(6)


def drop_state(state: State) -> None:
    state["optimizer"].state.clear()


def replace_moment(state: State) -> None:
    for kept in list(state["optimizer"].state.values())[:1]:
        kept["exp_avg"] = torch.randn_like(kept["exp_avg"])


def keep_a_number(state: State) -> None:
    for kept in list(state["others"][0].state.values())[:1]:
        kept["seen"] = state["step"]


def add_group(state: State) -> None:
    net = state["net"]
    known = {id(p) for o in (state["optimizer"], *state["others"]) for g in o.param_groups for p in g["params"]}
    new = [p for p in net.parameters() if id(p) not in known]
    if new:
        state["optimizer"].add_param_group({"params": new, "lr": 0.01})


def change_rate(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] *= 0.5


def rename(state: State) -> None:
    state["model"] = state["net"]
    items = [(k, v) for k, v in state.items() if k not in ("net", "model")]
    net = state["net"]
    state.clear()
    state.update({"net": net, "second": net.norm, **dict(items)} if "second" not in dict(items) else {**dict(items)})
    state["net"] = net


def freeze(state: State) -> None:
    state["net"].first.bias.requires_grad_(not state["net"].first.bias.requires_grad)


CHANGES: list[Callable[[State], None]] = [
    step, replace_parameter, swap_memory, change_strides, change_type, tie, add_module, replace_buffer, drop_state,
    replace_moment, keep_a_number, add_group, change_rate, rename, freeze,
]  # fmt: skip


def looks(found: Collected | Exception) -> Any:
    """All that a save takes from a collected state, in a form that can be compared."""
    if isinstance(found, Exception):
        return str(found)
    entries = {
        name: (e.dtype, e.shape, e.spread, [(v.box, v.tensor.data_ptr(), v.tensor.stride()) for v in e.views])
        for name, e in found.entries.items()
    }
    changes = found.changes
    kept = (found.values, found.owned, found.containers, found.aliases, changes.plain, changes.buffers, changes.stable)
    return entries, kept, found.groups, changes.to_come, [id(o) for o in changes.optimizers]


def attempt(state: State, recall: Recall | None) -> Collected | Exception:
    try:
        return collect(state, Ranks(0, 1), recall=recall)
    except holdfast.HoldfastError as error:
        return error


@settings(max_examples=examples(150))
@given(st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), min_size=1, max_size=6))
def test_recalled_is_what_a_fresh_walk_finds(rounds: list[list[Callable[[State], None]]]) -> None:
    torch.manual_seed(0)
    state, recall = new_state(), Recall()
    for changes in rounds:
        for change in changes:
            try:
                change(state)
            except RuntimeError:
                continue  # torch itself cannot train what the changes before made
        assert looks(attempt(state, recall)) == looks(attempt(state, None))


def test_an_unchanged_state_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.state import modules, optimizers

    state, recall = new_state(), Recall()
    step(state)
    first = looks(attempt(state, recall))

    def never(*_: object) -> None:
        raise AssertionError("walked again")

    monkeypatch.setattr(modules, "module_state", never)
    monkeypatch.setattr(optimizers, "collect_optimizers", never)
    assert looks(attempt(state, recall)) == first
    step(state)  # in place: the same tensors
    again = collect(state, Ranks(0, 1), recall=recall)
    assert again.values["step"] == 2 and again.entries.keys() == first[0].keys()


def test_a_module_with_extra_state_is_always_asked() -> None:
    class Counts(nn.Linear):
        asked = 0

        def get_extra_state(self) -> int:
            self.asked += 1
            return self.asked

        def set_extra_state(self, state: int) -> None:
            self.asked = state

    net, recall = Counts(2, 2), Recall()
    counts = [collect({"net": net}, Ranks(0, 1), recall=recall).owned["net/_extra_state"] for _ in range(3)]
    assert counts == sorted(set(counts)), "each save has the value of its moment"


def test_memory_goes_with_the_module() -> None:
    state, recall = new_state(), Recall()
    step(state)
    collect(state, Ranks(0, 1), recall=recall)
    copied = copy.deepcopy(state)
    collect(copied, Ranks(0, 1), recall=recall)
    weight = weakref.ref(state["net"].first.weight)
    moments = weakref.ref(next(iter(state["optimizer"].state.values()))["exp_avg"])
    state.clear()
    gc.collect()
    assert weight() is None and moments() is None and len(recall._seen) == 3
