"""What one rank spends on a piece of work: seconds, processor seconds, host memory, bytes asked of files.

Called by the jobs around every measured call.
Never knows which system it measures.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Spent:
    """``began`` and ``ended`` by the monotonic clock, which all processes of a machine share.

    ``cpu``: user and system seconds of the process, all threads. ``memory``: peak resident bytes above those at the
    start. ``read``: bytes that read calls returned (`rchar`); bytes that came by mmap are not among them. ``device``:
    bytes that this process had the disk deliver (`read_bytes`), readahead and mmap included.
    """

    began: float
    ended: float
    cpu: float
    memory: int
    read: int
    device: int


def spend(action: Callable[[], T]) -> tuple[Spent, T]:
    """Do ``action`` on all ranks at once; what it cost this one, and its result."""
    gc.collect()
    _libc.malloc_trim(0)  # memory kept from an earlier call would hide what this one takes
    _reset_peak()
    resident = _status("VmRSS")
    dist.barrier()
    before, cpu, began = _io(), _cpu(), time.monotonic()
    result = action()
    ended = time.monotonic()
    cpu, after = _cpu() - cpu, _io()
    memory = max(_status("VmHWM") - resident, 0)
    read, device = (after[field] - before[field] for field in ("rchar", "read_bytes"))
    spent = Spent(began, ended, cpu, memory, read, device)
    return spent, result


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {field}")


def _io() -> dict[str, int]:
    fields = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in fields}
