"""The bytes of one upload on their way to the client library: cut into parts, counted, and not held.

`cloud.py` puts it between the chunks it is given and the library. Never copies, and never hides what the chunks raise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from holdfast.storage.store import Buffer

MIB = 1 << 20

PARTS = 10_000
"""The most parts that one upload may have, at most servers."""


def part_size(nbytes: int, least: int) -> int:
    """Bytes of a part, so that the parts suffice for ``nbytes``: whole MiB where more than ``least`` is needed."""
    return max(least, math.ceil(nbytes / PARTS / MIB) * MIB)


class Feed:
    """Chunks cut into parts; keeps what they raised, and holds none of them while the next is waited for."""

    def __init__(self, chunks: Iterable[Buffer], nbytes: int, part: int, name: str) -> None:
        self._chunks, self._nbytes, self._part, self._name = iter(chunks), nbytes, part, name
        self.raised: BaseException | None = None
        self._pieces = self._cut()

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except BaseException as error:
            self.raised = error
            raise

    def _cut(self) -> Iterator[memoryview]:
        done = 0
        while True:
            try:
                view = memoryview(next(self._chunks)).cast("B")
            except StopIteration:
                break
            done += view.nbytes
            if done > self._nbytes:
                raise ValueError(f"{self._name} was given at least {done} bytes, not {self._nbytes}")
            while view.nbytes > self._part:
                yield view[: self._part]
                view = view[self._part :]
            rest, view = view, view[:0]
            # Only the caller keeps the memory of the chunk, not this frame.
            del view
            if rest.nbytes:
                box = [rest]
                del rest
                yield box.pop()
            else:
                del rest
        if done != self._nbytes:
            raise ValueError(f"{self._name} was given {done} bytes, not {self._nbytes}")
