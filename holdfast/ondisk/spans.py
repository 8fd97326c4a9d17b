"""Lists of file numbers as short text: ``"0-3,7"``; and of a mesh, however its axes are turned, ``"0+8x1+128x8"``.

The manifest says with them which file holds each cell. Pure text and integers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

_TERM = re.compile(r"([0-9]+)(?:-([0-9]+)|((?:\+[0-9]+x[0-9]+)+))?")

PLAIN = 100
"""Text of up to so many characters is left in plain ranges."""


class Term(NamedTuple):
    """``start``, and for each of ``axes`` = (count, step) so many numbers, a step apart; the last one runs fastest."""

    start: int
    axes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return prod(count for count, _ in self.axes)

    @property
    def largest(self) -> int:
        return self.start + sum((count - 1) * step for count, step in self.axes)

    def at(self, place: int) -> int:
        """The number at a place of the list."""
        number = self.start
        for count, step in reversed(self.axes):
            place, index = divmod(place, count)
            number += index * step
        return number

    def __str__(self) -> str:
        if not self.axes:
            return str(self.start)
        if len(self.axes) == 1 and self.axes[0][1] == 1:
            return f"{self.start}-{self.largest}"
        return f"{self.start}" + "".join(f"+{count}x{step}" for count, step in self.axes)


class Spans:
    """A list of numbers, as it was read; never laid out."""

    def __init__(self, terms: tuple[Term, ...]) -> None:
        self._terms = terms
        self._ends = list(accumulate(term.size for term in terms))
        self.count = self._ends[-1] if terms else 0
        self.first = terms[0].start if terms else -1
        self.largest = max((term.largest for term in terms), default=-1)

    def at(self, place: int) -> int:
        """The number at a place of the list."""
        number = bisect_right(self._ends, place)
        return self._terms[number].at(place - (self._ends[number - 1] if number else 0))

    def __iter__(self) -> Iterator[int]:
        for term in self._terms:
            steps = [range(0, count * step, step) for count, step in term.axes]
            yield from (sum(at, term.start) for at in product(*steps))


@lru_cache(maxsize=1024)
def read(text: str) -> Spans:
    """The list that ``text`` stands for. Raises ValueError if it is none."""
    return Spans(tuple(_term(part, text) for part in text.split(",")) if text else ())


def _term(part: str, text: str) -> Term:
    match = _TERM.fullmatch(part)
    if match is None:
        raise ValueError(f"{text!r} is no list of ranges")
    start, last, axes = match.groups()
    if axes:
        axes_read = tuple((int(n), int(step)) for n, _, step in (axis.partition("x") for axis in axes[1:].split("+")))
        if any(0 in axis for axis in axes_read):
            raise ValueError(f"{text!r} is no list of ranges")
        return Term(int(start), axes_read)
    if last is None:
        return Term(int(start), ())
    if int(last) < int(start):
        raise ValueError(f"{text!r} is no list of ranges")
    return Term(int(start), ((int(last) - int(start) + 1, 1),))


def expand(text: str) -> tuple[int, ...]:
    """All numbers of a list, in order. Raises ValueError if ``text`` is none."""
    return tuple(read(text))


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 3, 7]`` as ``"0-3,7"``: ascending runs, in order; where these are many, axes of a mesh if it has any.

    So the files of a tensor are few characters, however it lies over a mesh of thousands of ranks.
    """
    numbers = list(numbers)
    plain: list[list[int]] = []
    for i in numbers:
        if plain and i == plain[-1][1] + 1:
            plain[-1][1] = i
        else:
            plain.append([i, i])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in plain)
    if len(text) <= PLAIN:
        return text
    terms = [Term(number, ()) for number in numbers]
    while len(folded := _folded(terms)) < len(terms):
        terms = folded
    return min(text, ",".join(map(str, terms)), key=len)


def _folded(terms: list[Term]) -> list[Term]:
    """Terms that are alike and equally far apart made one of one more axis."""
    folded = []
    first = 0
    while first < len(terms):
        start, axes = terms[first]
        last = first
        step = terms[first + 1].start - start if first + 1 < len(terms) else 0
        if step > 0:
            while last + 1 < len(terms) and terms[last + 1] == (terms[last].start + step, axes):
                last += 1
        folded.append(Term(start, ((last - first + 1, step), *axes)) if last > first else terms[first])
        first = last + 1
    return folded
