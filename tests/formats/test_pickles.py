"""The machine that reads pickles: data as Python's own makes them, nothing that a pickle wants done, bounded cost."""

from __future__ import annotations

import argparse
import collections
import datetime
import fractions
import json
import math
import pathlib
import pickle
import random
import struct
import tracemalloc
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import Damaged, HoldfastError, Unsupported
from holdfast.formats.machine import inert, pickles, torch_files
from holdfast.formats.machine.pickles import EndsEarly, Name, Record
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import hostile
from tests.formats.truth import GOLDEN, NAMES
from tests.marks import examples

WHERE = LocalPlace("some/file.pt")
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def load(data: bytes) -> Any:
    value, end = pickles.load(data, WHERE)
    assert end == len(data)
    return value


def outcome(data: bytes, read: Callable[[bytes], Any] = load) -> Any:
    """The value, or the error, which is one of ours and names the file."""
    try:
        return read(data)
    except (Damaged, Unsupported) as error:
        assert str(WHERE) in str(error), str(error)
        return error


# Data

# A key may have 256 bits and hold tuples, but no tuples of tuples.
keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 256) + 1, (1 << 256) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)
flat_keys = keys.filter(lambda key: not isinstance(key, tuple) or all(not isinstance(part, tuple) for part in key))
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 3000), max_value=1 << 3000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.integers(min_value=1 << 16, max_value=1 << 18).map(lambda n: "é" * n)
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(flat_keys, inner, max_size=5)
        | st.dictionaries(flat_keys, inner, max_size=5).map(collections.OrderedDict)
        | st.dictionaries(flat_keys, inner, max_size=5).map(lambda d: collections.defaultdict(list, d))
        | st.lists(flat_keys, max_size=5).map(set)
        | st.lists(flat_keys, max_size=5).map(frozenset)
        | inner.map(lambda one: [one, one, {"again": one}])
    ),
    max_leaves=30,
)


@settings(max_examples=examples(300))
@given(values, st.sampled_from(PROTOCOLS))
def test_data_comes_as_python_reads_it(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


@settings(max_examples=examples(60))
@given(values, st.sampled_from(PROTOCOLS), st.data())
def test_a_pickle_cut_short_ends_early_wherever_it_is_cut(value: Any, protocol: int, data: st.DataObject) -> None:
    pickled = pickle.dumps(value, protocol)
    cut = data.draw(st.integers(min_value=0, max_value=len(pickled) - 1))
    with pytest.raises(EndsEarly):
        load(pickled[:cut])


def test_every_cut_of_every_opcode_ends_early() -> None:
    for data in (TELLING, TELLING_OLD, pickle.dumps(SOME_OF_EACH, 4), pickle.dumps(SOME_OF_EACH, 0)):
        assert not isinstance(outcome(data), Exception)
        for cut in range(len(data)):
            assert type(outcome(data[:cut])) is EndsEarly, (data[:cut], data)


SOME_OF_EACH = [
    {"é" * 99: [1, 300, 70_000, -1, 1 << 40, 1 << 3000, 1.5, None, True, False], b"x": ("é", b"\xff" * 300)},
    {1, 2}, frozenset("ab"), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), bytearray(b"abc"), collections.deque([1]),
]  # fmt: skip
TELLING = (
    b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00"
    b"](\x8c\x02\xc3\xa9\x94X\x03\x00\x00\x00\xe6\x97\xa5q\x05\x8d\x02\x00\x00\x00\x00\x00\x00\x00\xc3\xa9"
    b"h\x00j\x05\x00\x00\x00K\x01M\x02\x01J\x03\x02\x01\x00\x8a\x02\x01\x02\x8b\x02\x00\x00\x00\x01\x02G?\xf0\0\0\0\0\0\0"
    b"C\x01aB\x01\x00\x00\x00a\x8e\x01\x00\x00\x00\x00\x00\x00\x00a\x96\x01\x00\x00\x00\x00\x00\x00\x00aNr\x07\x00\x00\x00"
    b"\x8f(K\x01\x90(K\x01\x91}(K\x01Nu\x88\x89)N\x85NN\x86NNN\x87(1N0N2e."
)
TELLING_OLD = (
    b"(lp0\nI01\naI5\naL5L\naF1.5\naS'a'\naV\\u65e5\nag0\na(dp1\nNNsaT\x01\x00\x00\x00aaU\x01aa"
    b"ccollections\nOrderedDict\n(tRa."
)


def test_what_python_reads_of_hand_made_pickles() -> None:
    assert load(TELLING) == pickle.loads(TELLING)
    ours, theirs = load(TELLING_OLD), pickle.loads(TELLING_OLD)
    assert ours[6] is ours and ours[:6] + ours[7:] == theirs[:6] + theirs[7:]


def test_one_object_named_twice_is_one() -> None:
    shared = [1]
    one, two = load(pickle.dumps([shared, shared]))
    assert one is two


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lists_and_dicts_that_hold_themselves(protocol: int) -> None:
    own: list[Any] = []
    own.append({"own": own})
    found = load(pickle.dumps(own, protocol))
    assert found[0]["own"] is found
    assert inert.expanded(found, 10**9) is None


def test_texts_and_bytes_of_python_2() -> None:
    # 'abc', '\xff\xfe', u'\xe9\u65e5' and a long, as Python 2.7 pickles them.
    assert load(b"(S'abc'\np0\nS'\\xff\\xfe'\nS\"it's \\u0041\"\nV\xe9\\u65e5\nL5L\nt.") == (
        "abc", b"\xff\xfe", "it's \\u0041", "é日", 5,
    )  # fmt: skip
    assert load(b"\x80\x02(U\x03abcT\x02\x00\x00\x00\xff\xfet.") == ("abc", b"\xff\xfe")
    every = bytes(range(256))
    escaped = repr(every).removeprefix("b").encode().replace(b"\\x00", b"\\0").replace(b"\\x07", b"\\a")
    assert load(b"S" + escaped + b"\n.") == every
    assert load(b"c__builtin__\nset\n(](K\x01K\x02etR.") == {1, 2}
    assert load(b"c__builtin__\nlong\n.") == Name("builtins.int")


def test_several_pickles_one_after_the_other() -> None:
    data = pickle.dumps([1], 2) + pickle.dumps({"a": 2}, 4) + b"rest"
    first, at = pickles.load(data, WHERE)
    second, end = pickles.load(data, WHERE, start=at)
    assert (first, second, data[end:]) == ([1], {"a": 2}, b"rest")


# Objects


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_come_as_records(protocol: int) -> None:
    def read(value: Any) -> Any:
        return load(pickle.dumps(value, protocol))

    namespace = read(argparse.Namespace(lr=0.1, names=["a"]))
    assert (namespace.name, namespace.get("lr"), namespace.get("names")) == ("argparse.Namespace", 0.1, ["a"])
    assert read(types.SimpleNamespace(a=1)).get("a") == 1
    assert read(datetime.timedelta(1, 2, 3)).args == (1, 2, 3)
    assert read(datetime.datetime(2020, 1, 2)).name == "datetime.datetime"
    assert read(fractions.Fraction(1, 3)).name == "fractions.Fraction"
    assert read(uuid.UUID(int=7)).get("int") == 7
    assert read(pathlib.PurePosixPath("a/b")) == "a/b"
    assert read(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert read(collections.deque([1, 2], maxlen=2)) == [1, 2]
    assert read(range(3)).args == (0, 3, 1)
    assert read(random.Random(1)).name == "random.Random"
    assert read(dict) == Name("builtins.dict")
    assert isinstance(read(object()), Record)
    assert read(torch.float16) == Name("torch.float16")
    settings = read(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3).state_dict())
    assert settings["step_size"] == 3


class _Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class _Both(_Slots):
    def __init__(self) -> None:
        super().__init__()
        self.c = 3


class _List(list[int]):
    pass


class _Dict(dict[str, int]):
    pass


class _Number(int):
    pass


class _Keywords:
    def __new__(cls, *, a: int) -> _Keywords:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"a": 5}


@pytest.fixture
def torch_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above, as if torch had them: their pickles name what may be named."""
    for kind in (_Slots, _Both, _List, _Dict, _Number, _Keywords):
        monkeypatch.setattr(kind, "__module__", "torch")
        monkeypatch.setattr(torch, kind.__name__, kind, raising=False)


@pytest.mark.usefixtures("torch_classes")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_slots_subclasses_and_keywords(protocol: int) -> None:
    def read(value: Any) -> Record:
        return load(pickle.dumps(value, protocol))

    if protocol >= 2:  # Python itself cannot before
        assert read(_Slots()).state == {"a": 1, "b": 2}
        assert read(_Both()).state == {"a": 1, "b": 2, "c": 3}
    if protocol >= 4:  # before, Python makes such an object by functools.partial
        keywords = read(_Keywords(a=5))
        assert (keywords.name, keywords.get("a")) == ("torch._Keywords", 5)
    assert read(_Number(7)).args == (7,)
    listed, mapped = _List([1, 2]), _Dict(a=1)
    assert list(read(listed).elements) == [1, 2]
    assert dict(read(mapped).items) == {"a": 1}
    mapped.extra = [1]  # type: ignore[attr-defined]
    found = read(mapped)
    assert (dict(found.items), found.get("extra")) == ({"a": 1}, [1])


def test_attributes_of_containers_are_left() -> None:
    state = torch.nn.Linear(1, 1).state_dict(prefix="p.")
    assert hasattr(state, "_metadata")
    for key in list(state):
        state[key] = state[key].shape
    assert torch_files.load_pickle(pickle.dumps(state), WHERE) == {"p.weight": (1, 1), "p.bias": (1,)}


def test_telling_a_record_does_not_tell_what_it_holds() -> None:
    record = Record("torch.X")
    record.state = {"self": record}
    assert repr(record) == "<torch.X>" and str(Name("torch.float32")) == "torch.float32"


# Names


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_peers_pickle_is_known(name: str) -> None:
    for full in json.loads((GOLDEN / name / "expected.json").read_text()).get("pickle_globals", ()):
        module, _, attribute = full.rpartition(".")
        torch_files.load_pickle(hostile.name(module, attribute) + b".", WHERE)


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_what_is_refused(name: str) -> None:
    for protocol in (b"", b"\x80\x02", b"\x80\x04"):
        for around in (b"%b.", b"](K\x01%be.", b"}X\x01\x00\x00\x00a%bs."):
            with hostile.listening() as heard, pytest.raises(Unsupported, match=r"names .*nothing was executed"):
                torch_files.load_pickle(protocol + around % hostile.REFUSED[name], WHERE)
            assert heard == []


@pytest.mark.parametrize("name", hostile.INERT)
def test_what_stays_inert(name: str) -> None:
    with hostile.listening() as heard:
        found = torch_files.load_pickle(hostile.INERT[name] + b".", WHERE)
    assert heard == [] and type(found) is Record and found.name.startswith("torch.")


def test_a_module_that_is_named_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "olmo").mkdir()
    (tmp_path / "olmo/__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with hostile.listening() as heard:
        found = load(hostile.called(hostile.name("olmo", "Trainer"), b"K\x01") + b".")
    assert heard == [] and (found.name, found.args) == ("olmo.Trainer", (1,))


@pytest.mark.parametrize("name", hostile.BROKEN)
def test_what_is_broken(name: str) -> None:
    with hostile.listening() as heard:
        error = outcome(hostile.BROKEN[name] + b".", lambda data: torch_files.load_pickle(data, WHERE))
    assert heard == [] and isinstance(error, Damaged) and "bring it back" in str(error)


def test_what_is_kept_elsewhere_is_refused() -> None:
    buffers: list[Any] = []
    data = pickle.dumps(pickle.PickleBuffer(b"abc"), 5, buffer_callback=buffers.append)
    for refused in (data, b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00."):
        with pytest.raises(Unsupported, match="outside of itself"):
            load(refused)
    with pytest.raises(Unsupported, match="protocol 6"):
        load(b"\x80\x06N.")
    assert load(pickle.dumps(pickle.PickleBuffer(b"abc"), 5)) == b"abc"


# Cost


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", hostile.bombs())
@pytest.mark.slow_cases("integers that do not count up", "odd keys", "a set of a list", "dicts of a dict")
def test_bombs(name: str) -> None:
    data, reason = hostile.bombs()[name]
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match=reason):
            torch_files.load_pickle(data + b".", WHERE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300 * len(data) + (1 << 20)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "deeper", [b"\x85", b"](N\x85e0", b"]", b"q\x00]h\x00a", b"K\x01\x86", b"(", b"ctorch\nX\nh\x01\x86R"]
)
def test_depth(deeper: bytes) -> None:
    outcome(b"Nq\x00q\x01" + deeper * 100_000 + b".")
    found = load(b"N" + b"\x85" * 100_000 + b".")
    assert len(found) == 1


@pytest.mark.slow
def test_keys_that_do_not_collide_are_not_too_many() -> None:
    sizes = {(layer, head): 1.5 for layer in range(200) for head in range(200)}
    assert load(pickle.dumps(sizes)) == sizes
    by_id = {140_000_000_000_000 + 64 * n: n for n in range(50_000)}  # how old torch named parameters
    assert load(pickle.dumps(by_id)) == by_id
    for plain in (dict.fromkeys(range(200_000)), set(range(200_000)), dict.fromkeys(map(str, range(200_000)))):
        assert load(pickle.dumps(plain)) == plain
    shared = [dict.fromkeys(range(rank, 8 * 30_000, 8)) for rank in range(2)] * 3
    assert load(pickle.dumps(shared)) == shared
    one_hash = {(1 << 61) - 1: 0, 0: 1, -1: 2, -2: 3, 2.5: 4, float("inf"): 5, 1 << 200: 6}
    assert load(pickle.dumps([one_hash] * 3)) == [one_hash] * 3


def test_integers_of_any_size() -> None:
    for value in (1 << 100_000, -(1 << 100_000) + 1):
        for protocol in (2, 4):
            assert load(pickle.dumps(value, protocol)) == value
    assert math.isnan(load(pickle.dumps(float("nan"), 0)))


nested = st.recursive(
    st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(), inner, max_size=4)
    | st.lists(inner, max_size=4).map(tuple) | inner.map(lambda one: [one] * 3),
    max_leaves=40,
)  # fmt: skip


def _walked(node: Any) -> int:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return 1 + sum(map(_walked, inner))


@given(nested)
def test_how_much_a_walk_meets(value: Any) -> None:
    total = _walked(value)
    assert inert.expanded(value, total) == total
    assert inert.expanded(value, total - 1) is None


def test_a_walk_that_would_meet_billions() -> None:
    value: Any = Record("torch.X", (1,), {"a": 1})
    for _ in range(300):
        value = [value] * 10
    assert inert.expanded(value, 10**9) is None
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    assert inert.expanded(deep, 10**9) == 50_001
    record = Record("torch.X")
    record.elements = [record]
    assert inert.expanded([record], 10**9) is None


# Anything


def _real() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(GOLDEN.glob("dcp_*/ckpt/.metadata"))[:4]]
    found += [torch_pickle(path) for path in sorted(GOLDEN.glob("*/ckpt/*.pt"))[:12]]
    found += [pickle.dumps(SOME_OF_EACH, protocol) for protocol in PROTOCOLS] + [TELLING, TELLING_OLD]
    found += [data + b"." for some in (hostile.REFUSED, hostile.INERT, hostile.BROKEN) for data in some.values()]
    return [data for data in found if len(data) < 100_000]


def torch_pickle(path: Path) -> bytes:
    import zipfile

    if not zipfile.is_zipfile(path):
        return path.read_bytes()[:50_000]
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


REAL = _real()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real pickle with some bytes changed, parts doubled, dropped, or taken from another."""
    data = bytearray(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == 1:
            data[at : at + 4] = struct.pack("<I", draw(st.integers(0, (1 << 32) - 1)))
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 50))]
        elif kind == 3:
            data[at:at] = data[at : at + draw(st.integers(1, 300))] * draw(st.integers(1, 20))
        else:
            other = draw(st.sampled_from(REAL))
            start = draw(st.integers(0, len(other)))
            data[at:at] = other[start : start + draw(st.integers(1, 500))]
    return bytes(data)


def _as_torch(data: bytes) -> Any:
    def persistent(key: Any) -> Any:
        raise Damaged(f"{WHERE}: no storages here")

    return pickles.load(data, WHERE, calls=torch_files._calls(WHERE), persistent=persistent)[0]


@pytest.mark.timeout(120)
@settings(max_examples=examples(800), suppress_health_check=list(HealthCheck))
@given(mutated())
def test_mutated_pickles(data: bytes) -> None:
    with hostile.listening() as heard:
        outcome(data, _as_torch)
    assert heard == []


opcodes = st.one_of(
    st.sampled_from([bytes([code]) for code in range(256)]),
    st.binary(max_size=6),
    st.sampled_from([
        b"K\x01", b"N", b"]", b"}", b")", b"(", b"h\x00", b"q\x00", b"q\x01", b"h\x01", b"\x94", b"R", b"b", b"t", b"e",
        b"u", b"s", b"a", b"\x81", b"\x92", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"0", b"1", b"2",
        b"\x8c\x01a", b"C\x01a", b"ctorch\nX\n", b"ccollections\nOrderedDict\n", b"c_codecs\nencode\n", b"I01\n",
        b"cbuiltins\ngetattr\n", b"cbuiltins\nset\n", b"ccopyreg\n_reconstructor\n", b"cbuiltins\nobject\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nSize\n",
        b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy.core.multiarray\nscalar\n", b"cnumpy\ndtype\n",
        b"ctorch.storage\n_load_from_bytes\n", b"ctorch\ndevice\n", b"Q", b"o", b"d", b"l",
    ]),
)  # fmt: skip


@pytest.mark.timeout(120)
@settings(max_examples=examples(1500), suppress_health_check=list(HealthCheck))
@given(st.lists(opcodes, max_size=60))
def test_any_opcodes(parts: list[bytes]) -> None:
    with hostile.listening() as heard:
        found = outcome(b"".join(parts) + b".", _as_torch)
    assert heard == []
    assert isinstance(found, HoldfastError) or inert.expanded(found, 10**6) is None or repr(found) is not None


def test_a_signal_by_name_as_python_3_10_pickles_it() -> None:
    by_name, by_number = load(b"csignal\nSIGTERM\n."), load(b"csignal\nSignals\n(I15\ntR.")
    assert (by_name.name, by_name.args) == (by_number.name, by_number.args) == ("signal.Signals", (15,))
    with pytest.raises(Unsupported, match=r"names signal\.alarm"):
        load(b"csignal\nalarm\n.")
