"""examples/test_faults.py, the file of docs/testing.md to be copied, passes as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "test_faults.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_of_the_docs(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", str(EXAMPLE), "-n0", f"--basetemp={tmp_path / 'base'}", "--timeout=300"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=890,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert "3 passed" in ended.stdout
