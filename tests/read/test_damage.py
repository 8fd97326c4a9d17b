"""Which box of a tensor some bytes of a piece are: held against the elements themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.ondisk.box import Box
from holdfast.read.damage import Damage, _hit, error_of


@given(data=st.data())
def test_the_smallest_box_with_all_bytes_that_are_hit(data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4), "lengths"))
    offsets = tuple(data.draw(st.integers(0, 9), "offset") for _ in lengths)
    size, total = data.draw(st.sampled_from([1, 2, 4, 8])), 1
    for n in lengths:
        total *= n
    at = data.draw(st.integers(0, total * size - 1), "at")
    nbytes = data.draw(st.integers(1, total * size - at), "bytes")
    hit = []
    for element in range(at // size, (at + nbytes - 1) // size + 1):
        index, rest = [], element
        for n in reversed(lengths):
            index.append(rest % n)
            rest //= n
        hit.append(tuple(i + o for i, o in zip(reversed(index), offsets, strict=True)))
    low = tuple(min(axis) for axis in zip(*hit, strict=True))
    high = tuple(max(axis) + 1 for axis in zip(*hit, strict=True))
    expected = Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
    assert _hit(Box(offsets, lengths), size, at, nbytes) == expected


def test_an_error_tells_each_fault_once_and_does_not_drown() -> None:
    hurt = [Damage("f", "f is missing", f"t{n}", Box((), ())) for n in range(100)] + [Damage("g", "g is altered")]
    text = str(error_of("here", hurt))
    assert text.count("f is missing") == 1 and "t0" in text and "and 88 more" in text and text.endswith("g is altered")
