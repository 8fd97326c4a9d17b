"""Saves of fixed states on many meshes, with the save id and the run id fixed, and digests of the files they leave.

Run on the ranks of a pool by `test_same_bytes`; `python -m tests.oracle.saves` records anew what they write. Record
only after a change that is meant to write other bytes, and say so in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.state.tensors import FlatShard
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests import meshes, pool
from tests.golden import make

RECORD = Path(__file__).parent / "saves.json"
RUN = "0123456789abcdef"
FIRST, SECOND = "0101010101010101", "0202020202020202"
"""Save ids; the second is that of a save that builds on the first."""

WAYS = ("save", "thread", "process", "store", "store thread")
"""How one state is saved: blocking, or by a `Saver` with this worker; to a path or to a store."""


def of_mesh(layout: str) -> dict[str, Any]:
    """A model and an optimizer on a mesh. What they hold depends on positions alone, and on no arithmetic."""
    torch.manual_seed(0)
    model = meshes.LAYOUTS[layout][1](meshes.Model())
    optimizer = meshes.optimizer_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    for number, tensor in enumerate([*model.parameters(), *model.buffers(), *kept]):
        fill(tensor, number)
    return {"model": model, "optimizer": optimizer, "step": 3, "own": holdfast.PerRank({"rank": rank_here()})}


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fill(tensor: torch.Tensor, start: int) -> None:
    """Small integers, the same on each rank for shards of one shape."""
    local = getattr(tensor, "_local_tensor", tensor).data
    local.copy_(((torch.arange(local.numel()) + start) % 101).view(local.shape).to(local.dtype))


def values_and_shards() -> dict[str, Any]:
    """Every kind of value and container, explicit shards, odd dtypes: the state of the golden checkpoints."""
    return make.state_of("v2", dist.get_rank())


def large() -> dict[str, Any]:
    """Tensors of several blocks, with gaps, of one element and of none, in several sections."""
    many = torch.arange(5 << 20, dtype=torch.float32)
    columns, transposed = many.view(1024, -1)[:, ::2], many[: 1 << 20].view(1024, -1).t()
    return {
        "model": {"large": many, "columns": columns, "transposed": transposed},
        "ema": {f"t{number}": torch.full((number,), number, dtype=torch.bfloat16) for number in range(300)},
        "optimizer": {"of one": torch.tensor(1.0), "of none": torch.empty(0, 4), "bytes": (many % 251).to(torch.uint8)},
    }  # fmt: skip


def flat() -> dict[str, Any]:
    """Tensors that were flattened and cut at odd places, and uneven boxes, on three ranks."""
    rank, whole = dist.get_rank(), torch.arange(7 * 11, dtype=torch.int64)
    ends = [0, 5, 40, 77]
    begin, end = ends[rank], ends[rank + 1]
    rows = [0, 1, 1, 7]
    return {
        "flat": FlatShard(whole[begin:end], (7, 11), begin),
        "rows": holdfast.Shard(whole.view(7, 11)[rows[rank] : rows[rank + 1]], (7, 11), (rows[rank], 0)),
    }


class Tied(nn.Module):
    """Tied weights, a module without tensors, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.second.weight = self.first.weight

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 3, "table": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


def tied() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), 2)
    for number, tensor in enumerate(model.parameters()):
        fill(tensor, number)
    return {"models": [model], "scheduler": scheduler}


def bare() -> dict[str, Any]:
    """What torch's functions give of FSDP2: DTensors in dicts."""
    state = of_mesh("FSDP2 2")
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer}


STATES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "values and shards": (make.WORLD, values_and_shards),
    "large": (1, large),
    "large, replicated": (2, large),
    "flat": (3, flat),
    "tied": (1, tied),
    "bare": (2, bare),
}
CASES = [*meshes.LAYOUTS, *STATES]


def world_of(case: str) -> int:
    return STATES[case][0] if case in STATES else meshes.LAYOUTS[case][0]


@contextmanager
def save_id(wanted: str) -> Iterator[None]:
    """The next save has this id. The first rank draws it, and draws nothing of this length before."""
    ids, drawn = [wanted] if rank_here() == 0 else [], secrets.token_bytes

    def token_bytes(count: int = 32) -> bytes:
        return bytes.fromhex(ids.pop()) if count == 8 and ids else drawn(count)

    with mock.patch.object(secrets, "token_bytes", token_bytes):
        yield


def write(case: str, folder: str) -> None:
    """Save a state in all `WAYS`, and once more with another step, building on the first. Called on each rank."""
    state = STATES[case][1]() if case in STATES else of_mesh(case)
    options: dict[str, Any] = {"step": 3, "run": RUN, "files": {"config.json": b"{}", "text/a.txt": "é".encode()}}
    for way in WAYS:
        place = StorePlace(Local(folder), way) if way.startswith("store") else Path(folder) / way
        worker = way.rpartition(" ")[2]
        with save_id(FIRST):
            if worker in ("thread", "process"):
                with holdfast.Saver(worker=worker) as saver:
                    saver.save(state, place, **options).wait()
            else:
                holdfast.save(state, place, **options)
    with save_id(SECOND):
        base = Path(folder) / "save"
        holdfast.save({**state, "step": 4}, Path(folder) / "incremental", run=RUN, base=base)


def files_of(folder: Path) -> dict[str, list[Any]]:
    """Size and digest of every file of a checkpoint; of the manifest without the time, the versions and its own sum."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "manifest.json":
                record = json.loads(data)
                for key in ("created", "digest"):
                    del record[key]
                record["producer"] = sorted(record["producer"])
                data = json.dumps(record).encode()
            found[path.relative_to(folder).as_posix()] = [len(data), hashlib.sha256(data).hexdigest()[:32]]
    return found


def written(case: str) -> dict[str, dict[str, list[Any]]]:
    """The files of all saves of a case, by the save's folder; equal ones are told once, under the names of all."""
    with tempfile.TemporaryDirectory() as folder:
        pool.run(world_of(case), write, case, folder)
        by_files: dict[str, list[str]] = {}
        for save in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
            by_files.setdefault(json.dumps(files_of(save)), []).append(save.name)
        return {", ".join(names): json.loads(files) for files, names in by_files.items()}


if __name__ == "__main__":
    record = {"torch": torch.__version__.partition("+")[0], "saves": {case: written(case) for case in CASES}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
