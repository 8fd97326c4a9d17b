"""Real ranks on one device: processes that run a job of `tests.gpu.jobs` together.

Called by the tests; each rank is `python -m tests.gpu.ranks JOB ARGS`, and prints what its job returned. None outlives
the call.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.gpu.lab import LIMIT, a_lab

ROOT = Path(__file__).parents[2]


def run(world: int, backend: str, job: str, *args: Any) -> list[Any]:
    """What the job returned on each rank. Raises AssertionError with what a rank wrote, if one failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "BACKEND": backend}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ranks", job, json.dumps(args)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **there, "RANK": str(rank)},
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    answers = [[line for line in out.splitlines() if line.startswith('{"answer"')] for out, _ in said]
    for number, ((_, error), answer) in enumerate(zip(said, answers, strict=True)):
        assert answer, f"rank {number}: {error[-3000:]}"
    return [json.loads(answer[-1])["answer"] for answer in answers]


def main() -> None:
    dist.init_process_group(os.environ["BACKEND"])
    with a_lab() as lab:
        answer = getattr(importlib.import_module("tests.gpu.jobs"), sys.argv[1])(lab, *json.loads(sys.argv[2]))
        print(json.dumps({"answer": answer}), flush=True)
        dist.barrier() if dist.get_world_size() > 1 else None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
