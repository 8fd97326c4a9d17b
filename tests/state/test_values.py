"""Values of a state: they come back in their types and their order, in place, and whatever their number."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.commit.job import Job
from holdfast.ondisk import containers, packing, part, values
from holdfast.ranks.ranks import Ranks
from holdfast.save import save_in
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.urls import location
from tests import format_reader
from tests.marks import examples
from tests.ondisk.test_values import plain, same

LONG = packing.LONG


class Holder:
    """An object with a state of its own: what it is given is what was saved, and not filled in place."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def version(path: Path) -> int:
    found: int = format_reader.read_manifest(path / "manifest.json")["version"]
    return found


def through(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """A state as it comes back into one that has nothing at its keys."""
    holdfast.save(state, path)
    target: dict[str, Any] = dict.fromkeys(state)
    holdfast.load(path, target)
    return target


# Types and order, whatever they are


single = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(width=16), st.text(max_size=3))
keys = st.recursive(
    st.one_of(
        single,
        st.integers(),
        st.binary(max_size=2),
        st.sampled_from(["1", "-1", "None", "1~", "a/b", "$", "", 1j, torch.uint8]),
    ),
    lambda x: st.lists(x, max_size=2).map(tuple),
    max_leaves=3,
)
arrays = st.one_of(
    st.lists(st.integers(0, 255), max_size=4).map(lambda x: np.array(x, "u1")),
    st.sampled_from(["<f4", ">i8", "<U3", "|S2", "<c8", "<M8[ns]", "|b1", "<f2"]).map(lambda t: np.zeros((2, 1), t)),
    st.just(np.array(2.5)), st.just(np.empty((0, 3))), st.just(np.arange(6).reshape(2, 3).T),
)  # fmt: skip
closed = st.one_of(
    st.sets(keys, max_size=3), st.frozensets(keys, max_size=3), st.binary(max_size=3).map(bytearray), arrays,
    st.frozensets(st.frozensets(st.integers(0, 3)), max_size=2),
)  # fmt: skip


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        items, items.map(tuple), st.builds(deque, items), items.map(lambda x: deque(x, len(x) + 1)), pairs,
        pairs.map(OrderedDict), st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.builds(defaultdict, st.sampled_from([None, *containers.FACTORIES.values()]), pairs),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(-2, 2)), inner, max_size=3),
    )  # fmt: skip


trees = st.recursive(st.one_of(plain, closed), nests, max_leaves=10)
several = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@several
@given(trees, trees, st.sampled_from([LONG, 2]))
def test_any_nest_comes_back_as_it_was(shared: Any, own: Any, long: int) -> None:
    """Also with every small container kept as one value, as long ones are."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LONG", long)
        path = LocalPlace(folder, "c")
        holdfast.save({"a": shared, "b": Holder(shared), "c": holdfast.PerRank(own), "d": {"x": shared}}, path)
        target: dict[str, Any] = {"a": None, "b": Holder(), "c": holdfast.PerRank(None), "d": {}}
        holdfast.load(path, target)
        assert same(target["a"], shared) and same(target["b"].state, shared) and same(target["c"].value, own)
        assert same(target["d"], {"x": shared})
        ours, other = holdfast.open(path), format_reader.read(path)
        assert same(ours.values, {"a": shared, "b": shared, "d": {"x": shared}})
        assert same({key: other.state[key] for key in "abd"}, {"a": shared, "b": shared, "d": {"x": shared}})
        assert same(ours.per_rank("c", 0), own) and same(other.per_rank["c"], [own])


tensors = st.integers(0, 3).map(torch.arange)


@several
@given(st.recursive(st.one_of(tensors, st.integers()), nests, max_leaves=8))
def test_tensors_and_values_side_by_side_keep_their_order(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = LocalPlace(folder, "c")
        holdfast.save({"b": Holder({"x": tree})}, path)
        target = {"b": Holder({})}
        holdfast.load(path, target)
        # The class of a dict that holds nothing but tensors is not kept: a module's state dict is an OrderedDict.
        assert same(as_kept(target["b"].state), as_kept({"x": tree}))
        other = format_reader.read(path)
        assert same(as_kept(other.state["b"]), as_kept({"x": tree}))


def as_kept(node: Any) -> Any:
    if isinstance(node, dict):
        found = {key: as_kept(value) for key, value in node.items()}
        if node and all(isinstance(value, torch.Tensor) for value in node.values()):
            return found
        return [type(node), getattr(node, "default_factory", None), found]
    if isinstance(node, (list, tuple, deque)):
        return [type(node), getattr(node, "maxlen", None), *map(as_kept, node)]
    return node


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    state = {
        "loss": np.float32(0.1), "list": [np.float64(0.5), np.int64(3), np.bool_(True), np.str_("a"), np.float16(2)],
        "complex": np.complex64(1 - 2j), "bytes": np.bytes_(b"x"), "keys": {np.int64(3): 1, (np.float32(0.5), 1): 2},
    }  # fmt: skip
    expected = {
        "loss": float(np.float32(0.1)), "list": [0.5, 3, True, "a", 2.0], "complex": 1 - 2j, "bytes": b"x",
        "keys": {3: 1, (0.5, 1): 2},
    }  # fmt: skip
    assert same(through(state, tmp_path / "c"), expected)
    holdfast.save({key: value for key, value in state.items() if key != "keys"}, tmp_path / "d")
    assert version(tmp_path / "d") == 1


@pytest.mark.parametrize(
    "key", [frozenset({1}), (1, (frozenset(),)), print, "\ud800"], ids=lambda key: type(key).__name__
)
def test_a_key_that_is_none_is_refused_however_long_its_dict_is(key: Any, tmp_path: Path) -> None:
    for more in (0, LONG):
        state = {"x": {"a": {key: 1, **dict.fromkeys(range(more))}}}
        with pytest.raises(holdfast.errors.Unsupported, match=r"x/a: the key .* is not kept; a key is a text|Unicode"):
            holdfast.save(state, tmp_path / "c")


def test_milestones_of_a_scheduler_are_a_counter(tmp_path: Path) -> None:
    def made() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 3, 5], gamma=0.5)

    scheduler, other = made(), made()
    holdfast.save({"scheduler": scheduler}, tmp_path / "c")
    holdfast.load(tmp_path / "c", {"scheduler": other})
    assert type(other.milestones) is Counter and other.milestones == Counter({3: 2, 5: 1})


def test_a_dict_of_a_class_of_its_own_comes_back_as_a_dict_or_in_place(tmp_path: Path) -> None:
    class Attributes(dict[str, Any]):
        pass

    state = {"x": Attributes(lr=0.1, deep=Attributes(n=1))}
    assert same(through(state, tmp_path / "c"), {"x": {"lr": 0.1, "deep": {"n": 1}}})
    assert version(tmp_path / "c") == 1
    present = Attributes(lr=9)
    target = {"x": present}
    holdfast.load(tmp_path / "c", target)
    assert target["x"] is present and present == state["x"]


def test_an_array_without_numpy_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save({"a": {"x": np.arange(3), "n": 1}, "b": holdfast.PerRank([np.arange(3)])}, tmp_path / "c")
    monkeypatch.setitem(sys.modules, "numpy", None)
    checkpoint = holdfast.open(tmp_path / "c")
    assert checkpoint.value("a/n") == 1
    with pytest.raises(
        holdfast.errors.Unsupported, match=r"manifest.json: a/x: it is a NumPy array.*pip install numpy"
    ):
        checkpoint.value("a/x")
    with pytest.raises(holdfast.errors.Unsupported, match="b@0: it is a NumPy array"):
        checkpoint.per_rank("b", 0)


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    deep: Any = 0
    for _ in range(values.MAX_DEPTH + 5):
        deep = [deep]
    for state in (
        {"x": ring},
        {"x": holdfast.PerRank(ring)},
        {"x": {"y": deep}},
        {"x": [deep] * LONG},
    ):
        with pytest.raises(holdfast.HoldfastError, match="contains itself|nested"):
            holdfast.save(state, tmp_path / "c")


# Which version says it


PLAIN: dict[str, Any] = {
    "model": OrderedDict(w=torch.ones(2)), "step": 3, "list": [1, [2.0, ()]], "by": {0: "a", -1: None}, "empty": {},
    "deep": {"a": {"b": (1, "x")}, "none": {}}, "long": {"params": list(range(LONG - 1))}, "text": {"1": 2},
    "object": Holder({"t": torch.ones(1), "n": 1}), "own": holdfast.PerRank({"a": (1, b"x"), 2: None}),
    "optimizer": {"param_groups": [{"params": list(range(2 * LONG)), "lr": 0.1}], "state": {}},
}  # fmt: skip

LATER: dict[str, Any] = {
    "long list": [0.5] * LONG, "long dict": {str(i): i for i in range(LONG)}, "set": {1}, "counter": Counter(a=1),
    "ordered": OrderedDict(a=1), "deque": deque([1]), "tensors in a deque": deque([torch.ones(1)]),
    "array": np.arange(2), "keys": {(1, 2): 3}, "none": {None: 1}, "both": {1: 2, "1": 3}, "bytearray": bytearray(b"x"),
    "empty first": {"a": [], "b": 1}, "value first": Holder({"n": 1, "t": torch.ones(1)}),
    "default": defaultdict(int, a=1), "of a rank": holdfast.PerRank([{1}]), "rank's key": holdfast.PerRank({(1, 2): 3}),
    "deep in a rank's": holdfast.PerRank({"a": ([{"b": (bytearray(b"x"),)}],)}),
}  # fmt: skip


def test_what_version_1_can_say_is_written_as_version_1(tmp_path: Path) -> None:
    holdfast.save(PLAIN, tmp_path / "c")
    assert version(tmp_path / "c") == 1
    read = format_reader.read(tmp_path / "c").state
    assert same(read["optimizer"], PLAIN["optimizer"]) and same(read["object"], PLAIN["object"].state)


@pytest.mark.parametrize("name", LATER)
def test_what_it_cannot_say_is_written_as_version_2(name: str, tmp_path: Path) -> None:
    holdfast.save({**PLAIN, "new": {"x": LATER[name]}}, tmp_path / "c")
    assert version(tmp_path / "c") == 2
    holdfast.open(tmp_path / "c").verify()


def test_the_values_of_any_rank_decide_the_version(tmp_path: Path) -> None:
    for odd in range(2):
        path = tmp_path / str(odd)
        thread_save(2, lambda rank, odd=odd: {"own": holdfast.PerRank({rank} if rank == odd else [rank])}, path)
        assert version(path) == 2
        assert format_reader.read(path).per_rank["own"][odd] == {odd}


def thread_save(size: int, state_of: Callable[[int], dict[str, Any]], path: Path) -> None:
    store = dist.HashStore()

    def one(rank: int) -> None:
        with Ranks(rank, size, store).call("save", deadline=240, saving=True) as call:
            save_in(call, Job(call.ranks, location(path), 0, "0" * 16), state_of(rank), {})

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))


def test_a_part_with_such_a_manifest_has_a_version_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bytes] = []
    encode = part.encode

    def encoded(one: part.Part) -> bytes:
        left.append(encode(one))
        return left[-1]

    monkeypatch.setattr(part, "encode", encoded)
    for state in ({"x": [1], "t": torch.ones(2)}, {"x": {1}, "t": torch.ones(2)}):
        with holdfast.Saver(worker="thread") as saver:
            saver.save(state, tmp_path / str(len(left))).wait()
    assert [json.loads(data)["version"] for data in left] == [1, part.LATER]
    assert part.decode(left[1], "here").manifest is not None
    lie = json.loads(left[1])
    lie.pop("digest")
    lie["version"] = 1
    with pytest.raises(holdfast.errors.Damaged, match="another version"):
        part.decode(part.seal(json.dumps(lie, separators=(",", ":")).encode()), "here")


# In place


def test_containers_of_values_are_filled_in_place(tmp_path: Path) -> None:
    def made(n: int) -> dict[str, Any]:
        return {
            "history": [n], "best": {"loss": n, "at": [n, n]}, "seen": {n}, "recent": deque([n], 5),
            "counts": Counter({n: 1}), "by": defaultdict(list, {n: [n]}), "raw": bytearray([n]),
            "array": np.full(3, n), "deep": [{"a": [n]}, (1, [n])], "beside": {"t": torch.full((2,), n), "log": [n]},
            "in a tuple": (torch.full((1,), n), [n]), "long": [float(n)] * (n * LONG),
        }  # fmt: skip

    state, target = made(2), made(1)
    held = dict(target)
    inner = [target["best"]["at"], target["deep"][0], target["deep"][0]["a"], target["deep"][1][1]]
    inner += [target["beside"]["log"], target["in a tuple"][1]]
    by = target["by"][1]
    holdfast.save(state, tmp_path / "c")
    holdfast.load(tmp_path / "c", target)
    assert same(target, state)
    assert all(target[key] is held[key] for key in held)
    now = [target["best"]["at"], target["deep"][0], target["deep"][0]["a"], target["deep"][1][1]]
    now += [target["beside"]["log"], target["in a tuple"][1]]
    assert all(a is b for a, b in zip(inner, now, strict=True))
    assert by == [1]  # it was under a key that is gone


def test_what_is_of_another_kind_is_replaced(tmp_path: Path) -> None:
    state = {"a": [1], "b": deque([1], 2), "c": Counter(x=1), "d": np.arange(3), "e": 1, "f": (1,), "g": {1}, "h": None}
    target = {"a": (1,), "b": deque([1], 3), "c": {}, "d": np.arange(4), "e": [2], "f": [1], "g": [1], "h": [1]}
    held = dict(target)
    holdfast.save(state, tmp_path / "c")
    holdfast.load(tmp_path / "c", target)
    assert same(target, state)
    assert same(held["b"], deque([1], 3)) and held["c"] == {} and len(held["d"]) == 4  # untouched


def test_a_list_that_stands_at_two_places_gets_what_each_had(tmp_path: Path) -> None:
    holdfast.save({"a": [1], "b": [2], "c": [3], "d": [3]}, tmp_path / "c")
    one: list[int] = []
    two: list[int] = []
    target = {"a": one, "b": one, "c": two, "d": two}
    holdfast.load(tmp_path / "c", target)
    assert target == {"a": [1], "b": [2], "c": [3], "d": [3]}
    assert target["a"] is one and target["c"] is two and target["d"] is two


# Long ones


N = 3 * LONG
LONGS: dict[str, Any] = {
    "floats": [i / 7 for i in range(N)], "odd floats": [float("nan"), -0.0, float("inf")] * N, "ints": list(range(N)),
    "big ints": [1 << 70] * N, "texts": [f"é{i}" for i in range(N)], "bools": [True, False] * N, "tuple": (0.5,) * N,
    "numpy": [np.float32(i / 3) for i in range(N)], "numpy ints": [np.int64(i) for i in range(N)],
    "dicts": [{"step": i, "loss": i / 3} for i in range(N)], "ints as keys": {i: i / 3 for i in range(N)},
    "keys": {(i, "x"): [i] for i in range(N)}, "nested": [[i / 3] * 64 for i in range(32)], "deque": deque(range(N), N),
    "mixed": [None, 1, 2.5, "x", b"y", {"$": 1}, ("a", [1]), {3}] * LONG, "counter": Counter(range(N)),
    "many dicts": {f"w{i}": {str(j): j for j in range(64)} for i in range(32)}, "$": ["$"] * N,
}  # fmt: skip


@pytest.mark.parametrize("name", LONGS)
def test_a_long_container_is_one_value(name: str, tmp_path: Path) -> None:
    state = {"x": {"log": LONGS[name], "n": 1}, "own": holdfast.PerRank(LONGS[name])}
    holdfast.save(state, tmp_path / "c")
    expected = values.decode(packing.packed(LONGS[name]))  # NumPy's numbers as Python's
    assert same(expected, LONGS[name]) or name.startswith("numpy")
    checkpoint = holdfast.open(tmp_path / "c")
    assert list(checkpoint.manifest.values) == ["x/log", "x/n"]
    assert same(checkpoint.values["x"]["log"], expected) and same(checkpoint.value("x/log"), expected)
    read = format_reader.read(tmp_path / "c")
    assert same(read.state["x"]["log"], expected) and same(read.per_rank["own"][0], expected)
    target: dict[str, Any] = {"x": {"log": type(expected)(), "n": 0}, "own": holdfast.PerRank(None)}
    holdfast.load(tmp_path / "c", target)
    assert same(target["own"].value, expected)
    assert same(target["x"]["log"], expected) or name == "deque"
    target["x"].update(log=None, n=7)
    holdfast.load(tmp_path / "c", target, only="x/log")
    assert same(target["x"]["log"], expected) and target["x"]["n"] == 7


def test_a_list_among_long_ones_is_left_apart() -> None:
    assert not packing.is_long({"loss": [0.5] * N, "lr": [0.5] * N, "best": 1})
    assert not packing.is_long([0] * (LONG - 1)) and packing.is_long([0] * LONG)
    assert packing.is_long([[0] * (LONG // 2)] * 2) and not packing.is_long([[0] * (LONG // 2 - 1)] * 2)


@pytest.mark.parametrize("name", [n for n in LONGS if n != "mixed"])
def test_with_a_name_for_each_element_it_loads_as_well(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 0.1 wrote it."""
    expected = values.decode(packing.packed(LONGS[name]))
    with monkeypatch.context() as patch:
        patch.setattr(packing, "LONG", 1 << 60)
        holdfast.save({"x": {"log": expected, "n": 1}, "o": Holder({"log": expected})}, tmp_path / "c")
    assert len(holdfast.open(tmp_path / "c").manifest.values) > N
    target: dict[str, Any] = {"x": {"log": None, "n": None}, "o": Holder({})}
    holdfast.load(tmp_path / "c", target)
    assert same(target["x"], {"log": expected, "n": 1}) and same(target["o"].state, {"log": expected})


def test_a_long_list_may_be_renamed(tmp_path: Path) -> None:
    holdfast.save({"x": {"log": LONGS["dicts"]}}, tmp_path / "c")
    target = {"y": {"history": []}}
    holdfast.load(tmp_path / "c", target, rename={"x/log": "y/history"})
    assert target["y"]["history"] == LONGS["dicts"]


def test_long_lists_that_differ_between_ranks_are_told_by_their_first_difference(tmp_path: Path) -> None:
    with pytest.raises(holdfast.SaveFailed, match=r"x/log/7 differs between ranks: 0.5 on rank 0, 1.5 on rank 1"):
        thread_save(2, lambda rank: {"x": {"log": [0.5] * 7 + [0.5 + rank] + [0.5] * N}}, tmp_path / "c")
    with pytest.raises(holdfast.SaveFailed, match=rf"x/log/{N} differs between ranks: nothing on rank 0"):
        thread_save(2, lambda rank: {"x": {"log": [1] * (N + rank)}}, tmp_path / "d")


def test_state_of_an_optimizer_under_numbers_goes_to_a_live_one(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(LONG + 5)])
        return module, torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)

    module, optimizer = made()
    sum(module).backward()  # type: ignore[arg-type]
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    holdfast.save({"optimizer": optimizer.state_dict()}, tmp_path / "c")
    other, live = made()
    holdfast.load(tmp_path / "c", {"model": other, "optimizer": live}, only="optimizer")
    assert live.param_groups[0]["lr"] == 0.25 and len(live.state) == LONG + 5


@pytest.mark.slow
def test_deep_nests_come_back(tmp_path: Path) -> None:
    deep: Any = 0
    for n in range(values.MAX_DEPTH - 5):
        deep = [(deep,), {"a": deep}, {1: deep}, deque([deep]), [deep, {1}]][n % 5]
    state = {"x": [deep] * LONG, "own": holdfast.PerRank(deep)}
    holdfast.save(state, tmp_path / "c")
    target: dict[str, Any] = {"x": None, "own": holdfast.PerRank(None)}
    holdfast.load(tmp_path / "c", target)
    assert repr(target["x"][-1]) == repr(deep) and repr(target["own"].value) == repr(deep)
