"""What the ranks of a pool do for the tests of shared reading: small windows, hosts made up, and loads that are proved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import holdfast
from holdfast.engine import pass_on, share, share_plan


@contextmanager
def eager(*, hosts: int = 1, block: int = 4096) -> Iterator[None]:
    """Share whatever can be shared, in windows of two small blocks, as if the ranks ran on so many hosts."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (
        patch.object(share, "LEAST", 1), patch.object(share, "PART", 0.0), patch.object(share, "SHORTEST", 1),
        patch.object(share_plan, "BLOCK", block), patch.object(pass_on, "BLOCK", block),
        patch.object(pass_on, "LONGEST", 2 * block), patch.object(pass_on, "SHORTEST_SLICE", 64),
        patch.object(share, "_host", lambda name: f"host {rank % hosts}"),
    ):  # fmt: skip
        yield


def sizes_of(loaded: holdfast.Loaded) -> dict[str, int]:
    return {
        "needed": loaded.bytes_needed, "read": loaded.bytes_read, "received": loaded.bytes_received,
        "unverified": loaded.bytes_unverified,
    }  # fmt: skip
