"""One law for every state: a fresh object that is loaded goes on as after torch's `load_state_dict`, or an error names
the leaf before anything is changed."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from tests.state.law import State, as_torch_does, assert_same, holds, train


def net(seed: int, *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def step(state: State, number: int) -> torch.Tensor:
    """One step of every optimizer of the state over the sum of all models' outputs."""
    models = [m for m in state.values() if isinstance(m, nn.Module)]
    optimizers = state["o"] if isinstance(state["o"], (list, tuple)) else [state["o"]]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = sum(m(torch.ones(2, 4) * (number + 1)).square().mean() for m in models)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()])


class Shared(torch.optim.Optimizer):
    """State under a key that is no parameter, as MADGRAD keeps it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        k = self.state.setdefault("k", torch.tensor([0]))
        more = self.state.setdefault("more", {"n": 0, "t": torch.zeros(2)})
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / float(k + 1) / (1 + more["n"]))
        k.add_(1)
        more["n"] += 1
        more["t"].add_(1)


class Nested(torch.optim.Optimizer):
    """State of every nest: lists, dicts with numbers as keys, tuples, None, a queue, a tensor laid out by columns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.0, 0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["by beta"] = {b: torch.zeros_like(p) for b in group["betas"]}
                    state["list"] = [torch.zeros(2), 1.5, None, [torch.ones(1)]]
                    state["pair"] = (torch.zeros(()), "text")
                    state["queue"] = deque([torch.zeros(1)], 3)
                    state["none"] = None
                    state["columns"] = torch.arange(6.0).reshape(2, 3).t()
                    state["empty"] = {}
                for b, buffer in state["by beta"].items():
                    p.sub_(buffer.mul_(b).add_(p.grad), alpha=group["lr"])
                state["list"][0].add_(1)
                state["queue"].append(state["queue"][-1] + 1)
                assert state["columns"].stride() == (1, 3) and isinstance(state["queue"], deque)
                assert type(state["pair"]) is tuple and state["none"] is None and state["empty"] == {}


class Settings(torch.optim.Optimizer):
    """Tensors among the settings of a group, made in a step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = group["d"] + torch.ones(2, 2) if isinstance(group["d"], torch.Tensor) else torch.ones(2, 2)
            group.setdefault("list", [torch.zeros(3)])[0].add_(1)
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["d"].mean())
                self.state[p]  # noqa: B018 - stepped, and nothing kept


class Wrapper:
    """A wrapper around an optimizer, with methods of its own, that calls parameters by number as torch does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.slow = {
            (i, j): p.detach().clone() for i, g in enumerate(inner.param_groups) for j, p in enumerate(g["params"])
        }

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for (i, j), slow in self.slow.items():
                p = self.param_groups[i]["params"][j]
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> State:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: State) -> None:
        self.inner.load_state_dict(state["inner"])
        for key, slow in self.slow.items():
            slow.zero_()
            slow.add_(state["slow"][key])  # a state dict that shared its memory would be all zeros now
        self.count = state["count"]


class Hooked(torch.optim.SGD):
    """Hooks of torch's own: what is saved is twice the momentum."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.register_state_dict_post_hook(self._scale(2.0))
        self.register_load_state_dict_pre_hook(self._scale(0.5))

    def _scale(self, by: float) -> Any:
        def hook(optimizer: Any, state: State) -> State:
            scaled = copy.deepcopy(state)
            for one in scaled["state"].values():
                one["momentum_buffer"] = one["momentum_buffer"] * by
            return scaled

        return hook


def one(kind: Any, **options: Any) -> Any:
    def make(seed: int) -> State:
        model = net(seed, 4, 3, 4)
        return {"m": model, "o": kind(model.parameters(), **options)}

    return make


OPTIMIZERS = {
    "shared keys": one(Shared),
    "nested": one(Nested),
    "settings": one(Settings),
    "hooks": one(Hooked),
    "wrapper": one(lambda p: Wrapper(torch.optim.Adam(p, lr=0.1))),
    "tensor lr": one(torch.optim.Adam, lr=torch.tensor(0.01)),
    "amsgrad": one(torch.optim.AdamW, amsgrad=True),
    "asgd": one(torch.optim.ASGD),
    "adafactor": one(torch.optim.Adafactor),
}


@pytest.mark.parametrize("saver", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, saver: bool, tmp_path: Path) -> None:
    holds(OPTIMIZERS[name], step, tmp_path, saver=saver)


def test_lbfgs(tmp_path: Path) -> None:
    def closed(state: State, number: int) -> Any:
        def closure() -> Any:
            state["o"].zero_grad()
            loss = state["m"](torch.ones(2, 4) * (number + 1)).square().mean()
            loss.backward()
            return loss

        state["o"].step(closure)
        return [p.detach() for p in state["m"].parameters()]

    holds(one(torch.optim.LBFGS, max_iter=3), closed, tmp_path)


def two_models(seed: int) -> State:
    a, b = net(seed, 4, 4), net(seed + 1, 4, 4)
    return {"a": a, "b": b, "o": [torch.optim.Adam(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.2)]}


def same_parameters(seed: int) -> State:
    model = net(seed, 4, 4)
    return {"m": model, "o": [torch.optim.Adam(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), 0.01)]}


def disjoint(seed: int) -> State:
    model = net(seed, 4, 3, 4)
    halves = [model[0].parameters(), model[1].parameters()]
    return {"m": model, "o": [torch.optim.Adam(halves[0], lr=0.1), torch.optim.AdamW(halves[1], lr=0.2)]}


@pytest.mark.parametrize("make", [two_models, same_parameters, disjoint])
def test_lists_of_optimizers(make: Any, tmp_path: Path) -> None:
    holds(make, step, tmp_path)


def test_optimizers_of_bare_tensors(tmp_path: Path) -> None:
    def make(seed: int) -> State:
        torch.manual_seed(seed)
        x, y = (nn.Parameter(torch.rand(3)) for _ in range(2))
        return {"x": x, "y": y, "o": [torch.optim.Adam([x], lr=0.1), torch.optim.Adam([y], lr=0.2)]}

    state = make(1)

    def one_step(state: State, number: int) -> Any:
        for optimizer in state["o"]:
            optimizer.zero_grad()
        (state["x"].square().sum() * state["y"].sum()).backward()
        for optimizer in state["o"]:
            optimizer.step()
        return [state["x"].detach(), state["y"].detach()]

    train(state, one_step, 0, 3)
    holdfast.save(state, tmp_path / "c")
    into = make(2)
    holdfast.load(tmp_path / "c", into)
    assert_same(train(into, one_step, 3, 10), train(state, one_step, 3, 10))
    assert "o/state/x/exp_avg" in holdfast.open(tmp_path / "c").tensors


def test_back_to_before_the_first_step(tmp_path: Path) -> None:
    state = one(torch.optim.Adam)(1)
    holdfast.save(state, tmp_path / "c")
    train(state, step, 0, 2)
    loaded = holdfast.load(tmp_path / "c", state)
    assert len(state["o"].state) == 0
    assert "o/state/0.weight/exp_avg" in loaded.cleared and not set(loaded.cleared) & set(loaded.restored)
    train(state, step, 0, 1)
    loaded = holdfast.load(tmp_path / "c", state, missing="keep")
    assert len(state["o"].state) == 4 and not loaded.cleared


def test_settings_that_were_not_saved_go_but_those_of_schedulers_stay(tmp_path: Path) -> None:
    state = one(torch.optim.SGD, lr=0.1)(1)
    holdfast.save(state, tmp_path / "c")
    group = state["o"].param_groups[0]
    group["step"] = 5
    torch.optim.lr_scheduler.OneCycleLR(state["o"], 1.0, total_steps=5, cycle_momentum=False)
    holdfast.load(tmp_path / "c", state)
    assert "step" not in group and {"initial_lr", "max_lr"} <= set(group) and group["lr"] == 0.1


class LoadHook(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())
        self.derive()

    def derive(self) -> None:
        self.packed = self.weight.detach().t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed + self.bias


class OwnLoad(nn.Linear):
    """Saves its weight transposed, and a number; takes both back."""

    scale = 1.0

    def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(into, prefix, keep_vars)
        into[prefix + "weight"] = into[prefix + "weight"].t()
        into[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.zero_()  # what shares its memory would be lost
        state[prefix + "weight"] = state[prefix + "weight"].t()
        self.scale = state.pop(prefix + "scale").item()
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Renaming(nn.Module):
    """Hooks that call its parameters by other names in a state dict."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(*sizes)
        self._register_state_dict_hook(self._out)
        self._register_load_state_dict_pre_hook(self._in)

    @staticmethod
    def _out(module: Any, state: Any, prefix: str, meta: Any) -> None:
        for key in ("weight", "bias"):
            state[f"{prefix}old_{key}"] = state.pop(f"{prefix}inner.{key}")

    @staticmethod
    def _in(state: Any, prefix: str, *args: Any) -> None:
        for key in ("weight", "bias"):
            state[f"{prefix}inner.{key}"] = state.pop(f"{prefix}old_{key}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Extra(nn.Linear):
    """Extra state that the weights are looked at for."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = torch.rand(2).tolist()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "t": torch.ones(len(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.sum = state["calls"], self.weight.sum().item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.calls[0] + getattr(self, "sum", self.weight.sum().item()) * 0


class Rebuilt(nn.Linear):
    """Its state dict is its own altogether, nested and with values."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"weights": [self.weight.detach(), self.bias.detach()], "note": {"n": 3}}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        assert state["note"] == {"n": 3}
        with torch.no_grad():
            for own, saved in zip((self.weight, self.bias), state["weights"], strict=True):
                own.zero_().add_(saved)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("kind", [LoadHook, OwnLoad, Renaming, Extra, nn.utils.parametrizations.spectral_norm, Rebuilt])
def test_modules_with_methods_of_their_own(kind: Any, inside: bool, tmp_path: Path) -> None:
    if inside and kind is Rebuilt:
        pytest.skip("torch calls an overridden load_state_dict of the outermost module alone")

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        layer = kind(nn.Linear(4, 4)) if not isinstance(kind, type) else kind(4, 4)
        if isinstance(layer, OwnLoad):
            layer.scale = float(seed)
        return {"m": nn.Sequential(nn.Linear(4, 4), layer) if inside else layer}

    def call(state: State, number: int) -> Any:
        return state["m"](torch.ones(1, 4) * (number + 1)).detach()

    state, into = make(1), make(2)
    holdfast.save(state, tmp_path / "c")
    loaded = holdfast.load(tmp_path / "c", into)
    assert_same(train(into, call, 0, 3), train(as_torch_does(make, state), call, 0, 3))
    assert not set(loaded.restored) & set(loaded.handed)


class Added(nn.Linear):
    """Adds entries to its state dict that nothing takes back: a number that is its attribute, and a sum."""

    scale = 1.0

    def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(into, prefix, keep_vars)
        into[prefix + "scale"] = torch.tensor(self.scale)
        into[prefix + "sum"] = self.bias.detach().sum() * 0 + len(self.__class__.__name__)


class Longer(Added):
    pass


def test_entries_that_nothing_takes_back(tmp_path: Path) -> None:
    saved, into = Added(2, 2), Added(2, 2)
    saved.scale = 7.0
    holdfast.save({"m": saved}, tmp_path / "c")
    loaded = holdfast.load(tmp_path / "c", {"m": into})
    assert into.scale == 7.0 and "m/scale" in loaded.restored and "m/sum" not in loaded.restored
    before = copy.deepcopy(other := Longer(2, 2))
    with pytest.raises(holdfast.errors.Mismatch, match="m/sum: saved with another value .* nothing takes it back"):
        holdfast.load(tmp_path / "c", {"m": other})
    assert torch.equal(before.weight, other.weight) and other.scale == 1.0


class Taking(nn.Linear):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return None


def test_nothing_is_named_that_did_not_arrive(tmp_path: Path) -> None:
    holdfast.save({"m": Taking(2, 2)}, tmp_path / "c")
    loaded = holdfast.load(tmp_path / "c", {"m": Taking(2, 2)})
    assert loaded.restored == [] and sorted(loaded.handed) == ["m/bias", "m/weight"]


class Chunk(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(2, 2)})
        self.scale = float(number)

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def test_modules_in_a_list_with_extra_state_are_kept_by_position(tmp_path: Path) -> None:
    holdfast.save({"m": [Chunk(1), Chunk(2)]}, tmp_path / "c")
    into = [Chunk(1), Chunk(2)]
    for chunk in into:
        chunk.scale = 0.0
    holdfast.load(tmp_path / "c", {"m": into})
    assert [chunk.scale for chunk in into] == [1.0, 2.0]


def test_two_leaves_never_share_a_name(tmp_path: Path) -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Parameter(torch.ones(2))

    model = Clash()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["k"] = torch.ones(1)
    with pytest.raises(holdfast.SaveFailed, match="the key 'k', which is no parameter"):
        holdfast.save({"m": model, "o": optimizer}, tmp_path / "c")
    a, b = net(1, 2, 2), net(2, 2, 2)
    both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    with pytest.raises(holdfast.SaveFailed, match=r"both called x\.y\.0\.weight"):
        holdfast.save({"x.y": a, "x": {"y": b}, "o": both}, tmp_path / "c")


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.tok.weight


def test_untied_into_tied(tmp_path: Path) -> None:
    untied, tied = Tied(False), Tied(True)
    holdfast.save({"m": untied}, tmp_path / "c")
    before = tied.tok.weight.clone()
    with pytest.raises(holdfast.errors.Mismatch, match=r"m/head.weight: saved as another tensor than m/tok.weight"):
        holdfast.load(tmp_path / "c", {"m": tied})
    assert torch.equal(tied.tok.weight, before)
    with torch.no_grad():
        untied.head.weight.copy_(untied.tok.weight)
    holdfast.save({"m": untied}, tmp_path / "d")
    holdfast.load(tmp_path / "d", {"m": tied})
    assert torch.equal(tied.tok.weight, untied.tok.weight)


def test_an_expanded_tensor_is_refused_by_name(tmp_path: Path) -> None:
    holdfast.save({"t": torch.ones(3, 2), "u": torch.ones(1)}, tmp_path / "c")
    u = torch.zeros(1)
    with pytest.raises(holdfast.errors.Mismatch, match="t: is an expanded tensor here"):
        holdfast.load(tmp_path / "c", {"t": torch.zeros(1, 2).expand(3, 2), "u": u})
    assert u.item() == 0


class Refusing:
    """Takes a part of its state before it refuses it, as objects of another version do."""

    def __init__(self, version: int) -> None:
        self.version, self.n = version, version

    def state_dict(self) -> State:
        return {"version": self.version, "n": self.n}

    def load_state_dict(self, state: State) -> None:
        self.n = state["n"]
        if state["version"] != self.version:
            raise ValueError("this state is of another version")


def test_an_object_that_refuses_its_state_leaves_all_as_it_was(tmp_path: Path) -> None:
    state = {**one(torch.optim.Adam)(1), "first": Refusing(1), "r": Refusing(1)}
    train(state, step, 0, 2)
    holdfast.save(state, tmp_path / "c")
    into = {**one(torch.optim.Adam)(2), "first": Refusing(1), "r": Refusing(2)}
    into["first"].n = 5
    before = copy.deepcopy(into["m"].state_dict())
    with pytest.raises(holdfast.errors.Mismatch, match="r refused what was saved of it .*another version"):
        holdfast.load(tmp_path / "c", into)
    assert_same(list(before.values()), list(into["m"].state_dict().values()))
    assert into["first"].n == 5 and into["r"].n == 2 and not into["o"].state


def test_a_hook_after_the_load_that_fails_is_named(tmp_path: Path) -> None:
    def fail(module: nn.Module, keys: Any) -> None:
        raise RuntimeError("no cache here")

    holdfast.save({"m": net(1, 3, 2)}, tmp_path / "c")
    into = {"m": net(2, 3, 2)}
    into["m"][0].register_load_state_dict_post_hook(fail)
    with pytest.raises(holdfast.errors.Mismatch, match="m/0: a hook that .* no cache here.* had been filled in"):
        holdfast.load(tmp_path / "c", into)


def test_modes_of_the_caller_do_not_reach_what_is_made(tmp_path: Path) -> None:
    class Holder:
        value: Any = None

        def state_dict(self) -> State:
            return {"t": self.value}

        def load_state_dict(self, state: State) -> None:
            self.value = state["t"]

    state = {**one(torch.optim.AdamW)(1), "h": Holder()}
    state["h"].value = torch.arange(4.0)
    train(state, step, 0, 1)
    holdfast.save(state, tmp_path / "c")
    for mode in (torch.inference_mode(), torch.device("meta"), torch.no_grad()):
        into = {**one(torch.optim.AdamW)(2), "h": Holder()}
        with mode:
            holdfast.load(tmp_path / "c", into)
        assert torch.equal(into["h"].value, torch.arange(4.0)) and not into["h"].value.is_inference()
        assert_same(train(into, step, 1, 2), train(copy.deepcopy(state), step, 1, 2))


def test_subclasses_with_new_insides_are_saved_as_they_are_now(tmp_path: Path) -> None:
    def made(a: float, b: float) -> TwoTensor:
        return TwoTensor(torch.full((3, 3), a), torch.full((3, 3), b))

    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(made(1.0, 2.0))
    state = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    with holdfast.Saver(worker="thread") as saver:
        saver.save(state, tmp_path / "1").wait()
        model.weight.a, model.weight.b = torch.full((3, 3), 5.0), torch.full((3, 3), 6.0)
        saver.save(state, tmp_path / "2").wait()
    saved = holdfast.open(tmp_path / "2")
    assert [saved.read(f"m/weight/{k}").mean().item() for k in "ab"] == [5, 6]


def test_a_subclass_in_optimizer_state_is_made_anew(tmp_path: Path) -> None:
    class Keeps(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["two"] = TwoTensor(torch.zeros_like(p), torch.ones_like(p))
                assert type(state["two"]) is TwoTensor
                state["two"].a.add_(p.grad)
                p.sub_(state["two"].a + state["two"].b, alpha=0.01)

    holds(one(Keeps), step, tmp_path)


def test_an_optimizer_that_has_no_step_is_not_trusted_to_hold_still(tmp_path: Path) -> None:
    class InBackward(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

    from holdfast.ranks.ranks import Ranks
    from holdfast.state import collect

    model = net(1, 2, 2)
    collected = collect({"m": model, "o": InBackward(model.parameters())}, Ranks(0, 1))
    assert not collected.changes.stable
    assert collect({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, Ranks(0, 1)).changes.stable


def test_a_tuple_of_values_and_tensors(tmp_path: Path) -> None:
    holdfast.save({"t": (torch.ones(2), 3, [4])}, tmp_path / "c")
    tensor, values = torch.zeros(2), [0]
    into: dict[str, Any] = {"t": (tensor, 0, values)}
    holdfast.load(tmp_path / "c", into)
    assert into["t"][0] is tensor and into["t"][1] == 3 and into["t"][2] is values and values == [4]
