"""Very many small tensors of every kind in one state: each comes back, bit by bit, over several volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.ondisk import dtypes
from holdfast.plan import plan

COUNT = 20_000
DTYPES = ["float32", "bfloat16", "int64", "bool", "uint8", "complex64", "float8_e4m3fn", "float64", "int16", "uint32"]
SHAPES: list[tuple[int, ...]] = [(16,), (64,), (1,), (), (0,), (3, 5), (2, 1, 7), (4, 0, 2), (33,), (2, 2, 2, 2)]


def one(number: int) -> torch.Tensor:
    """Of ever another type, shape and layout: the periods have no common divisor."""
    dtype, shape = dtypes.torch_dtype(DTYPES[number % 10]), SHAPES[number // 10 % 10]
    elements = torch.Size(shape).numel()
    memory = torch.full((elements * dtype.itemsize,), number % 2 if dtype is torch.bool else number % 251).byte()
    tensor = memory.view(dtype).view(shape)
    match number % 7:
        case 3 if len(shape) > 1:
            return tensor.transpose(0, -1)
        case 4 if shape:
            return tensor[::2]
        case 5 if dtype.is_complex:
            return tensor.conj()
    return tensor


def bytes_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), plain.view(-1).view(torch.uint8).tolist() if plain.numel() else []


@pytest.mark.slow
def test_many_small_tensors_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROOM", 1 << 20)
    flat = {f"e{n % 17}.{n}.scale": one(n) for n in range(COUNT // 2)}
    deep: dict[str, Any] = {}
    for n in range(COUNT // 2, COUNT):
        deep.setdefault(f"layer{n % 23}", {}).setdefault(f"{n // 23 % 29}", {})[f"w{n}"] = one(n)
    state = {"flat": flat, "deep": deep, "large": torch.arange(3 << 20), "step": 3}
    checkpoint = holdfast.save(state, tmp_path / "c")
    assert len([f for f in checkpoint.manifest.data_files if f.path.startswith("flat/")]) > 1
    checkpoint.verify()

    into = {"flat": _zeros(flat), "deep": _zeros(deep), "large": torch.zeros(3 << 20, dtype=torch.int64), "step": 0}
    loaded = holdfast.load(tmp_path / "c", into)
    assert loaded.bytes_unverified == 0
    _same(state, into)
    _same(state, holdfast.open(tmp_path / "c").state_dict())


def _zeros(state: dict[str, Any]) -> dict[str, Any]:
    """The same without its numbers; half of what has axes to turn lies turned."""
    return {name: _zeros(v) if isinstance(v, dict) else _zero(v, len(name) % 2 == 0) for name, v in state.items()}


def _zero(tensor: torch.Tensor, turned: bool) -> torch.Tensor:
    axes = tuple(reversed(range(tensor.dim()))) if turned else tuple(range(tensor.dim()))
    return torch.zeros([tensor.shape[axis] for axis in axes], dtype=tensor.dtype).permute(axes)


def _same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert set(a) == set(b)
        for name, value in a.items():
            _same(value, b[name])
    elif isinstance(a, torch.Tensor) and a.numel() < 1000:
        assert bytes_of(a) == bytes_of(b)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b
