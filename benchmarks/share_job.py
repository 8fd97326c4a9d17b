"""What a rank is asked to do for `benchmarks.share`: load a state that all ranks hold alike, and prove it.

Called by name in the rank processes of a pool. Never returns a figure for a load that brought wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import holdfast
from benchmarks import jobs
from benchmarks.gauge import Spent, spend
from benchmarks.states import State, digest, poison

SHARED, ALONE, DCP = "holdfast", 'holdfast, share="off"', "torch DCP"


@dataclass(frozen=True)
class Cost:
    """What a load cost one rank; ``told``: bytes from storage as holdfast itself says."""

    spent: Spent
    told: int | None


def _shared(state: State, folder: Path) -> int:
    return holdfast.load(folder, state).bytes_read


def _alone(state: State, folder: Path) -> int:
    return holdfast.load(folder, state, share="off").bytes_read


def _dcp(state: State, folder: Path) -> None:
    dcp_load(state, storage_reader=FileSystemReader(folder))


LOADS: dict[str, Callable[[State, Path], int | None]] = {SHARED: _shared, ALONE: _alone, DCP: _dcp}


def load(system: str, folder: Path) -> Cost:
    """Load into the state held, overwritten before; then prove every byte."""
    state, right = jobs.held()
    poison(state)
    spent, told = spend(lambda: LOADS[system](state, folder))
    if digest(state) != right:
        raise jobs.WrongBytes(f"{system} loaded other bytes than were saved")
    return Cost(spent, told)
