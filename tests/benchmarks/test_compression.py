"""The measurement of lossless compression: what it packs comes back, and its break-even is arithmetic."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compression import Row, measure, methods
from holdfast.ondisk.blocks import BLOCK

pytest.importorskip("zstandard")


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_method_gives_back_what_it_took(method: object, dtype: torch.dtype) -> None:
    weights = torch.randn(BLOCK // dtype.itemsize + 1001, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.02
    row = measure("weights", weights, method, 1)  # type: ignore[arg-type]
    assert row.nbytes == weights.nbytes
    assert 1.0 < row.ratio < 1.6


def test_below_the_break_even_compressing_first_is_sooner_done() -> None:
    row = Row("any", "any", 1 << 30, ratio=1.25, compress=1.0, decompress=0.5)
    gib = (1 << 30) / 1e9
    assert gib / row.in_turn == pytest.approx(row.compress + gib / row.in_turn / row.ratio)
    assert gib / row.overlapped == pytest.approx(row.compress)
    assert Row("any", "any", 1, ratio=1.0, compress=1.0, decompress=1.0).overlapped == 0
