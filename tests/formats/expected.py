"""What a tensor has to be, without its values: its dtype, its shape and the SHA-256 of its bytes.

`truth` compares with them; the scripts that make golden checkpoints write them (`expected.sums`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

SUMS = "expected.sums"


@dataclass(frozen=True)
class Expected:
    """One tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    def fault(self, tensor: object, others: Mapping[str, Expected] | None = None) -> str:
        """How a tensor differs from this one, or an empty text; `others` are looked through for its bytes."""
        if not isinstance(tensor, torch.Tensor):
            return f"{self.name} is {tensor!r:.60}, not a tensor"
        if (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            return f"{self.name} is {tensor.dtype} {list(tensor.shape)}, not {self.dtype} {list(self.shape)}"
        digest = sha256(tensor)
        if digest == self.sha256:
            return ""
        why = self._reason(tensor, digest, others or {})
        return f"{self.name} ({self.dtype} {list(self.shape)}) has wrong bytes: {why}"

    def _reason(self, tensor: torch.Tensor, digest: str, others: Mapping[str, Expected]) -> str:
        if same := [name for name, other in others.items() if other.sha256 == digest]:
            return f"they are those of {', '.join(same)}"
        if tensor.dim() == 2 and sha256(tensor.reshape(tensor.shape[::-1]).T) == self.sha256:
            return "they are in the order of columns"
        if not row_major(tensor).any():
            return "they are all zero"
        return f"the first values are {tensor.flatten()[:4].tolist()}, the SHA-256 is {digest[:12]}…"


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of the tensor's bytes."""
    return hashlib.sha256(row_major(tensor).numpy()).hexdigest()


def expected(name: str, tensor: torch.Tensor) -> Expected:
    """What a tensor like this one has to be."""
    return Expected(name, tensor.dtype, tuple(tensor.shape), sha256(tensor))


def write_sums(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a line for each tensor: name, dtype, shape (such as 13x9, or - for a number), SHA-256."""
    lines = []
    for name in sorted(tensors):
        entry = expected(name, tensors[name])
        shape = "x".join(map(str, entry.shape)) or "-"
        lines.append(f"{name} {str(entry.dtype).removeprefix('torch.')} {shape} {entry.sha256}\n")
    path.write_text("".join(lines))


def read_sums(path: Path) -> dict[str, Expected]:
    """What `write_sums` wrote."""
    entries = {}
    for line in path.read_text().splitlines():
        name, dtype, shape, digest = line.split(" ")
        sizes = () if shape == "-" else tuple(map(int, shape.split("x")))
        entries[name] = Expected(name, getattr(torch, dtype), sizes, digest)
    return entries
