"""Every peer's checkpoint converted to our own format: nothing of it is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.formats.truth import NAMES, Truth, check


@pytest.mark.parametrize("name", NAMES)
def test_ours_holds_the_same(name: str, tmp_path: Path) -> None:
    source = holdfast.open(Truth(name).path)
    converted = holdfast.convert(source, tmp_path / "ours")
    assert converted.left_out == []
    ours = check(name, tmp_path / "ours")
    assert ours.format == "holdfast" and ours.step == source.step
    assert ours.verify().unverified == 0
    assert ours.tensors.keys() == source.tensors.keys() and ours.differing == source.differing
    assert set(ours.attachments) == set(source.attachments)
