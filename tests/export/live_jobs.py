"""What ranks of a pool do in the tests of conversions from live states."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.export import live, live_joint, live_windows, patches
from holdfast.export.work import Converted
from holdfast.ranks.ranks import ranks_of
from holdfast.read.shared.relay import Lost
from holdfast.remap import Pad, Remap
from tests import meshes
from tests.export import states
from tests.remap import models


def trained(layout: str, folder: str) -> Converted:
    """Convert a model and its optimizer from memory, and by way of a checkpoint."""
    state = meshes.build(layout, 3, steps=1)
    live = holdfast.convert(state, f"{folder}/live", to="huggingface")
    holdfast.save(state, f"{folder}/saved")
    holdfast.convert(f"{folder}/saved", f"{folder}/converted", to="huggingface")
    return live


def small(target: str, options: dict[str, Any]) -> Converted:
    """Convert what the tests of other sources have as a checkpoint."""
    return holdfast.convert(states.of_rank(dist.get_rank()), target, to="huggingface", extras=states.FILES, **options)


def sharded(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The same tensors on any number of ranks, each cut along another axis."""
    return spread({name: full_tensor(seed + number, shape) for number, (name, shape) in enumerate(shapes.items())})


def spread(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that all ranks have, each cut along another axis, or not at all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        full = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        axis = number % (tensor.dim() + 1)
        state[name] = full.redistribute(mesh, [Shard(axis)]) if axis < tensor.dim() else full
    return state


def full_tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (5003, 700), "columns": (1999, 1201), "deep": (3, 401, 1021), "norm": (4099,), "inner": (64, 7, 3),
    "one": (), "thin": (4001, 2), **{f"small.{n}": (n % 7 + 1, n % 5 + 1) for n in range(400)},
}  # fmt: skip


def on_two_machines(target: str) -> Converted:
    """Convert as if each rank were on a machine of its own."""
    ranks = ranks_of()
    before, ranks.host, ranks.hosts = ranks.host, f"node{ranks.rank}", None
    try:
        return holdfast.convert({"model": sharded(5, SHAPES)}, target, to="huggingface")
    finally:
        ranks.host, ranks.hosts = before, None


def on_one_machine(target: str, options: dict[str, Any]) -> Converted:
    return holdfast.convert({"model": sharded(5, SHAPES)}, target, to="huggingface", **options)


def with_too_many_edges(target: str) -> None:
    """Two machines that share nearly every page of a large tensor."""
    live.EDGES, before = 1 << 20, live.EDGES
    try:
        on_two_machines(target)
    finally:
        live.EDGES = before


def with_another_state(target: str) -> None:
    """One rank has a tensor of another shape."""
    model = {"w": torch.ones(4 + dist.get_rank()), "v": torch.ones(3)}
    holdfast.convert({"model": model}, target, to="huggingface")


def with_other_arguments(target: str) -> None:
    model = {"w": torch.ones(4), "v": torch.ones(3)}
    holdfast.convert({"model": model}, target, to="huggingface", rename={"v": f"v{dist.get_rank()}"})


def without_a_state(target: str) -> None:
    """One rank's state cannot be gathered."""
    odd = torch.empty(3, device="meta") if dist.get_rank() else torch.ones(3)
    holdfast.convert({"model": {"w": odd}}, target, to="huggingface")


def with_a_bad_disk(target: str) -> None:
    """One rank cannot write."""

    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", target)

    original = live_windows.write
    if dist.get_rank():
        live_windows.write = broken
    try:
        holdfast.convert({"model": sharded(5, SHAPES)}, target, to="huggingface")
    finally:
        live_windows.write = original


def and_be_killed(target: str) -> None:
    """One rank is killed once it has written something."""

    def kill(event: holdfast.events.Event) -> None:
        if event.kind == "advance" and dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.events.listen(kill):
        holdfast.convert({"model": sharded(5, SHAPES)}, target, to="huggingface", deadline=6)


def measured(target: str, rows: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of this rank's state, and how much resident memory rises."""
    rank, width = dist.get_rank(), 4000
    by_row = holdfast.Shard(torch.full((rows, width), rank + 1.0), (2 * rows, width), (rank * rows, 0))
    by_column = holdfast.Shard(torch.full((rows, width), rank + 1.0), (rows, 2 * width), (0, rank * width))
    state = {"model": {"r": by_row, "c": by_column}}
    holdfast.convert({"model": {"w": torch.ones(9)}}, f"{target}.first", to="huggingface")  # modules are imported
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    holdfast.convert(state, target, to="huggingface", dtype=dtype)
    return 2 * by_row.tensor.nbytes, _status("VmHWM") - before


def _status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def together(target: str, how: str) -> int:
    """Convert with small windows; how many of them this rank has filled together with others.

    ``how``: "together", "refused" (ranks cannot share memory), "left" (a rank leaves in between) or "failed".
    """
    kept = live.meet, live_joint.fill, [module.WINDOW for module in (patches, live_windows, live_joint)]
    seen: list[int] = []

    def refused(*args: Any) -> Any:
        raise Lost("no memory to share")

    def fill(*args: Any) -> None:
        seen.append(1)
        if dist.get_rank() and len(seen) == 5 and how in ("left", "failed"):
            raise Lost("gone") if how == "left" else OSError(errno.EIO, "Input/output error", target)
        kept[1](*args)

    try:
        live_joint.fill = fill
        live.meet = refused if how == "refused" else live.meet
        for module in (patches, live_windows, live_joint):
            module.WINDOW = 1 << 20
        holdfast.convert({"model": sharded(5, SHAPES)}, target, to="huggingface")
    finally:
        live.meet, live_joint.fill = kept[:2]
        for module, window in zip((patches, live_windows, live_joint), kept[2], strict=True):
            module.WINDOW = window
    return len(seen)


def _padded(pad: Pad) -> Remap:
    rules = models.HUB_TO_NATIVE.rules
    return Remap([*rules[:-1], pad, rules[-1]], models.HUB_TO_NATIVE.values)


MAPS: dict[str, tuple[type[torch.nn.Module], Remap]] = {
    "to hub": (models.Native, models.HUB_TO_NATIVE.inverse()),
    "to native": (models.Hub, models.HUB_TO_NATIVE),
    "padded": (models.Hub, _padded(Pad("tok.weight", 0, after=14, value=0.5))),
    "padded by the last": (models.Hub, _padded(Pad("tok.weight", 0, after=14, like=-1))),
}


def under_a_map(folder: str, called: str, dtype: torch.dtype | None) -> Converted:
    """Convert a model into the other layout, from memory and by way of a checkpoint, its tensors cut along all axes."""
    torch.manual_seed(3)
    kind, remap = MAPS[called]
    model = kind().state_dict()
    if dist.is_initialized():
        model = spread(model)
        model |= {"head.weight": model["tok.weight"]} if called == "to hub" else {}
    state = {"model": model, "optimizer": {"m": torch.ones(3)}}
    live = holdfast.convert(state, f"{folder}/live", to="huggingface", remap=remap, dtype=dtype)
    holdfast.save(state, f"{folder}/saved")
    holdfast.convert(f"{folder}/saved", f"{folder}/converted", to="huggingface", remap=remap, dtype=dtype)
    return live
