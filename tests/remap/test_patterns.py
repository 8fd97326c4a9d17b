"""Name patterns: what they capture, and the names that captures make."""

from __future__ import annotations

import pytest

from holdfast.errors import Mismatch
from holdfast.remap.patterns import captured, fields_of, filled, finder

CASES = {
    ("layers.{i}.{part}.weight", "layers.3.wq.weight"): {"i": "3", "part": "wq"},
    ("layers.{i}.{part}.weight", "layers.3.attn.wq.weight"): None,
    ("layers.{i}.{part}.weight", "layers.3.weight"): None,
    ("layers.{i}.{*rest}", "layers.3.attn.wq.weight"): {"i": "3", "rest": "attn.wq.weight"},
    ("{x}.{x}", "a.a"): {"x": "a"},
    ("{x}.{x}", "a.b"): None,
    ("a+b.{i}", "a+b.1"): {"i": "1"},
    ("a.b.{i}", "a-b.1"): None,
    ("aa{i}aa", "aaa"): None,
    ("head", "head"): {},
    ("head", "heads"): None,
}


@pytest.mark.parametrize(("pattern", "name"), CASES)
def test_what_is_captured(pattern: str, name: str) -> None:
    captures = CASES[pattern, name]
    assert (
        captured(pattern, name)
        == finder(pattern)(name)
        == (None if captures is None else tuple(sorted(captures.items())))
    )
    if captures is not None:
        assert filled(pattern, captures) == name and set(fields_of(pattern)) == set(captures)


@pytest.mark.parametrize("pattern", ["", "{", "a.{i", "{2}", "}{i}", "{a.{i}"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(Mismatch, match="is no name pattern"):
        finder(pattern)
