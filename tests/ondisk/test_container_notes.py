"""What is noted of containers is the same text on every Python: digests of layouts rest on it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import msgspec
import pytest

from holdfast.ondisk.containers import Container, note_of


@pytest.mark.parametrize("node", [OrderedDict(a=1), Counter("a"), defaultdict(int, a=1)])
def test_a_note_is_the_same_after_a_way_through_json(node: dict[str, int]) -> None:
    note = note_of(node, [("a", "a")], ordered=False, exact=True)
    text = msgspec.json.encode(note)
    assert b"keys" not in text and b"order" not in text
    assert msgspec.json.encode(msgspec.json.decode(text, type=Container)) == text
