"""The YAML of other libraries: what they write is read, and what would make objects is refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.formats.machine import yamls

# As PyYAML 6.0.3 and libyaml write them: `yaml.dump(value, sort_keys=False)`.
WRITTEN: list[tuple[str, Any]] = [
    ("version: 0.0.3\nworld_size: 2\nmanifest: {}\n", {"version": "0.0.3", "world_size": 2, "manifest": {}}),
    ("a:\n- 0\n- -3\n- '7'\n- true\n- null\n- 'true'\n- []\n", {"a": [0, -3, "7", True, None, "true", []]}),
    ("a:\n- offsets:\n  - 0\n  sizes: []\n- b: 1\n  c:\n    d: e\n",
     {"a": [{"offsets": [0], "sizes": []}, {"b": 1, "c": {"d": "e"}}]}),
    ("a:\n- - 1\n  - - 2\n- 3\n", {"a": [[1, [2]], 3]}),
    ("'': x\n0: y\n'0': z\n'a: b': 1\n'#h': 2\nc%2Fd: 3\n",
     {"": "x", 0: "y", "0": "z", "a: b": 1, "#h": 2, "c%2Fd": 3}),
    ("a: 'it''s'\nb: \"q'uo\\\"te \\xE9 \\u2603 \\U0001F600\\n\"\n", {"a": "it's", "b": "q'uo\"te é ☃ 😀\n"}),
    ("a: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n  c\n",
     {"a": "a" * 40 + " " + "b" * 40 + " c"}),
    ("a: 'x\n\n  y'\nb: \"one \\\n  \\ two\\\n  three\\\\\\\n  four\"\n", {"a": "x\ny", "b": "one  twothree\\four"}),
    ("? " + "x" * 130 + "\n: type: Tensor\n  shape:\n  - 1\n? 'y y\n  z'\n: 9\n",
     {"x" * 130: {"type": "Tensor", "shape": [1]}, "y y z": 9}),
    ("plain scalar\n", "plain scalar"),
    ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_what_dump_writes(text: str, value: Any) -> None:
    found = yamls.load(text)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize(
    "text",
    ["a: &x [1]\nb: *x\n", "a: *x\n", "a: !!python/object:os.system x\n", "a: !!python/name:os.system\n", "a: !x 1\n",
     "!!set {a}\n", "!!binary aGk=\n", "a: 2020-01-01\n", "<<: {a: 1}\n", "a: b: c\n", "a: 'open\n", "a: \"open\n",
     "a: 'x' y\n", "a: 1\na: 2\n", "a: 1\n  b: 2\n", "a: \"\\q\"\n", "a: 1\n- b\n", "? [1]\n: 2\n", "a\nb: 1\n",
     "- " * 60 + "1\n", "- " * 100_000 + "1\n", "[" * 100_000, "a: 1 # no\nb\n", "a: 1\n--- 2\n", "a: \x01\n"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        yamls.load(text)


def test_copies_of_copies_take_no_memory() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    with pytest.raises(ValueError, match="alias"):
        yamls.load(text)
