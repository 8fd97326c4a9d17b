"""Checkpoints against a second reader that was written from the format's description alone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.ondisk import dtypes, names
from holdfast.ranks.ranks import Ranks
from holdfast.state import collect
from holdfast.storage.local.local_place import LocalPlace
from tests import format_reader
from tests.marks import examples
from tests.ondisk.test_values import plain, same

DTYPES = sorted(dtypes._BY_NAME)
ODD_KEYS = [
    "a", "b.c", "a/b", "50%", "x@0", "w[0:1]", "\x00", "\n", "日本", "é", ".", "..", "", "%2F", "__metadata__", "a\\b",
    "C:", "-1", "0", "$", "save", "digest",
]  # fmt: skip


def of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose memory is ``data``, whatever the type makes of it."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major; of any type and any strides, by way of an integer type of the same width."""
    plain_tensor = tensor.detach().resolve_conj().resolve_neg()
    if not plain_tensor.numel():
        return b""
    width = plain_tensor.dtype.itemsize
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[width]
    return plain_tensor.view(same_width).contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Made:
    """How to make a tensor; hypothesis shows this, and need not print tensors of odd types. ``tied``: one for all."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    layout: str
    tied: bool = False

    def tensor(self) -> torch.Tensor:
        dtype = dtypes.torch_dtype(self.dtype)
        tensor = of_bytes(self.data, dtype, self.shape)
        match self.layout:
            case "turned" if len(self.shape) > 1:
                return tensor.transpose(0, -1)
            case "every second" if self.shape:
                return tensor[::2]
            case "expanded":
                return tensor.unsqueeze(0).expand(3, *self.shape)
            case "conjugate" if dtype.is_complex:
                return tensor.conj()
            case "imaginary" if dtype.is_complex:
                return tensor.conj().imag
            case "parameter" if dtype.is_floating_point:
                return nn.Parameter(tensor, requires_grad=False)
        return tensor


def can_be_copied(name: str) -> bool:
    if name == "complex32":
        return True  # and torch warns of it
    try:
        torch.zeros(4, dtype=torch.uint8).repeat(16).view(dtypes.torch_dtype(name))[::2].contiguous()
    except NotImplementedError:
        return False
    return True


UNCOPIED = frozenset(name for name in DTYPES if not can_be_copied(name))
"""Types that torch itself cannot copy: they are drawn contiguous, and have a test of their own below."""

LAYOUTS = ["as it is", "turned", "every second", "expanded", "conjugate", "imaginary", "parameter"]


@st.composite
def tensors(draw: st.DrawFn, tied: bool = False) -> Made:
    """Any type, any small shape, laid out in memory in any way."""
    name = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape, dtype=int)) * dtypes.itemsize(name)
    data = draw(st.binary(min_size=count, max_size=count))
    if name == "bool":
        data = bytes(b % 2 for b in data)
    layout = "as it is" if name in UNCOPIED else draw(st.sampled_from(LAYOUTS))
    return Made(name, shape, data, layout, tied)


keys = st.one_of(st.sampled_from(ODD_KEYS), st.text(max_size=5))
top_keys = keys.filter(lambda key: key not in ("", "state", "manifest.json"))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tuples = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(st.lists(inner, max_size=3), tuples, st.dictionaries(keys, inner, max_size=3))


numbered = st.dictionaries(st.one_of(st.integers(), st.booleans(), st.none()), st.integers(), max_size=2)
of_a_rank = st.recursive(st.one_of(plain, tensors(), numbered), containers, max_leaves=4)


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state that all ranks share, and values of one rank by key."""
    leaves = st.one_of(plain, tensors(), st.just(draw(tensors(tied=True))))
    state = draw(st.dictionaries(top_keys, st.recursive(leaves, containers, max_leaves=8), max_size=4))
    return state, draw(st.dictionaries(top_keys.filter(lambda key: key not in state), of_a_rank, max_size=2))


def made(node: Any, memo: dict[Made, torch.Tensor]) -> Any:
    """The state with its tensors."""
    if isinstance(node, Made):
        return memo.setdefault(node, node.tensor()) if node.tied else node.tensor()
    if isinstance(node, dict):
        return {k: made(v, memo) for k, v in node.items()}
    if type(node) in (list, tuple):
        return type(node)(made(v, memo) for v in node)
    return node


def wrapped(own: dict[str, Any]) -> dict[str, Any]:
    """Values of this rank, at the top and below."""
    return {**ranked(own), "below": {"x": 1, **ranked(own)}}


def ranked(own: dict[str, Any]) -> dict[str, Any]:
    return {key: holdfast.PerRank(value) for key, value in own.items()}


def equal(a: Any, b: Any) -> bool:
    """Same structure, same types, same bits. Dicts in any order: tensors and values are kept apart."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return same(a, b)


several = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@several
@given(states(), st.dictionaries(st.sampled_from(["config.json", "a/b.txt", "é"]), st.binary(max_size=40), max_size=2))
def test_the_second_reader_and_our_own_find_the_state(
    case: tuple[dict[str, Any], dict[str, Any]], files: dict[str, bytes]
) -> None:
    memo: dict[Made, torch.Tensor] = {}
    state, own = (made(part, memo) for part in case)
    shared = {**state, "below": {"x": 1}}
    with tempfile.TemporaryDirectory() as folder:
        path = LocalPlace(folder, "ckpt")
        holdfast.save({**state, **wrapped(own)}, path, step=5, files=files)
        found = format_reader.read(path)
        assert equal(found.state, shared)
        assert found.attachments == files and found.manifest["step"] == 5
        expected = {names.join((*above, key)): value for key, value in own.items() for above in ((), ("below",))}
        assert equal({p: v[0] for p, v in found.per_rank.items()}, expected)
        ours = holdfast.open(path)
        assert equal(ours.state_dict(), shared)
        assert {name: ours.attachment(name) for name in ours.attachments} == files
        assert equal({p: ours.per_rank(p, 0) for p in expected}, expected)
        ours.verify()


def fresh(node: Any, memo: dict[int, torch.Tensor]) -> Any:
    """The same state before it was trained: tensors of the same kind full of zeros, values of no meaning."""
    if isinstance(node, torch.Tensor):
        count = node.numel() * node.dtype.itemsize
        return memo.setdefault(id(node), of_bytes(bytes(count), node.dtype, tuple(node.shape)))
    if isinstance(node, holdfast.PerRank):
        return holdfast.PerRank(None)
    if holds_only_values(node):
        return None
    return {k: fresh(v, memo) for k, v in node.items()} if isinstance(node, dict) else [fresh(v, memo) for v in node]


def holds_only_values(node: Any) -> bool:
    if isinstance(node, dict):
        return all(map(holds_only_values, node.values()))
    if type(node) in (list, tuple):
        return all(map(holds_only_values, node))
    return not isinstance(node, (torch.Tensor, holdfast.PerRank))


def listed(node: Any) -> Any:
    """Tuples with tensors as lists: a value beside a tensor in a tuple cannot be put back in place."""
    if holds_only_values(node) or not isinstance(node, (dict, list, tuple)):
        return node
    return {k: listed(v) for k, v in node.items()} if isinstance(node, dict) else [listed(v) for v in node]


def unwrapped(node: Any) -> Any:
    if isinstance(node, holdfast.PerRank):
        return node.value
    if isinstance(node, dict):
        return {k: unwrapped(v) for k, v in node.items()}
    return [unwrapped(v) for v in node] if type(node) is list else node


@several
@given(states())
def test_a_fresh_state_takes_it_all_back(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    memo: dict[Made, torch.Tensor] = {}
    state, own = (made(part, memo) for part in case)
    state = {**listed(state), **wrapped(own)}
    with tempfile.TemporaryDirectory() as folder:
        holdfast.save(state, LocalPlace(folder, "ckpt"))
        target = {key: fresh(value, {}) for key, value in state.items()}
        holdfast.load(LocalPlace(folder, "ckpt"), target)
        assert equal(unwrapped(target), unwrapped(state))


@pytest.mark.parametrize("layout", ["turned", "expanded"])
@pytest.mark.parametrize("name", sorted(UNCOPIED))
def test_types_that_torch_cannot_copy_in_any_layout(name: str, layout: str, tmp_path: Path) -> None:
    count = 6 * dtypes.itemsize(name)
    tensor = Made(name, (2, 3), bytes(range(count)), layout).tensor()
    holdfast.save({"m": {"t": tensor}}, tmp_path / "c")
    assert equal(format_reader.read(tmp_path / "c").tensors["m/t"], tensor)
    assert equal(holdfast.open(tmp_path / "c").read("m/t"), tensor)


def test_long_lists_keep_their_order(tmp_path: Path) -> None:
    state = {
        "tensors": [torch.tensor(i) for i in range(12)],
        "values": tuple(range(112)),
        "m": {"x": [[i] for i in "abcdefghijkl"]},
    }
    holdfast.save(state, tmp_path / "c")
    assert equal(format_reader.read(tmp_path / "c").state, state)
    assert equal(holdfast.open(tmp_path / "c").state_dict(), state)


def test_dicts_with_integer_keys(tmp_path: Path) -> None:
    state = {"by": {0: "a", 7: {"x": torch.arange(3)}, -1: None}, "top": {1: 2}}
    holdfast.save(state, tmp_path / "c")
    assert equal(format_reader.read(tmp_path / "c").state, state)
    assert equal(holdfast.open(tmp_path / "c").state_dict(), state)


def test_the_file_of_an_unsharded_model_loads_straight_into_it(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Sequential(nn.Linear(7, 3), nn.Embedding(11, 4)))

    model = build()
    holdfast.save({"model": model, "step": 3}, tmp_path / "c")
    [file] = (tmp_path / "c" / "model").glob("*.safetensors")
    other = build()
    other.load_state_dict(safetensors.torch.load_file(file))
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    with safetensors.safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(model.state_dict())
        assert opened.metadata()["section"] == "model"


def test_tied_tensors_are_stored_once_and_come_as_one(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    holdfast.save({"m": {"a": weight, "b": weight, "part": weight[:2], "turned": weight.T}}, tmp_path / "c")
    found = format_reader.read(tmp_path / "c")
    assert found.manifest["aliases"] == {"m/b": "m/a"}
    state = holdfast.open(tmp_path / "c").state_dict()["m"]
    assert state["a"] is state["b"] and torch.equal(state["part"], weight[:2])


def test_blocks_of_a_large_piece(tmp_path: Path) -> None:
    """A piece of more than two blocks: the reader checks the sum of each."""
    large = torch.arange((17 << 20) // 4 + 3, dtype=torch.int32)
    holdfast.save({"m": {"large": large, "small": torch.arange(5)}}, tmp_path / "c")
    assert torch.equal(format_reader.read(tmp_path / "c").tensors["m/large"], large)


def cells_case(rank: int, kind: str) -> holdfast.Shard:
    """What each of three ranks holds of a (6, 4) tensor, cut in one of the three ways that cells can be."""
    full = torch.arange(24).view(6, 4)
    boxes = {
        "regular": [(0, 2, 0, 4), (2, 4, 0, 4), (4, 6, 0, 4)],
        "cuts": [(0, 1, 0, 4), (1, 5, 0, 4), (5, 6, 0, 4)],
        "boxes": [(0, 6, 0, 1), (0, 3, 1, 4), (3, 6, 1, 4)],
    }[kind]
    a, b, c, d = boxes[rank]
    return holdfast.Shard(full[a:b, c:d], (6, 4), (a, c))


@pytest.mark.parametrize("kind", ["regular", "cuts", "boxes"])
def test_cells_of_every_kind(kind: str, tmp_path: Path) -> None:
    thread_save(3, lambda rank: {"m": {"t": cells_case(rank, kind), "same": torch.arange(3)},
                                 "own": holdfast.PerRank([rank, torch.full((2,), rank)])}, tmp_path / "c")  # fmt: skip
    found = format_reader.read(tmp_path / "c")
    cells = found.manifest["tensors"]["m/t"][2]
    assert cells == {"regular": [2, 4], "cuts": {"cuts": [[0, 1, 5, 6], [0, 4]]}}.get(kind, cells)
    assert kind != "boxes" or set(cells) == {"boxes"}
    assert found.manifest["world_size"] == 3
    assert torch.equal(found.tensors["m/t"], torch.arange(24).view(6, 4))
    assert torch.equal(holdfast.open(tmp_path / "c").read("m/t"), torch.arange(24).view(6, 4))
    for rank in range(3):
        expected = [rank, torch.full((2,), rank)]
        assert equal(found.per_rank["own"][rank], expected)
        assert equal(holdfast.open(tmp_path / "c").per_rank("own", rank), expected)


def thread_save(size: int, state_of: Any, path: Path) -> None:
    """A save by ``size`` ranks, each a thread of this process."""
    from concurrent.futures import ThreadPoolExecutor

    import torch.distributed as dist

    from holdfast.commit.job import Job
    from holdfast.save import save_in
    from holdfast.storage.urls import location

    store = dist.HashStore()

    def one(rank: int) -> None:
        ranks = Ranks(rank, size, store)
        with ranks.call("save", deadline=240, saving=True) as call:
            save_in(call, Job(call.ranks, location(path), 0, "0" * 16), state_of(rank), {})

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))


def test_thread_save_is_what_save_is(tmp_path: Path) -> None:
    """The helper above is no other save: one rank of it writes what `save` writes."""
    state = {"m": {"w": torch.arange(6)}, "x": [1, 2]}
    thread_save(1, lambda rank: state, tmp_path / "a")
    holdfast.save(state, tmp_path / "b")
    assert equal(format_reader.read(tmp_path / "a").state, format_reader.read(tmp_path / "b").state)
    assert collect(state, Ranks(0, 1)).entries.keys() == {"m/w"}
