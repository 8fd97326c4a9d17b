"""The files of ranks are taken for a checkpoint only if there is one of each rank, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Damaged
from holdfast.formats.members import prove_all


@pytest.mark.parametrize(
    ("ranks", "world_size", "text"),
    [
        ({0, 2}, 3, r"of 3 ranks, but rank1 is missing \(2 are there\)"),
        ({2}, 4, "but rank0, rank1, rank3 are missing"),
        (set(), 1 << 60, "rank0, .*rank9 are missing"),
        ({0, 1, 2}, 2, "holds rank2 too: files of two saves"),
    ],
)
def test_some_are_missing_or_too_many(ranks: set[int], world_size: int, text: str) -> None:
    with pytest.raises(Damaged, match=f"^folder is .*{text}"):
        prove_all(ranks, world_size, Path("folder"), "rank{}".format)


def test_all_are_there() -> None:
    prove_all({0, 1, 2}, 3, Path("folder"), "rank{}".format)
