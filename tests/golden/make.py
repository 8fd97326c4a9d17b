"""How the golden checkpoints are made: ``python -m tests.golden.make v1`` writes one, and none is ever edited.

A checkpoint of a released format version stays as that version wrote it; the newest one may be made anew until then.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.engine.ranks import Ranks
from holdfast.save import save_in

HERE = Path(__file__).parent
FILES: dict[str, Any] = {"config.json": b'{"layers": 2}', "text/vocab.txt": "a\nb\né\n".encode()}
WORLD = 3


def expected() -> dict[str, Any]:
    """The state that the checkpoint holds, whole."""
    tied = torch.arange(24, dtype=torch.float32).view(6, 4)
    return {
        "model": {
            "embed.weight": tied, "head.weight": tied, "regular": torch.arange(60).view(6, 10).to(torch.bfloat16),
            "cuts": torch.arange(18, dtype=torch.int16).view(6, 3),
            "boxes": torch.arange(24, dtype=torch.uint8).view(6, 4),
            "replicated": torch.arange(3000, dtype=torch.float64).view(1500, 2), "empty": torch.empty(0, 3),
            "one": torch.tensor(2.5, dtype=torch.float16), "complex": torch.arange(4).to(torch.complex64) * 1j,
            "one complex": torch.tensor(1 - 2j), "bool": torch.tensor([True, False, True]),
            "fp8": torch.arange(-4.0, 4.0).to(torch.float8_e4m3fn), "fp8 scale": torch.ones(3).to(torch.float8_e8m0fnu),
            "odd/%@[key]\n日本": torch.arange(3).to(torch.uint64),
        },
        "top": torch.arange(5, dtype=torch.int32),
        "values": [
            None, True, -7, 1 << 80, 0.1, -0.0, math.inf, "text\n½", b"\x00\xff", 1 - 2j, torch.bfloat16,
            torch.device("cuda", 1), torch.Size([2, 3]), (), [], {}, (1, ["nested", {"a": (2,)}]),
        ],
        "by number": {0: "a", 7: "b"},
        "mixed": [torch.arange(2), "beside", (torch.arange(3), 1)],
        "step": 7,
    }  # fmt: skip


def of_rank(rank: int) -> list[Any]:
    """The value that differs by rank."""
    return [rank, {"t": torch.full((2,), rank), "n": (None, 1.5)}]


def state_of(rank: int) -> dict[str, Any]:
    """What one rank brings: its shards of three tensors, and the rest as everybody has it."""
    state = expected()
    model = state["model"]
    boxes = {
        "regular": [(0, 2, 0, 10), (2, 4, 0, 10), (4, 6, 0, 10)],
        "cuts": [(0, 1, 0, 3), (1, 5, 0, 3), (5, 6, 0, 3)],
        "boxes": [(0, 6, 0, 1), (0, 3, 1, 4), (3, 6, 1, 4)],
    }
    for name, of in boxes.items():
        a, b, c, d = of[rank]
        model[name] = holdfast.Shard(model[name][a:b, c:d], (6, model[name].shape[1]), (a, c))
    state["own"] = holdfast.PerRank(of_rank(rank))
    return state


def make(path: Path) -> None:
    """Save it, each rank a thread of this process."""
    store = dist.HashStore()

    def one(rank: int) -> None:
        with Ranks(rank, WORLD, store).call("save", saving=True) as call:
            save_in(call, state_of(rank), path, step=7, files=FILES, overwrite=False, run="0123456789abcdef")

    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(one, range(WORLD)))


if __name__ == "__main__":
    make(HERE / sys.argv[1])
