"""A load under a map takes its shards and a window of memory, however large the tensors are that they come from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20

SCRIPT = """
import sys, torch, holdfast
from pathlib import Path
from holdfast.remap import Concatenate, PermuteBlocks, Remap, Stack, Transpose

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

remap = Remap([
    Stack("experts.{e}.w1", "w1"), Stack("experts.{e}.w3", "w3"), Concatenate(["w1", "w3"], "gate_up", dim=1),
    Transpose("gate_up", 1, 2), PermuteBlocks("q", 0, (32, 2, -1), (0, 2, 1)),
])
shards = {
    "gate_up": holdfast.Shard(torch.zeros(2, 1024, 1024), (8, 4096, 2048), (2, 1024, 512)),
    "q": holdfast.Shard(torch.zeros(512, 4096), (4096, 4096), (1000, 0)),
}
holdfast.load(sys.argv[2], {"model": {"w": torch.zeros(8)}})  # what the first load of a process imports
before = status("VmHWM")
loaded = holdfast.load(sys.argv[1], {"model": shards}, remap=remap)
print(status("VmHWM") - before, loaded.bytes_read, loaded.bytes_needed)
w1 = holdfast.open(sys.argv[1]).read("model/experts.3.w1", ((512, 1024), (1024, 2048)))
w3 = holdfast.open(sys.argv[1]).read("model/experts.3.w3", ((0, 512), (1024, 2048)))
assert torch.equal(shards["gate_up"].tensor[1], torch.cat([w1, w3]).T)
"""


@pytest.mark.timed
def test_no_whole_tensor_is_in_memory(tmp_path: Path) -> None:
    """From 320 MiB in tensors of 16 and 64 MiB, and made ones of 256 MiB, shards of 16 MiB: 48 MiB at most beyond."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "small").mkdir()
    tensors = {f"experts.{e}.{w}": torch.randn(1024, 4096) for e in range(8) for w in ("w1", "w3")}
    save_file(tensors | {"q": torch.randn(4096, 4096)}, tmp_path / "hub" / "model.safetensors")
    save_file({"w": torch.ones(8)}, tmp_path / "small" / "model.safetensors")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "hub"), str(tmp_path / "small")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    above, read, needed = map(int, done.stdout.split())
    assert needed == 16 * MIB and read <= 1.05 * needed
    assert above < 48 * MIB, above
