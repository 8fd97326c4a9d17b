"""Names: one reading each, safe as parts of a path, and as keys of a safetensors header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Unsupported
from holdfast.ondisk import names

odd = st.sampled_from([
    "", ".", "..", "...", "/", "%", "%2F", "@", "[", "]", "\\", "\n", "\x00", "\x7f", "é", "日本", "😀", "a/b", "a%b",
    "x@0", "w[0:1]", "__metadata__", "100%", "C:", " ", "%5F_metadata__",
])  # fmt: skip
keys = st.one_of(st.text(max_size=8), odd)


@given(st.lists(keys, min_size=1, max_size=5))
def test_split_is_the_inverse_of_join(path: list[str]) -> None:
    assert names.split(names.join(path)) == tuple(path)


@given(st.lists(keys, min_size=1, max_size=3), st.lists(keys, min_size=1, max_size=3))
def test_two_paths_never_share_a_name(a: list[str], b: list[str]) -> None:
    assert (names.join(a) == names.join(b)) == (a == b)


@given(keys)
def test_escaped_keys_are_safe(key: str) -> None:
    text = names.escape(key)
    assert not any(c in text for c in "/@[\\") and not any(ord(c) < 32 or ord(c) == 127 for c in text)
    assert text not in (".", "..", "__metadata__")


def test_plain_keys_stay_as_they_are() -> None:
    for key in ("layers.0.wq.weight", "exp_avg", "naïve", "a b", "a]", "a:b", "a-b", "...", "_metadata__"):
        assert names.escape(key) == key
    assert names.escape("a/b%c@d[e") == "a%2Fb%25c%40d%5Be"
    assert names.escape("\n") == "%0A"


def test_a_lone_surrogate_is_refused_by_key() -> None:
    with pytest.raises(Unsupported, match=r"udc80"):
        names.escape("weight\udc80")


@given(st.lists(keys.filter(bool), min_size=1, max_size=4))
def test_sections(path: list[str]) -> None:
    name = names.join(path)
    section, rest = names.section_of(name), names.in_section(name)
    if len(path) == 1:
        assert (section, rest) == ("state", name)
    else:
        assert section == names.escape(path[0]) and f"{section}/{rest}" == name


@given(st.lists(keys.filter(bool), min_size=1, max_size=3), keys.filter(bool))
def test_child_and_under(path: list[str], key: str) -> None:
    name = names.join(path)
    child = names.child(name, key)
    assert names.split(child) == (*path, key)
    assert names.under(child, name) and names.under(name, name) and names.under(name, "")
    assert not names.under(name, child)
    assert not names.under(name + "x", name)
    assert names.child("", key) == names.escape(key)


@given(st.lists(keys, min_size=1, max_size=4))
def test_a_section_and_what_is_in_it_make_the_name(path: list[str]) -> None:
    name = names.join(path)
    section, short = names.section_of(name), names.in_section(name)
    if (section, len(path)) != (names.TOP_SECTION, 2):  # there `state/x` and `x` are called alike
        assert names.from_section(section, short) == name
        assert names.from_section(section, f"{short}@3/a/b") == f"{name}@3/a/b"
