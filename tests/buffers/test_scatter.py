"""Handing over by several threads in a process that was forked: torch has its threads anew before they ask for them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import holdfast
from holdfast.buffers import scatter


def test_a_forked_process_reads_with_several_threads(tmp_path: Path) -> None:
    state = {"model": {f"w{i}": torch.arange(5000.0) for i in range(8)}}
    holdfast.save(state, tmp_path / "c")
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        told = b"not done"
        try:
            before = scatter._forked.is_set()
            into = {"model": {f"w{i}": torch.zeros(5000, dtype=torch.float64) for i in range(8)}}
            holdfast.load(tmp_path / "c", into, cast=True)
            whole = all(torch.equal(into["model"][n].float(), w) for n, w in state["model"].items())
            told = repr((before, scatter._forked.is_set(), whole)).encode()
        finally:
            os.write(write, told)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "(True, False, True)", "noted by the fork, mended by the first read"
    os.waitpid(pid, 0)
    assert not scatter._forked.is_set()
