"""Which box of a tensor some bytes of a piece are: held against the elements themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.ondisk.box import Box
from holdfast.read.damage import Damage, _hit, by_fault, error_of, hit_by


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


def test_a_fault_is_one_row_whatever_it_hits() -> None:
    missing = [Damage("f", "f is missing", f"t{n}", Box((), ()), nbytes=9) for n in range(12)]
    blocks = [Damage("g", f"g is altered at {at}", "w", Box((), ()), begin=at, nbytes=4) for at in (0, 4)]
    value, nobody = Damage("h", "h is missing", value="x@0"), Damage("config", "config is missing")
    assert by_fault([*missing, *blocks]) == [missing, [blocks[0]], [blocks[1]]]
    assert hit_by(missing) == f"12 tensors: {missing[0]}, {missing[1]} … and 10 more"
    assert hit_by(missing[:2]) == f"2 tensors: {missing[0]}, {missing[1]}"
    assert (hit_by(blocks[:1]), hit_by([nobody])) == (str(blocks[0]), "")
    assert hit_by([missing[0], value]) == f"2 tensors and values: {missing[0]}, value x@0"
