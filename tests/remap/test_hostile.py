"""Maps from anywhere: garbage, bombs and impossible rules are refused at once, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import Mismatch
from holdfast.remap import (
    Concatenate,
    Constant,
    Crop,
    Drop,
    Pad,
    PermuteBlocks,
    Remap,
    Rename,
    Split,
    Stack,
    Tie,
    Transpose,
    Unflatten,
    Unstack,
)  # fmt: skip
from tests.remap.models import HUB_TO_NATIVE, Hub, Native, translated
from tests.remap.test_loads import moments, same, trained


def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "{", b"\xff\xfe", "\ud800", "[" * 100_000, '{"version":1,"rules":' + "[" * 100_000,
        '{"version":1,"rules":[{"type":"transformers","architecture":"x","config":' + '{"a":' * 100_000,
        '{"version":1}', '{"version":2,"rules":[]}', '{"version":1,"rules":[{"type":"exec"}]}',
        '{"version":1,"rules":[{"type":"pad","name":"a","dim":1.5}]}',
        '{"version":1,"rules":[{"type":"split","source":"a","targets":[]}]}',
        '{"version":1,"rules":[{"type":"concatenate","sources":[],"target":"a"}]}',
        '{"version":1,"rules":[{"type":"rename","source":"a","target":"{b}"}]}',
    ],
)  # fmt: skip
def test_what_is_no_map(text: str | bytes) -> None:
    with pytest.raises(Mismatch):
        Remap.from_json(text)


@pytest.mark.parametrize(
    "size",
    [
        "9**9**9", "(" * 5000, "-" * 100_000 + "1", "1+" * 100_000 + "1", "9" * 150, "*".join(["9" * 40] * 4), "len",
        "__import__('os')", "a.b", "a[0]", "lambda: 0", "\0", "\ud800", " 1", "True", "1.5", "1//0", "2-5", "~1", 2**70,
    ],
)  # fmt: skip
def test_sizes_that_are_none(size: str | int) -> None:
    with pytest.raises(Mismatch) as error:
        Remap([Pad("a", 0, size)]).resolve({"a": of(4, 4)})
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "rules",
    [
        [rule for _ in range(40) for rule in (Tie("a", "b"), Concatenate(["a", "b"], "a"))],
        [rule for k in range(60) for rule in (Tie("a", "b"), Concatenate(["a", "b"], "a", dim=k % 2))],
        [rule for _ in range(5000) for rule in (PermuteBlocks("a", 0, (2, 2), (1, 0)), Transpose("a"))],
        [Pad("a", 0, after=2**50), Unstack("a", "a.{i}")], [Pad("a", 0, after=2**50, like=0)],
        [Pad("a", 0, after=2**59)], [Pad("a", 2**70)], [Unflatten("a", 0, (*[1] * 70, 4))], [Constant("c", (-1, 3))],
        [Constant("c", (2**59, 2**59))],
    ],
    ids=["flat", "nested", "deep", "unstack", "like", "long", "axis", "axes", "negative", "constant"],
)  # fmt: skip
@pytest.mark.slow_cases("flat")
def test_rules_that_would_take_all_memory(rules: list[holdfast.remap.Rule]) -> None:
    with pytest.raises(Mismatch):
        Remap(rules).resolve({"a": of(4, 4)})


@pytest.mark.parametrize(
    "pattern", ["{a}{b}{c}{d}{e}{f}!", "{*a}{*b}{*c}!", "{a}-{b}-{c}!", "{*a}{b}{b}!", "", "{", "{1}"]
)
def test_patterns_that_would_take_all_time(pattern: str) -> None:
    with pytest.raises(Mismatch):
        Drop(pattern)


def test_patterns_that_take_a_while_take_no_longer() -> None:
    names = {("x" * 90 + ".") * 10: of(2), "x" * 1000: of(2), "x" * 100_000: of(2)}
    for pattern in ("{*a}x{*b}!", "{*a}.{b}x{c}.{*d}!", "{a}x{b}.{*c}.{d}x{e}.{*f}!"):
        assert set(Remap([Drop(pattern)]).resolve(names)) == set(names)


def test_empty_tensors_and_single_numbers() -> None:
    rules = [Concatenate(["a", "b"], "c", sizes=(0, 0)), Transpose("c"), Unflatten("c", 0, (2, -1))]
    assert Remap(rules).check({"a": of(0, 4), "b": of(0, 4)}, {"c": of(2, 2, 0)}).is_exact
    stacked = Remap([Stack("n.{i}", "n")])
    assert stacked.check({"n.0": of(), "n.1": of()}, {"n": of(2)}).is_exact
    assert (stacked.inverse() @ stacked).check({"n.0": of(), "n.1": of()}, {"n.0": of(), "n.1": of()}).is_exact
    with pytest.raises(Mismatch, match="has no axis 0"):
        Remap([Transpose("a")]).resolve({"a": of()})
    with pytest.raises(Mismatch, match=r"b \(bfloat16 \[4\]\) cannot be concatenated"):
        Remap([Concatenate(["a", "b"], "c")]).resolve({"a": of(4), "b": of(4, dtype=torch.bfloat16)})
    assert Remap([Crop("a", 0, 1)]).check({"a": of(2**55)}, {"a": of(2**55 - 1)}).left_over == ("a[0:1]",)


@pytest.mark.parametrize("name", ["x[0:1]", "x/y", "..", "__metadata__", "\ud800"])
def test_names_that_no_state_has(name: str, tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises((Mismatch, holdfast.errors.Unsupported)):
        holdfast.open(tmp_path / "c", remap=Remap([Rename("w", name)]))


def test_escaped_names(tmp_path: Path) -> None:
    holdfast.save({"model": {"a/b": torch.arange(4.0)}}, tmp_path / "c")
    target = {"model": {"c/d": torch.zeros(2), "e": torch.zeros(2)}}
    holdfast.load(tmp_path / "c", target, remap=Remap([Split("a%2Fb", ["c%2Fd", "e"])]))
    assert target["model"]["c/d"].tolist() == [0, 1] and target["model"]["e"].tolist() == [2, 3]


def test_all_models_of_a_checkpoint_follow_the_map(tmp_path: Path) -> None:
    hub = Hub()
    state = {"model": hub, "ema": dict(hub.state_dict()), "app": {"model": hub}, "other": {"x": torch.arange(3)}}
    holdfast.save(state, tmp_path / "c")
    longer = Remap([*HUB_TO_NATIVE.rules, Constant("scale", (2,))], HUB_TO_NATIVE.values)
    checkpoint = holdfast.open(tmp_path / "c", remap=longer)
    assert [name for name in checkpoint.tensors if "scale" in name] == ["model/scale", "ema/scale", "app/model/scale"]
    assert torch.equal(checkpoint.read("other/x"), torch.arange(3))
    for section in ("model", "ema", "app/model"):
        made = {name: checkpoint.read(f"{section}/{name}") for name in translated(hub.state_dict())}
        assert same(made, translated(hub.state_dict()))


def test_several_optimizers_and_groups(tmp_path: Path) -> None:
    def optimizers(one: torch.nn.Module, two: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        groups = [[p for p in one.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
        adam = torch.optim.AdamW([{"params": groups[0], "lr": 0.5}, {"params": groups[1], "lr": 0.25}])
        return adam, torch.optim.SGD(two.parameters(), momentum=0.9)

    one, two = Hub(), Hub()
    adam, sgd = optimizers(one, two)
    for parameter in (*one.parameters(), *two.parameters()):
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    sgd.step()
    beside = {"rng": holdfast.RNG(), "loader": holdfast.PerRank({"at": 7})}
    holdfast.save({"a": one, "b": two, "adam": adam, "sgd": sgd, **beside}, tmp_path / "c")
    native, other = Native(), Native()
    theirs, plain = optimizers(native, other)
    for group in theirs.param_groups:
        group["lr"] = 0.0
    holdfast.load(
        tmp_path / "c", {"a": native, "b": other, "adam": theirs, "sgd": plain, **beside}, remap=HUB_TO_NATIVE
    )
    assert [group["lr"] for group in theirs.param_groups] == [0.5, 0.25]
    assert same(native.state_dict(), translated(one.state_dict()))
    wanted = translated(moments(two, sgd, "momentum_buffer"))
    assert same(moments(other, plain, "momentum_buffer"), {n: t for n, t in wanted.items() if n != "head.weight"})


def test_an_optimizer_under_integer_ids_does_not_follow(tmp_path: Path) -> None:
    hub, native = Hub(), Native()
    torch.save({"model": hub.state_dict(), "optimizer": trained(hub).state_dict()}, tmp_path / "c.pt")
    assert list(holdfast.open(tmp_path / "c.pt", remap=HUB_TO_NATIVE).left_out) == ["optimizer"]
    with pytest.raises(Mismatch, match="no model in the checkpoint has parameters of these names"):
        optimizer = torch.optim.AdamW(native.parameters())
        holdfast.load(tmp_path / "c.pt", {"model": native, "optimizer": optimizer}, remap=HUB_TO_NATIVE)
    with pytest.raises(Mismatch, match="no model in the checkpoint has parameters of these names"):
        holdfast.convert(tmp_path / "c.pt", tmp_path / "out", remap=HUB_TO_NATIVE)
    holdfast.load(tmp_path / "c.pt", {"model": native}, remap=HUB_TO_NATIVE)
    assert same(native.state_dict(), translated(hub.state_dict()))
    holdfast.convert(tmp_path / "c.pt", tmp_path / "out", only="model", remap=HUB_TO_NATIVE)
