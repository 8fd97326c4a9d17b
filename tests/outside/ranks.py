"""Trainings on gloo ranks of the CPU, started as torchrun would, and what comes of them.

`resume_titan` and `recipes` start theirs here. Never waits longer than `LIMIT` for a rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT = 900.0


class Row(NamedTuple):
    """What was tried, and what came of it; ``passed`` is None for what is left out."""

    tried: str
    passed: bool | None
    why: str

    def __str__(self) -> str:
        if self.passed is None:
            return f"{self.tried}: left out, {self.why}"
        return f"{self.tried}: {'passed' if self.passed else f'FAILED: {self.why}'}"


class Ended(NamedTuple):
    """What each rank printed, its exit status, and the end of what the first one printed as errors."""

    outputs: list[str]
    codes: list[int]
    errors: str


def run(command: Sequence[str], folder: Path, paths: Sequence[Path], world: int, **environment: str) -> Ended:
    """Run ``command`` on ``world`` ranks in ``folder``, with ``paths`` to import from, until all have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world):
        given = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths)), **environment,
        }  # fmt: skip
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Ended([out for out, _ in outputs], [process.returncode for process in processes], outputs[0][1][-2000:])
