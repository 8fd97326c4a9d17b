"""Would lossless compression pay? Ratio and CPU time on the state of a model that is trained here, on real text.

    python -m benchmarks.compression [--quick]

Trains a small transformer on Python's own library, once with weights and moments in float32 and once in bfloat16, and
compresses each kind of tensor by blocks of a data file. Needs zstandard (`pip install zstandard`); lz4 is measured too
if it is there (`pip install lz4`).
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import nn
from torch.nn import functional

from benchmarks.frame import machine, options_of, say, write
from benchmarks.report import tell_facts
from holdfast.ondisk.blocks import BLOCK

try:
    import zstandard
except ImportError:
    zstandard = None
try:
    import lz4.frame as lz4
except ImportError:
    lz4 = None

GIB = 1 << 30
SAMPLE = 64 << 10
"""Bytes of a plane that are tried before the rest of it is."""

WORTH = 0.97
"""A plane whose sample does not come below this share of its bytes is kept as it is."""


class Size(NamedTuple):
    """Of the model and its training."""

    width: int = 256
    layers: int = 6
    context: int = 128
    batch: int = 8
    steps: int = 300


class LanguageModel(nn.Module):
    """A transformer over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.place = nn.Embedding(size.context, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.width // 64, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.head = nn.Linear(size.width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight
        return self.head(self.layers(x, mask=self.mask.to(x.dtype), is_causal=True))


def text() -> torch.Tensor:
    """The sources of Python's library, one after the other, as bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def train(size: Size, dtype: torch.dtype, corpus: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Kinds of tensors after training, each kind laid end to end; the loss at the beginning and at the end."""
    torch.manual_seed(0)
    model = LanguageModel(size).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, size.steps, pct_start=0.1)
    losses = []
    for _ in range(size.steps):
        starts = torch.randint(len(corpus) - size.context - 1, (size.batch,))
        rows = torch.stack([corpus[s : s + size.context + 1] for s in starts.tolist()]).long()
        loss = functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    name = str(dtype).removeprefix("torch.")
    found = {f"weights, {name}": [p.detach() for p in model.parameters()]}
    for key in ("exp_avg", "exp_avg_sq"):
        found[f"{key}, {name}"] = [optimizer.state[p][key] for p in model.parameters()]
    if dtype == torch.float32:  # what mixed precision computes with, beside float32 masters
        found["weights, bfloat16 of float32 masters"] = [p.detach().bfloat16() for p in model.parameters()]
    return {kind: torch.cat([t.flatten() for t in of]) for kind, of in found.items()}, losses


Bytes = bytes | memoryview
Planes = np.ndarray[Any, np.dtype[np.uint8]]
Coder = tuple[Callable[[Bytes], bytes], Callable[[Bytes], bytes]]


def _planes(block: torch.Tensor) -> Planes:
    """The first bytes of all elements, then the second ones, …; numpy does this 5 times as fast as torch."""
    return block.view(torch.uint8).view(-1, block.itemsize).numpy().T.copy()


def _restored(data: Bytes, dtype: torch.dtype) -> torch.Tensor:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    whole = np.empty((planes.shape[1], planes.shape[0]), dtype=np.uint8)
    for at, plane in enumerate(planes):
        whole[:, at] = plane
    return torch.from_numpy(whole).view(dtype).flatten()


class Packed(NamedTuple):
    """A block in parts; True: the part was compressed."""

    parts: list[tuple[bool, Bytes]]

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.parts)


@dataclass(frozen=True)
class Method:
    """A way to compress a block: as it lies, its planes in one, or ``apart``: each, unless a sample does not shrink."""

    name: str
    coder: Coder
    shuffle: bool = True
    apart: bool = False

    def pack(self, block: torch.Tensor) -> Packed:
        encode = self.coder[0]
        if not self.shuffle:
            return Packed([(True, encode(block.view(torch.uint8).numpy().data))])
        planes = _planes(block)
        if not self.apart:
            return Packed([(True, encode(planes.data))])
        parts = []
        for plane in planes:
            data = plane.data
            middle = len(data) // 2
            sample = data[middle : middle + SAMPLE]
            worth = len(encode(sample)) < WORTH * len(sample)
            parts.append((worth, encode(data) if worth else data))
        return Packed(parts)

    def unpack(self, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
        parts = [self.coder[1](part) if coded else part for coded, part in packed.parts]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return (
            _restored(data, dtype)
            if self.shuffle
            else torch.from_numpy(np.array(np.frombuffer(data, dtype=np.uint8))).view(dtype)
        )


def methods() -> list[Method]:
    """What can be measured here."""
    found = []
    for level in (1, 3) if zstandard is not None else ():
        coder = (zstandard.ZstdCompressor(level=level).compress, zstandard.ZstdDecompressor().decompress)
        found += [
            Method(f"zstd {level}, as it lies", coder, shuffle=False),
            Method(f"zstd {level}, byte planes", coder),
            Method(f"zstd {level}, planes apart", coder, apart=True),
        ]
    if lz4 is not None:
        coder = (lz4.compress, lz4.decompress)
        found += [Method("lz4, byte planes", coder), Method("lz4, planes apart", coder, apart=True)]
    return found


@dataclass(frozen=True)
class Row:
    """``ratio``: bytes before over bytes after. CPU seconds of one core for each GiB of tensors."""

    kind: str
    method: str
    nbytes: int
    ratio: float
    compress: float
    decompress: float

    @property
    def in_turn(self) -> float:
        """GB/s of a core's share of the way out below which compressing first and sending then is sooner done."""
        return (1 - 1 / self.ratio) / self.compress * GIB / 1e9 if self.ratio > 1 else 0.0

    @property
    def overlapped(self) -> float:
        """The same if one block is compressed while the one before it is sent, on a core that is free for it."""
        return GIB / 1e9 / self.compress if self.ratio > 1 else 0.0


def measure(kind: str, tensor: torch.Tensor, method: Method, turns: int) -> Row:
    """The best of some turns over all blocks; raises ValueError if what comes back is not what went in."""
    per = BLOCK // tensor.itemsize
    blocks = [tensor[i : i + per] for i in range(0, len(tensor), per)]
    coding, decoding = [], []
    for _ in range(turns):
        began = process_time()
        packed = [method.pack(block) for block in blocks]
        middle = process_time()
        back = [method.unpack(one, tensor.dtype) for one in packed]
        decoding.append(process_time() - middle)
        coding.append(middle - began)
    for block, found in zip(blocks, back, strict=True):
        if not torch.equal(block.view(torch.uint8), found.view(torch.uint8)):
            raise ValueError(f"{method.name} gave back other bytes of {kind}")
    gib = tensor.nbytes / GIB
    ratio = tensor.nbytes / sum(one.nbytes for one in packed)
    return Row(kind, method.name, tensor.nbytes, ratio, min(coding) / gib, min(decoding) / gib)


def show(rows: list[Row], facts: dict[str, object]) -> None:
    """Print everything."""
    console = tell_facts(facts, width=132)
    table = Table(title="lossless compression, one core", title_justify="left", title_style="bold")
    columns = (
        "kind", "method", "MB", "ratio", "compress\nCPU s / GiB", "decompress\nCPU s / GiB",
        "pays below\nin turn, GB/s", "pays below\noverlapped, GB/s",
    )  # fmt: skip
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    last = ""
    for row in rows:
        figures = (row.ratio, row.compress, row.decompress, row.in_turn, row.overlapped)
        kind, size = (row.kind, f"{row.nbytes / 1e6:.0f}") if row.kind != last else ("", "")
        table.add_row(kind, row.method, size, *(f"{figure:.2f}" for figure in figures))
        last = row.kind
    console.print(table)


def main() -> int:
    """The command."""
    small = "a smaller model, some steps of training, one turn"
    options = options_of("compression", __doc__, quick=small, writes=False).parse_args()
    if zstandard is None:
        print("zstandard is not installed, so there is nothing to measure: pip install zstandard")
        return 0
    size, turns = (Size(width=128, layers=2, steps=60), 1) if options.quick else (Size(), 3)
    torch.set_num_threads(1)
    corpus, rows, losses = text(), [], {}
    for dtype in (torch.float32, torch.bfloat16):
        tensors, told = train(size, dtype, corpus)
        losses[str(dtype)] = (round(told[0], 2), round(sum(told[-10:]) / len(told[-10:]), 2))
        say(f"trained in {dtype}: loss {losses[str(dtype)][0]} to {losses[str(dtype)][1]}")
        rows += [measure(kind, t, method, turns) for kind, t in tensors.items() for method in methods()]
    facts: dict[str, object] = {
        "model": f"{size._asdict()}, on {len(corpus) / 1e6:.1f} MB of text; loss before and after: {losses}",
        "blocks": f"{BLOCK >> 20} MiB of one kind, tensors end to end; times with the bytes laid in planes and back",
        "zstandard": zstandard.__version__,
        **machine(),
    }
    plain = [{**asdict(row), "in_turn": row.in_turn, "overlapped": row.overlapped} for row in rows]
    show(rows, facts)
    write(options.out, facts, plain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
