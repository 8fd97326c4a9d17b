"""Bytes on their way to views that cannot be read into: in a forked process, transposed, many small on a device."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.buffers import scatter
from holdfast.buffers.memory import buffer
from tests.gpu.standin import Pretended, pretend, pretend_states


def test_a_forked_process_reads_with_several_threads(tmp_path: Path) -> None:
    state = {"model": {f"w{i}": torch.arange(5000.0) for i in range(8)}}
    holdfast.save(state, tmp_path / "c")
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        told = b"not done"
        try:
            before = scatter._forked.is_set()
            into = {"model": {f"w{i}": torch.zeros(5000, dtype=torch.float64) for i in range(8)}}
            holdfast.load(tmp_path / "c", into, cast=True)
            whole = all(torch.equal(into["model"][n].float(), w) for n, w in state["model"].items())
            told = repr((before, scatter._forked.is_set(), whole)).encode()
        finally:
            os.write(write, told)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "(True, False, True)", "noted by the fork, mended by the first read"
    os.waitpid(pid, 0)
    assert not scatter._forked.is_set()


KINDS = [torch.zeros(3, 5), torch.tensor(0, dtype=torch.int64), torch.zeros(7, dtype=torch.bfloat16), torch.zeros(0, 4)]


class Full(Pretended):
    """On a device that has no memory left."""

    def new_empty(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("kind", [Pretended, Full])
def test_small_tensors_come_in_one_copy_whatever_lies_between_them(kind: type[Pretended]) -> None:
    views = [tensor.clone().as_subclass(kind) for tensor in [*KINDS, *KINDS]]
    memory, at, parts = buffer(4096), 3, []
    for number, view in enumerate(views):
        memory.view[at : at + view.nbytes] = bytes((31 * number + i) % 100 for i in range(view.nbytes))
        parts.append((at, view))
        at += view.nbytes + 13 * (number % 3)
    scatter.scatter_small(memory.address, parts)
    for at, view in parts:
        there = bytes(view.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8).tolist())
        assert there == bytes(memory.view[at : at + view.nbytes])


def test_many_small_tensors_are_copied_to_a_device_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {f"w{i}": torch.full((i % 50,), float(i)) for i in range(500)}
    holdfast.save({"model": there}, tmp_path / "c")
    here = {name: torch.zeros_like(tensor) for name, tensor in there.items()}
    pretend(monkeypatch)
    pretend_states(monkeypatch)
    real, copies = scatter.host_tensor, []
    monkeypatch.setattr(scatter, "host_tensor", lambda *args: copies.append(args) or real(*args))
    holdfast.load(tmp_path / "c", {"model": here})
    assert all(torch.equal(here[name], tensor) for name, tensor in there.items())
    assert len(copies) < 5, "each would wait for the stream"


@pytest.mark.parametrize("which", [0, 250, 499])
def test_a_damaged_small_tensor_does_not_reach_a_device(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {f"w{i}": torch.full((9,), i + 0.5) for i in range(500)}
    holdfast.save({"model": there}, tmp_path / "c")
    file = next((tmp_path / "c").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[data.index(there[f"w{which}"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    here = {name: torch.zeros_like(tensor) for name, tensor in there.items()}
    pretend(monkeypatch)
    pretend_states(monkeypatch)
    with pytest.raises(holdfast.errors.Damaged, match=rf"w{which}\b"):
        holdfast.load(tmp_path / "c", {"model": here})
    assert not here[f"w{which}"].any()


@given(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 200), st.integers(1, 200), st.integers(0, 3),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]),
)  # fmt: skip
def test_an_array_comes_into_a_view_whose_last_axes_are_swapped(
    outer: list[int], rows: int, columns: int, margin: int, dtype: torch.dtype
) -> None:
    # The limit is small here, so that a part is less than a matrix.
    count = prod(outer) * rows * columns
    numbers = (
        torch.arange(count * dtype.itemsize).remainder(251).to(torch.uint8).view(dtype).view(*outer, rows, columns)
    )
    memory = torch.zeros(*outer, columns, margin + rows + margin, dtype=dtype)
    view = memory[..., margin : margin + rows].mT
    with mock.patch.object(scatter, "TRANSPOSED", 4000):
        scatter.deliver(numbers, view)
    assert bytes_of(torch.empty_like(numbers).copy_(view)) == bytes_of(numbers)
    memory[..., margin : margin + rows] = 0
    assert not memory.any(), "nothing beside the view was changed"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()
