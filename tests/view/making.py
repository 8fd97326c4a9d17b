"""Checkpoints for tests of pages: saved ones, and manifests of what would be too large to save.

A drafted one is read as any other, but has no files. Never used where bytes of tensors matter.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from holdfast.ondisk import dtypes, manifest
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord, cells_for
from holdfast.ondisk.datafile import file_name
from holdfast.ondisk.manifest import Manifest, ranges

SAVE, RUN = "7c1e09ab52d3f410", "51b2c0de51b2c0de"


def drafted(
    folder: Path, tensors: dict[str, TensorRecord], *, ranks: int = 1, sections: tuple[str, ...] = ("model",),
    **said: Any,
) -> Path:  # fmt: skip
    """A folder with the manifest of such a state: ``ranks`` files in each section."""
    claimed = sum(prod(t.shape) * dtypes.itemsize(t.dtype) for t in tensors.values())
    each = claimed // (ranks * len(sections)) + 5000
    files: list[list[str | int]] = [
        [file_name(section, rank, ranks, SAVE), each, 4096, "0" * 32] for section in sections for rank in range(ranks)
    ]
    known: dict[str, Any] = {
        "save": SAVE, "run": RUN, "step": 1200, "created": "2026-03-04T05:06:07Z",
        "producer": {"holdfast": "0.1.0", "torch": "2.13.0"}, "world_size": ranks, "files": files, "tensors": tensors,
        "values": {}, "containers": {}, "aliases": {}, "per_rank": {}, "attachments": [],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest.encode(Manifest(**{**known, **said})))
    return folder


def record(dtype: str, shape: tuple[int, ...], boxes: list[Box], files: list[int]) -> TensorRecord:
    """A tensor in these boxes, each in the file of that number."""
    cells, order = cells_for(shape, boxes)
    return TensorRecord(dtype, shape, cells, ranges([files[i] for i in order]))


def rows(dtype: str, shape: tuple[int, ...], ranks: int, first: int = 0) -> TensorRecord:
    """A tensor whose rows are shared out as FSDP does."""
    each = -(-shape[0] // ranks)
    starts = range(0, shape[0], each)
    boxes = [Box((s, *(0,) * (len(shape) - 1)), (min(each, shape[0] - s), *shape[1:])) for s in starts]
    return record(dtype, shape, boxes, [first + i for i in range(len(boxes))])


def llama(folder: Path, *, layers: int = 32, width: int = 4096, ranks: int = 64) -> Path:
    """The state of a Llama in training: bf16 weights, two moments in float32, over ``ranks``."""
    kinds = {
        "attention.wq.weight": (width, width), "attention.wk.weight": (width // 4, width),
        "attention.wv.weight": (width // 4, width), "attention.wo.weight": (width, width),
        "feed_forward.w1.weight": (width * 7 // 2, width), "feed_forward.w2.weight": (width, width * 7 // 2),
        "feed_forward.w3.weight": (width * 7 // 2, width),
        "attention_norm.weight": (width,), "ffn_norm.weight": (width,),
    }  # fmt: skip
    shapes = {f"layers.{n}.{kind}": shape for n in range(layers) for kind, shape in kinds.items()}
    shapes |= {"tok_embeddings.weight": (128256, width), "norm.weight": (width,), "output.weight": (128256, width)}
    tensors = {f"model/{name}": rows("bfloat16", shape, ranks) for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        tensors |= {
            f"optimizer/state/{n}/{moment}": rows("float32", shape, ranks, ranks) for n, shape in shapes.items()
        }
    return drafted(folder, tensors, ranks=ranks, sections=("model", "optimizer"))
