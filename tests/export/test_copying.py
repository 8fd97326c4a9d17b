"""How many threads copy: the memory tests see a third one by chance only, since it may get no unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.export import copying


@pytest.mark.parametrize(("dtype", "threads"), [(torch.bfloat16, 2), (torch.float32, 3), (None, 3)])
def test_a_conversion_that_casts_has_two_threads(
    dtype: torch.dtype | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that casts has two windows: three such threads take 141 MiB, and 128 are promised."""
    holdfast.save({"w": torch.ones(1000)}, tmp_path / "c")
    asked: list[int] = []
    in_order = copying.in_order

    def recorded(work: Any, units: Any, workers: int) -> Any:
        asked.append(workers)
        return in_order(work, units, workers)

    monkeypatch.setattr(copying, "in_order", recorded)
    holdfast.convert(tmp_path / "c", tmp_path / "t.pt", to="torch", dtype=dtype)
    assert asked == [threads]
