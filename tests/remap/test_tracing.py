"""Operations on traced tensors give the nodes of what torch makes of real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import pad

from holdfast.errors import Mismatch, Unsupported
from holdfast.remap.nodes import Saved
from holdfast.remap.tracing import Traced, node_of, refusals
from tests.remap.arrangements import evaluated

TENSORS = {"a": torch.arange(24).reshape(6, 4), "b": torch.arange(24, 48).reshape(6, 4)}
NODES = {name: Saved(name, "int64", (6, 4)) for name in TENSORS}
T = torch.Tensor

ARRANGED: dict[str, Callable[[T, T], T]] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat with an empty one": lambda a, b: torch.cat([torch.empty(0, dtype=torch.int64), a]),
    "cat with zeros": lambda a, b: torch.cat([a, torch.zeros(1, 4, dtype=torch.int64)]),
    "cat with new zeros": lambda a, b: torch.cat([a.new_zeros(2, 4), b, b.new_full((1, 4), 7)]),
    "stack": lambda a, b: torch.stack([a, b]),
    "stack at the end": lambda a, b: torch.stack([a, b], -1),
    "vstack": lambda a, b: torch.vstack([a, b]),
    "hstack": lambda a, b: torch.hstack([a, b]),
    "chunk": lambda a, b: a.chunk(4, 0)[1],
    "split": lambda a, b: a.split([1, 2, 3])[2],
    "split by size": lambda a, b: a.split(4)[1],
    "tensor_split": lambda a, b: torch.tensor_split(a, 4)[2],
    "unbind": lambda a, b: torch.unbind(a, 1)[2],
    "narrow": lambda a, b: a.narrow(0, 1, 2),
    "slice": lambda a, b: a[2:, 1:-1],
    "empty slice": lambda a, b: a[3:3],
    "steps": lambda a, b: a[1::2],
    "steps that end early": lambda a, b: a[1:, ::3],
    "row": lambda a, b: a[-1],
    "all": lambda a, b: a[...],
    "rows of an index": lambda a, b: a[torch.tensor([3, 1, 1, -1])],
    "columns of an index": lambda a, b: a[:, torch.tensor([[3, 1], [0, 1]])],
    "columns of a list": lambda a, b: a[:, [0, 3]],
    "rows of an index made beside it": lambda a, b: a[torch.arange(5, -1, -1, device=a.device)],
    "index_select": lambda a, b: a.index_select(1, torch.tensor([2, 3])),
    "t": lambda a, b: a.t(),
    "T": lambda a, b: a.T.contiguous(),
    "mT": lambda a, b: a.mT,
    "swapaxes": lambda a, b: torch.swapaxes(a, 0, 1),
    "permute": lambda a, b: a.view(2, 3, 4).permute(2, 0, 1),
    "movedim": lambda a, b: a.unflatten(0, (2, 3)).movedim(2, 0),
    "rotary halves": lambda a, b: a.view(1, 3, 2, 4).transpose(1, 2).reshape(6, 4),
    "interleaved": lambda a, b: torch.stack([a, b]).permute(1, 0, 2).reshape(12, 4),
    "flatten": lambda a, b: a.flatten(),
    "view": lambda a, b: a.reshape(-1).view(4, 6),
    "squeeze": lambda a, b: a.unsqueeze(0).squeeze(0),
    "squeeze all": lambda a, b: a[None, :, None].squeeze(),
    "expand": lambda a, b: a[None].expand(2, -1, 4),
    "repeat": lambda a, b: a.repeat(2, 1, 1),
    "tile": lambda a, b: a.tile(2, 2),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2, 0),
    "flip": lambda a, b: a.flip(0, 1),
    "roll": lambda a, b: a.roll(2, 0),
    "roll of all": lambda a, b: a.roll(3),
    "pad": lambda a, b: pad(a, (1, -1, 2, 0), value=5),
    "clone": lambda a, b: a.detach().clone().contiguous(),
    "cast": lambda a, b: a.to(torch.int64),
    "zeros_like": lambda a, b: torch.zeros_like(a),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_as_torch_arranges(name: str) -> None:
    with torch.no_grad():
        traced = ARRANGED[name](*map(Traced, NODES.values()))
        real = ARRANGED[name](*TENSORS.values())
    assert traced.shape == real.shape and traced.dtype == real.dtype and traced.is_contiguous()
    assert torch.equal(evaluated(node_of(traced), TENSORS), real)


def test_a_cast_is_noted() -> None:
    traced = Traced(Saved("a", "float32", (2,)))
    assert node_of(traced.bfloat16()).dtype == "bfloat16"
    assert node_of(torch.cat([traced, Traced(Saved("b", "bfloat16", (2,)))])).dtype == "float32"
    parameter = torch.nn.Parameter(traced)
    assert isinstance(parameter, Traced) and node_of(parameter) == traced.node


@pytest.mark.parametrize(
    "compute",
    [torch.neg, torch.sum, lambda a: torch.mul(a, 2), lambda a: torch.gt(a, 3), lambda a: a.view(torch.uint8)],
)
def test_what_computes_is_refused(compute: Callable[[T], object]) -> None:
    with pytest.raises(Unsupported, match=r"on a \(int64 \[6, 4\]\)"):
        compute(Traced(NODES["a"]))


def test_what_depends_on_other_elements_is_refused() -> None:
    a = Traced(NODES["a"])
    with pytest.raises(Unsupported, match="only one that is full of one number can be"):
        torch.cat([a, torch.arange(4)[None]])
    with pytest.raises(Unsupported, match="depends on elements"):
        torch.index_select(a, 0, Traced(Saved("i", "int64", (2,))))
    with pytest.raises(Mismatch, match="has 24 elements"):
        a.reshape(5, 5)


def test_refusals_are_noted_where_torch_hides_them() -> None:
    """An operator turns a TypeError into one of its own, which says nothing of the tensor."""
    with refusals() as noted, pytest.raises(TypeError):
        Traced(NODES["a"]) + 1
    assert "aten.add" in str(noted[0])
