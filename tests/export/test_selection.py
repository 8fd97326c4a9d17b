"""Selecting and naming, and names that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.export.selection import can_cast, check_names, renamed, select
from tests.export import states


def test_containers_above_what_is_selected_stay_what_they_are(source: Path) -> None:
    found = select(holdfast.open(source), lambda name: name.startswith("config/tags/1"))
    assert set(found.containers) == {"config/tags"} and found.values == {"config/tags/1/b": None}
    everything = select(holdfast.open(source), lambda name: True)
    assert everything.containers == holdfast.open(source).manifest.containers and not everything.skipped


@pytest.mark.parametrize("bad", ["a[0]", "a//b", "/a", "a/", "a@1", "..", "a/../b", "a%zz"])
def test_names_that_the_format_cannot_keep(bad: str, tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Mismatch, match="rename= makes"):
        holdfast.convert(tmp_path / "c", tmp_path / "d", rename={"w": bad} if not bad.endswith("/") else lambda _: bad)
    assert not (tmp_path / "d").exists()


def test_a_leaf_above_another(source: Path) -> None:
    found = select(holdfast.open(source), lambda name: name in ("model/seen", "step"))
    with pytest.raises(
        holdfast.errors.Mismatch, match="rename= makes model and model/seen: a leaf cannot be above another"
    ):
        check_names(renamed(found, lambda name: "model" if name == "step" else name))


def test_what_can_be_cast() -> None:
    assert all(map(can_cast, ("float32", "bfloat16", "float8_e4m3fn", "float64")))
    assert not any(map(can_cast, ("int64", "bool", "complex64", "float4_e2m1fn_x2")))


def test_states_that_differ_are_told_apart() -> None:
    """The comparison that these tests rely on does not pass by itself."""
    for other in ({"a": torch.ones(3)}, {"a": torch.ones(2).double()}, {"a": torch.zeros(2)}, {"b": torch.ones(2)}, []):
        with pytest.raises(AssertionError):
            states.same({"a": torch.ones(2)}, other)
