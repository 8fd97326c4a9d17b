"""One sha256 of all that a run consists of: equal digests mean equal bits.

The state of a live run is gathered by torch's own means, the state in a checkpoint is read by holdfast in one process:
two ways that have no code in common, and must come to the same digest. Of the random generators, which differ by rank,
those of rank 0 are in it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast


def digest_of_run(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """The digest of a live run, on rank 0; None on the others. Gathers every tensor: a check for small models."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() != 0:
        return None
    whole = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}
    return digest_of({**whole, "model": model_state, "optimizer": optimizer_state})


def digest_of_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The digest of what this rank trains on with, its random generators included. Called on every rank alike."""
    steps = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    whole = _gathered({"model": model.state_dict(), "optimizer": steps})
    return digest_of({**whole, "torch": torch.get_rng_state(), "python": random.getstate()})


def _gathered(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _gathered(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_gathered(value) for value in node]
    return node.full_tensor() if hasattr(node, "full_tensor") else node


def digest_of_checkpoint(path: str | PathLike[str]) -> str:
    """The digest of a checkpoint, read whole by this one process."""
    checkpoint = holdfast.open(path)
    return digest_of({**checkpoint.state_dict(), "rng": checkpoint.per_rank("rng", 0)})


def digest_of(state: Mapping[str, Any]) -> str:
    """The digest of a nested state: every leaf with its path, in the order of the paths."""
    sha = hashlib.sha256()
    for path, leaf in sorted(_leaves("", state)):
        sha.update(f"{path}\n".encode())
        if isinstance(leaf, torch.Tensor):
            sha.update(f"{leaf.dtype} {list(leaf.shape)}\n".encode())
            sha.update(bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        else:
            sha.update(f"{leaf!r}\n".encode())
    return sha.hexdigest()


def _leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (dict, list, tuple)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(f"{path}/{key}", value)
    else:
        yield path, node
