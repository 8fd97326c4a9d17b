"""A state copied to memory and written as torch's file: torch reads it back, and a failure leaves nothing."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.export import torch_file
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from tests.export.test_pickles import _TREES
from tests.marks import examples
from tests.ondisk.test_values import same

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]


def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    whole = torch.arange(2 * torch.Size(shape).numel(), dtype=torch.uint8).reshape(*shape, 2) % 2
    tensor = whole.to(draw(st.sampled_from(DTYPES)))[..., draw(st.integers(0, 1))]
    return tensor if draw(st.booleans()) else tensor.contiguous()


STATES = st.dictionaries(st.text(), _TREES | st.composite(tensors)() | st.lists(st.composite(tensors)()), max_size=6)


def written(state: dict[str, Any], folder: Path, memory: Any = None) -> Path:
    return named(torch_file.copied(state, memory), folder / "state.ckpt")


def named(image: torch_file.Image, path: Path) -> Path:
    assert torch_file.write(image, path, {}, lambda temporary: disk.replace(temporary, path)) == path.stat().st_size
    return path


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def bits(node: Any) -> Any:
    """The same with the bytes of each tensor in its place: some dtypes know no comparison."""
    if isinstance(node, torch.Tensor):
        flat = torch.empty(node.numel(), dtype=node.dtype).copy_(node.flatten())
        return (str(node.dtype), tuple(node.shape), flat.view(torch.uint8).tolist())
    if type(node) in (dict, OrderedDict):
        return type(node)((key, bits(value)) for key, value in node.items())
    return type(node)(map(bits, node)) if type(node) in (list, tuple) else node


@settings(max_examples=examples(60))
@given(state=STATES)
def test_torch_reads_what_was_copied(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(state, LocalPlace(tmp_path_factory.mktemp("state")))
    assert same(bits(loaded(path)), bits(state))


def test_what_was_copied_does_not_change_with_the_state(tmp_path: Path) -> None:
    weight, numbers = torch.ones(300_000), [1, 2]
    image = torch_file.copied({"weight": weight, "numbers": numbers})
    weight.zero_()
    numbers.append(3)
    found = loaded(named(image, tmp_path / "state.ckpt"))
    assert found["weight"].eq(1).all() and found["numbers"] == [1, 2]


def test_memory_is_used_again(tmp_path: Path) -> None:
    """Of a larger state: nothing of it is left in the file of a smaller one."""
    image = torch_file.copied({"a": torch.ones(400_000), "b": torch.full((70_000,), 3.0)})
    named(image, tmp_path / "first.ckpt")
    again = torch_file.copied({"c": torch.zeros(10), "d": torch.full((280_000,), 5.0)}, image.memory)
    assert again.memory is image.memory
    path = named(again, tmp_path / "second.ckpt")
    assert holdfast.open(path).verify()
    assert loaded(path)["c"].eq(0).all() and loaded(path)["d"].eq(5).all()
    grown = torch_file.copied({"a": torch.ones(1_400_000)}, image.memory)
    assert grown.memory is not image.memory


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(1000))
    path = written({"a": weight, "b": weight.detach(), "half": weight[:500], "empty": torch.empty(0)}, tmp_path)
    found = loaded(path)
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["half"].data_ptr()
    assert torch.equal(found["half"], weight[:500]) and path.stat().st_size < 8000


def test_other_containers_become_those_that_torch_reads(tmp_path: Path) -> None:
    state = {
        "defaults": defaultdict(list, a=[1]), "ordered": OrderedDict(b=1), "counts": Counter("aab"),
        "deque": deque([1, 2], 3), "frozen": frozenset({1}), "number": np.float32(0.5), "array": np.arange(3),
        np.int64(7): np.bool_(True),
    }  # fmt: skip
    found = loaded(written(state, tmp_path))
    assert torch.equal(found.pop("array"), torch.arange(3))
    assert same(
        found,
        {
            "defaults": {"a": [1]}, "ordered": OrderedDict(b=1), "counts": Counter("aab"), "deque": [1, 2],
            "frozen": {1}, "number": 0.5, 7: True,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (print, "a/0: .* is code"),
        (torch.empty(2, device="meta"), "a/0 is on the meta device"),
        (torch.ones(2).to_sparse(), "a/0 has layout"),
        (np.array(["x"]), "a/0 is a NumPy array of <U1"),
        (nn.UninitializedParameter(), "a/0 is a torch.nn.parameter.UninitializedParameter"),
        ({print: 1}, "a/0: the key"),
        (1 << 3000, "an integer of 3001 bits"),
    ],
)
def test_what_the_file_cannot_hold_is_named(odd: Any, told: str) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match=told):
        torch_file.copied({"a": [odd]})


def test_a_call_that_fails_leaves_nothing(tmp_path: Path) -> None:
    image = torch_file.copied({"large": torch.ones(600_000), "small": torch.ones(3)})
    calls: list[str] = []

    def count(call: disk.Call, do: Any) -> Any:
        calls.append(call.verb)
        return do()

    with disk.hooked(count):
        whole = named(image, tmp_path / "whole" / "state.ckpt").read_bytes()
    assert {"create", "reserve", "write", "sync"} <= set(calls)
    failed = 0
    for number in range(len(calls)):
        folder, seen = tmp_path / str(number), iter(range(len(calls)))

        def fail(call: disk.Call, do: Any, number: int = number, seen: Any = seen) -> Any:
            if next(seen, -1) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return do()

        with disk.hooked(fail):
            try:
                assert named(image, folder / "state.ckpt").read_bytes() == whole  # it was done in another way
            except OSError:
                failed += 1
                assert not folder.exists() or not list(folder.iterdir())
    assert failed >= 5


def test_what_killed_saves_left_is_swept(tmp_path: Path) -> None:
    """And not the file of a save that is under way."""
    left, others = tmp_path / ".left.ckpt.01234567.holdfast", [tmp_path / "mine.ckpt", tmp_path / ".mine.holdfast"]
    for path in (left, *others):
        path.write_text("")
    image, beside = torch_file.copied({"a": torch.ones(3)}), []

    def commit(temporary: Path) -> None:
        assert {*tmp_path.iterdir()} == {temporary, *others}, "what was left is gone"
        torch_file.write(image, tmp_path / "another.ckpt", {}, lambda path: beside.extend(tmp_path.iterdir()))
        assert temporary in beside, "another save leaves it"
        temporary.rename(tmp_path / "under way.ckpt")

    torch_file.write(image, tmp_path / "under way.ckpt", {}, commit)
    assert tmp_path / "under way.ckpt" in {*tmp_path.iterdir()} and beside


def test_an_empty_state(tmp_path: Path) -> None:
    assert loaded(written({}, tmp_path)) == {}
    assert io.BytesIO(written({"a": torch.empty(0, 3)}, tmp_path).read_bytes()).read(2) == b"PK"
