"""What a state may hold, in one process: every kind of leaf comes back as it was, or is refused by name."""

from __future__ import annotations

import collections
import enum
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.state import per_rank


def round_trip(state: dict[str, Any], into: dict[str, Any], path: Path) -> dict[str, Any]:
    holdfast.save(state, path)
    holdfast.load(path, into)
    return into


DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and not str(d).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (0, 4), (2, 0)], ids=str)
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        tensor.view(-1).view(torch.uint8).copy_(raw)
    target = torch.zeros(shape, dtype=torch.uint8).expand(shape).new_empty(0)
    target = torch.empty(shape, dtype=dtype)
    round_trip({"t": tensor}, {"t": target}, tmp_path / "c")
    assert target.dtype == dtype and target.shape == tensor.shape
    assert bytes(target.untyped_storage()) == bytes(tensor.untyped_storage())
    opened = holdfast.open(tmp_path / "c")
    assert opened.tensors["t"].dtype == dtype and opened.tensors["t"].shape == shape
    assert bytes(opened.read("t").untyped_storage())[:count] == bytes(tensor.untyped_storage())


def test_odd_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.arange(3.0).expand(5, 3),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(7),
    }
    into = {k: torch.zeros_like(v, memory_format=torch.contiguous_format) for k, v in state.items()}
    round_trip(state, into, tmp_path / "c")
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor.detach()), name


def test_into_scattered_memory_with_identity_kept(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    home = torch.zeros(12, 8)
    target = home[::2, 1::2]
    holdfast.save({"t": tensor}, tmp_path / "c")
    state = {"t": target}
    holdfast.load(tmp_path / "c", state)
    assert state["t"] is target and torch.equal(target, tensor)
    assert home.sum() == tensor.sum() or torch.isclose(home.sum(), tensor.sum())


def test_large_scattered_and_cast(tmp_path: Path) -> None:
    tensor = torch.randn(3000, 2000)  # 24 MB: several blocks and slabs
    holdfast.save({"t": tensor.t()}, tmp_path / "c")
    target = torch.zeros(3000, 2000)
    holdfast.load(tmp_path / "c", {"t": target.t()})
    assert torch.equal(target, tensor)
    half = torch.zeros(2000, 3000, dtype=torch.bfloat16)
    loaded = holdfast.load(tmp_path / "c", {"t": half}, cast=True)
    assert torch.equal(half, tensor.t().to(torch.bfloat16))
    assert loaded.cast == {"t": ("float32", "bfloat16")}


VALUES: dict[str, Any] = {
    "none": None, "true": True, "int": -3, "big": 1 << 80, "u64": (1 << 64) - 1, "float": 0.1, "nan": math.nan,
    "inf": math.inf, "minus": -math.inf, "zero": -0.0, "text": "żółw / % @ [ \n \x00 \U0001f41a", "bytes": b"\x00\xff",
    "complex": complex(math.inf, -0.5), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "size": torch.Size([2, 0]),
    "list": [1, [2, []], ()], "tuple": (1, ("a", None), [3]), "empty": {}, "nested": {"a": {"b": [{"c": 1}]}},
    "int keys": {0: "a", 7: {"x": 1}, -1: None}, "odd/key%with@[marks]": {".": 1, "..": 2, "": 3, "\t": 4},
}  # fmt: skip


def test_values(tmp_path: Path) -> None:
    into: dict[str, Any] = dict.fromkeys(VALUES)
    round_trip(dict(VALUES), into, tmp_path / "c")
    assert repr(into) == repr({k: into[k] for k in VALUES})
    for name, value in VALUES.items():
        assert repr(into[name]) == repr(value), name
    assert repr(holdfast.open(tmp_path / "c").values["tuple"]) == repr(VALUES["tuple"])


def test_odd_keys_hold_tensors(tmp_path: Path) -> None:
    names = ["a/b", "100%", "me@home", "x[0:1]", "..", ".", "tab\t", "nul\x00", "żółw", "0", " "]
    state = {"odd": {n: torch.full((2,), float(i)) for i, n in enumerate(names)}, "%2F": {"t": torch.ones(1)}}
    state["../up"] = {"t": torch.ones(3)}
    state[".."] = {"t": torch.ones(4)}
    into = {k: {n: torch.zeros_like(t) for n, t in d.items()} for k, d in state.items()}
    round_trip(state, into, tmp_path / "deep" / "c")
    for k, d in state.items():
        for n, t in d.items():
            assert torch.equal(into[k][n], t), (k, n)
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"c"}
    assert holdfast.open(tmp_path / "deep" / "c").state_dict().keys() == state.keys()


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 1, "code"),
        (print, "code"),
        (object(), "not kept"),
        (np.array([None]), "array of objects"),
        (np.longdouble(1), "no number that is exactly that"),
        ({print}, "code"),
        (Colour.RED, "plain int; store its .value"),
        (collections.namedtuple("Pair", "a b")(1, 2), "plain tuple; store tuple(it)"),
        (collections.UserDict(), "not kept"),
        (collections.defaultdict(lambda: 0), "executable"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (nn.UninitializedParameter(), "uninitialized"),
        ({(1, object()): 3}, "a key is a text, a number"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_refused_by_name(value: Any, says: str, tmp_path: Path) -> None:
    for state in ({"a": {"bad": [value]}}, {"a": {"bad": [value, torch.ones(1)]}}):
        with pytest.raises(holdfast.errors.Unsupported, match="a/bad/0") as caught:
            holdfast.save(state, tmp_path / "c")
        assert says in str(caught.value)
        assert isinstance(caught.value, (holdfast.SaveFailed, TypeError))
        assert not (tmp_path / "c").exists()


def test_a_state_is_a_dict(tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="dict of names"):
        holdfast.save([torch.ones(1)], tmp_path / "c")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", "manifest.json"])
def test_impossible_sections(key: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="rename"):
        holdfast.save({key: {"t": torch.ones(1)}}, tmp_path / "c")


def test_top_level_tensor_beside_section_state(tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="same key"):
        holdfast.save({"x": torch.ones(1), "state": {"x": torch.zeros(1)}}, tmp_path / "c")


class TwoTensors(torch.Tensor):
    """A subclass that keeps its value in two parts."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> TwoTensors:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        raise NotImplementedError(func)


class Opaque(torch.Tensor):
    """A subclass of which nothing is known."""


def test_subclass_that_flattens(tmp_path: Path) -> None:
    made = TwoTensors(torch.ones(3), torch.full((3,), 2.0))
    into = TwoTensors(torch.zeros(3), torch.zeros(3))
    round_trip({"q": {"w": made}}, {"q": {"w": into}}, tmp_path / "c")
    assert torch.equal(into.low, made.low) and torch.equal(into.high, made.high)
    assert set(holdfast.open(tmp_path / "c").tensors) == {"q/w/low", "q/w/high"}


def test_unknown_subclass(tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="a/x is a .*Opaque"):
        holdfast.save({"a": {"x": torch.ones(2).as_subclass(Opaque)}}, tmp_path / "c")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 16)
        self.head = nn.Linear(16, 500, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    checkpoint = holdfast.save({"model": model}, tmp_path / "c")
    assert checkpoint.manifest.aliases == {"model/head.weight": "model/embed.weight"}
    assert checkpoint.nbytes < 1.5 * model.embed.weight.nbytes
    holdfast.load(tmp_path / "c", {"model": other})
    assert torch.equal(other.embed.weight, model.embed.weight) and other.head.weight is other.embed.weight
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(500, 16))
    holdfast.load(tmp_path / "c", {"model": untied})
    assert torch.equal(untied.head.weight, model.embed.weight) and untied.head.weight is not untied.embed.weight
    state = checkpoint.state_dict()
    assert state["model"]["head.weight"] is state["model"]["embed.weight"]


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.scale = torch.zeros(2)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "scale": self.scale.clone()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.scale = state["calls"], state["scale"]


def test_extra_state_and_compiled_prefixes(tmp_path: Path) -> None:
    model = nn.Sequential(WithExtra())
    model[0].calls, model[0].scale = 5, torch.tensor([1.0, 2.0])
    compiled = torch.compile(model, backend="eager")
    checkpoint = holdfast.save({"model": compiled}, tmp_path / "c")
    assert "model/0.linear.weight" in checkpoint.tensors
    other = nn.Sequential(WithExtra())
    parameters = list(map(id, other.parameters()))
    holdfast.load(tmp_path / "c", {"model": other})
    assert other[0].calls == 5 and torch.equal(other[0].scale, model[0].scale)
    assert list(map(id, other.parameters())) == parameters


class Counter:
    """Stateful in torch's sense."""

    def __init__(self, count: int) -> None:
        self.state = {"count": count, "history": [1, (2, torch.arange(count))], 5: "five"}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_stateful_objects_take_their_state_whole(tmp_path: Path) -> None:
    into = Counter(1)
    holdfast.save({"c": Counter(4), "ordered": OrderedDict(a=1)}, tmp_path / "c")
    state = {"c": into, "ordered": {}}
    holdfast.load(tmp_path / "c", state)
    assert into.state["count"] == 4 and into.state["history"][1][0] == 2 and into.state[5] == "five"
    assert torch.equal(into.state["history"][1][1], torch.arange(4)) and state["ordered"] == {"a": 1}


def test_rng(tmp_path: Path) -> None:
    import random

    state = {"rng": holdfast.RNG()}
    torch.manual_seed(3), random.seed(4), np.random.seed(5)
    torch.rand(3), random.gauss(0, 1), np.random.standard_normal()
    holdfast.save(state, tmp_path / "c")

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]

    first = draw()
    draw()
    holdfast.load(tmp_path / "c", state)
    assert draw() == first


def test_rng_of_devices_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask CUDA for a generator sets up a context, which a run on the CPU must not pay for: it is only set."""

    class Cuda:
        used = False
        states = (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8))

        def is_initialized(self) -> bool:
            return self.used

        def device_count(self) -> int:
            return 2

        def get_rng_state(self, index: int) -> torch.Tensor:
            assert self.used
            return self.states[index]

        def set_rng_state(self, state: torch.Tensor, index: int) -> None:
            found[index] = state.tolist()

    cuda, found = Cuda(), {}
    monkeypatch.setattr(per_rank, "_accelerator", lambda: cuda)
    assert "devices" not in holdfast.RNG().state_dict()
    cuda.used = True
    kept = holdfast.RNG().state_dict()
    cuda.used = False
    holdfast.RNG().load_state_dict(kept)
    assert found == {0: [1, 2], 1: [3, 4]}


def test_per_rank_alone(tmp_path: Path) -> None:
    value = {"a": [1, (2, None)], "t": torch.arange(5.0).to(torch.complex128), "z": torch.tensor(3 + 1j), 4: b"x"}
    into = holdfast.PerRank(None)
    holdfast.save({"deep": {"p": holdfast.PerRank(value)}, "top": holdfast.PerRank(7)}, tmp_path / "c")
    state = {"deep": {"p": into}, "top": holdfast.PerRank(0)}
    holdfast.load(tmp_path / "c", state)
    assert state["top"].value == 7
    assert into.value["a"] == [1, (2, None)] and into.value[4] == b"x"
    assert torch.equal(into.value["t"], value["t"]) and torch.equal(into.value["z"], value["z"])
    assert into.value["z"].shape == ()


def test_attachments(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1")
    state = {"x": torch.ones(1)}
    checkpoint = holdfast.save(
        state, tmp_path / "c", files={"config.yaml": tmp_path / "config.yaml", "tok/merges.txt": b"a b"}
    )
    assert checkpoint.attachments == {"config.yaml": 5, "tok/merges.txt": 3}
    assert checkpoint.attachment("config.yaml") == b"lr: 1"
    with pytest.raises(KeyError, match="no attachment"):
        checkpoint.attachment("nope")
    again = holdfast.save(state, tmp_path / "c", files={"config.yaml": b"lr: 2"}, overwrite=True)
    assert again.attachment("config.yaml") == b"lr: 2" and list(again.attachments) == ["config.yaml"]
    assert not list((tmp_path / "c").rglob("merges.txt"))
    for bad in ("../up", "/abs", "a/../b", ""):
        with pytest.raises(holdfast.errors.Unsupported, match="attachment"):
            holdfast.save(state, tmp_path / "d", files={bad: b""})
    with pytest.raises(holdfast.errors.StorageError, match="missing.txt"):
        holdfast.save(state, tmp_path / "d", files={"a": tmp_path / "missing.txt"})


def test_explicit_shard_is_checked() -> None:
    with pytest.raises(ValueError, match="does not lie"):
        holdfast.Shard(torch.ones(3), (4,), (2,))


def test_integer_keys_never_collide_with_texts(tmp_path: Path) -> None:
    state = {"x": {1: "a", "1": "b"}, "y": {1: torch.ones(2), "1": torch.zeros(2)}}
    holdfast.save(state, tmp_path / "c")
    found = holdfast.open(tmp_path / "c").state_dict()
    assert found["x"] == state["x"] and torch.equal(found["y"][1], torch.ones(2)) and list(found["y"]) == [1, "1"]
    assert list(holdfast.open(tmp_path / "c").tensors) == ["y/1~", "y/1"]
    with pytest.raises(holdfast.errors.Unsupported, match="keys are strings"):
        holdfast.save({1: {"a": 2}}, tmp_path / "c")  # type: ignore[dict-item]


def test_a_value_of_each_rank_without_plain_bytes_is_refused_by_name(tmp_path: Path) -> None:
    bad = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(holdfast.errors.Unsupported, match=r"a/in/1: it is quantized \(torch.qint8\); save int_repr"):
        holdfast.save({"a": holdfast.PerRank({"in": [1, bad]})}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
