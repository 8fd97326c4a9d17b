"""How our own golden checkpoints are made: ``python -m tests.golden.make v1`` writes one, and none is ever edited.

A checkpoint of a released format version stays as that version wrote it; the newest one may be made anew until then.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast
from holdfast.commit.job import Job
from holdfast.ranks.ranks import Ranks
from holdfast.save import save_in
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.urls import location

HERE = LocalPlace(__file__).parent
FILES: dict[str, Any] = {"config.json": b'{"layers": 2}', "text/vocab.txt": "a\nb\né\n".encode()}
WORLD = 3


class Holder:
    """An object with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def expected(version: str) -> dict[str, Any]:
    """The state that the checkpoint of a version holds, whole."""
    return first() if version == "v1" else {**first(), **second()}


def second() -> dict[str, Any]:
    """What version 2 has beyond version 1."""
    return {
        "containers": {
            "set": {1, "a", (2, None)}, "frozen": frozenset({frozenset({1}), b"x"}), "deque": deque([1, [2]], 5),
            "ordered": OrderedDict(b=1, a=OrderedDict()), "counter": Counter({3: 2, 5: 1}), "bytes": bytearray(b"\0x"),
            "default": defaultdict(list, {1.5: [1]}), "of nothing": defaultdict(None, a=1), "endless": deque(),
            "keys": {None: 0, True: 1, 2.5: 2, b"x": 3, (1, ("y", None)): 4, "None": 5, -7: 6, "-7": 7}, "n": 1,
            "array": np.arange(6, dtype=">i2").reshape(2, 3), "text": np.array(["é", ""]), "number": np.array(1 + 2j),
            "time": np.array([1], "M8[s]"), "none": np.empty((0, 2), "f4"),
        },
        "long": {
            "floats": [math.nan, -0.0, math.inf, *(i / 7 for i in range(1024))], "ints": list(range(-512, 512)),
            "dicts": [{"step": i, "loss": i / 3} for i in range(512)], "keys": {i: str(i) for i in range(1024)},
            "odd": [{1}, ("$", {"$": np.arange(2)})] * 342,
        },
        "ordered": {"empty": [], "first": 1, "nothing": {}, "last": (2,)},
        "object": {"n": 1, "t": torch.arange(3), "none": {}, "deque": deque([torch.ones(1), 2]), (1, 2): torch.ones(2)},
    }  # fmt: skip


def first() -> dict[str, Any]:
    """What version 1 has."""
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


def of_rank(version: str, rank: int) -> list[Any]:
    """The value that differs by rank."""
    own = [rank, {"t": torch.full((2,), rank), "n": (None, 1.5)}]
    return own if version == "v1" else [*own, {rank}, {(rank, "x"): deque([torch.ones(1)])}, np.full(2, rank)]


def state_of(version: str, rank: int) -> dict[str, Any]:
    """What one rank brings: its shards of three tensors, and the rest as everybody has it."""
    state = expected(version)
    if "object" in state:
        state["object"] = Holder(state["object"])
    model = state["model"]
    boxes = {
        "regular": [(0, 2, 0, 10), (2, 4, 0, 10), (4, 6, 0, 10)],
        "cuts": [(0, 1, 0, 3), (1, 5, 0, 3), (5, 6, 0, 3)],
        "boxes": [(0, 6, 0, 1), (0, 3, 1, 4), (3, 6, 1, 4)],
    }
    for name, of in boxes.items():
        a, b, c, d = of[rank]
        model[name] = holdfast.Shard(model[name][a:b, c:d], (6, model[name].shape[1]), (a, c))
    state["own"] = holdfast.PerRank(of_rank(version, rank))
    return state


def make(version: str, path: Path) -> None:
    """Save it, each rank a thread of this process."""
    store = dist.HashStore()

    def one(rank: int) -> None:
        with Ranks(rank, WORLD, store).call("save", saving=True) as call:
            save_in(call, Job(call.ranks, location(path), 7, "0123456789abcdef"), state_of(version, rank), FILES)

    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(one, range(WORLD)))


if __name__ == "__main__":
    make(sys.argv[1], HERE / sys.argv[1])
