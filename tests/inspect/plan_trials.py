"""What ranks do for the test of plans: loads whose bytes are counted, into models that lie over them in a known way."""

from __future__ import annotations

from unittest.mock import patch

import torch.distributed as dist

import holdfast
from holdfast.read import source
from holdfast.read.shared import share as module
from tests import meshes
from tests.read.share_trials import eager

Counted = tuple[int, int, int]


def save(path: str, layout: str) -> None:
    holdfast.save(meshes.build(layout, 7, steps=1), path)


def load(path: str, layout: str, share: str, node_size: int) -> Counted:
    """Bytes needed, read and received by this rank."""
    state = meshes.build(layout, 8, steps=1)
    rank = dist.get_rank()
    with (
        eager(block=256), patch.object(module, "_host", lambda name: f"host {rank // node_size}"),
        # What the cache has lost is read in whole sectors, and counts as these: how much that is, the machine decides.
        patch.object(source, "is_cached", lambda fd, offset, nbytes: True),
    ):  # fmt: skip
        loaded = holdfast.load(path, state, share=share)  # type: ignore[arg-type]
    return loaded.bytes_needed, loaded.bytes_read, loaded.bytes_received
