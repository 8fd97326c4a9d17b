"""The chunks of an upload on their way through a wrapper, which does something at each and keeps none.

`deadline.py`, `throttled.py` and the tests' failing store call it. Never looks into a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from holdfast.storage.store import Buffer

Take = Callable[[Iterator[Buffer]], Buffer]
"""Takes the next chunk of an iterator, or raises StopIteration as that does."""


def taken(chunks: Iterable[Buffer], take: Take) -> Iterable[Buffer]:
    """The same chunks, each by way of ``take``; from a Sequence a Sequence, so that an upload can still be repeated."""
    return _Again(chunks, take) if isinstance(chunks, Sequence) else _Taken(iter(chunks), take)


class _Taken:
    """An iterator, as a generator would keep each chunk alive until the next one is taken."""

    def __init__(self, chunks: Iterator[Buffer], take: Take) -> None:
        self._chunks, self._take = chunks, take

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        return self._take(self._chunks)


class _Again(Sequence[Buffer]):
    def __init__(self, chunks: Sequence[Buffer], take: Take) -> None:
        self._chunks, self._take = chunks, take

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, at: int) -> Buffer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Buffer]: ...
    def __getitem__(self, at: int | slice) -> Buffer | Sequence[Buffer]:
        return self._chunks[at]

    def __iter__(self) -> Iterator[Buffer]:
        return _Taken(iter(self._chunks), self._take)
