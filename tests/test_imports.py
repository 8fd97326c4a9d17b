"""What `import holdfast` and a save in one process load, and what they leave for those who need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = (
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "sympy",
    "rich", "typer", "yaml", "obstore", "cryptography", "safetensors", "transformers", "numpy.testing", "opentelemetry",
    "http.server", "holdfast.cli", "holdfast.dcp", "holdfast.trainers", "holdfast.view",
)  # fmt: skip
"""What takes long to import, or is there for few."""

OWN_FORMAT = {"holdfast.formats", "holdfast.formats.own", "holdfast.formats.reader", "holdfast.formats.detect"}
"""What reads checkpoints of holdfast, and where the readers of all other formats are registered."""


def _slow(loaded: set[str]) -> list[str]:
    foreign = {name for name in loaded if name.startswith("holdfast.formats")} - OWN_FORMAT
    return sorted(foreign | (loaded & set(SLOW)))


def _loaded_by(script: str, tmp_path: Path) -> set[str]:
    # torch comes first: what it brings along is none of ours.
    text = f"import sys, torch\nbefore = set(sys.modules)\n{script}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_holdfast_loads_nothing_slow(tmp_path: Path) -> None:
    loaded = _loaded_by("import holdfast; holdfast.CheckpointManager", tmp_path)
    assert "holdfast.manager" in loaded
    assert not _slow(loaded)


@pytest.mark.slow
def test_saving_and_loading_in_one_process_loads_nothing_slow(tmp_path: Path) -> None:
    """No step is taken: torch's optimizers load most of it themselves then."""
    script = """
import holdfast
model = torch.nn.Linear(4, 4)
state = {"model": model, "tensors": [torch.ones(3)], "rng": holdfast.RNG(), "step": 1}
holdfast.save(state, "one")
holdfast.load("one", state)
"""
    loaded = _loaded_by(script, tmp_path)
    assert not _slow(loaded)
