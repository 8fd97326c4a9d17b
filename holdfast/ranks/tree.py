"""How messages climb to the first rank and its verdict comes down: a tree of blocks of neighbouring ranks.

`rounds` asks it which rank hears which. Pure: every rank works out the same tree from the number of ranks alone, so it
never depends on what a rank may have missed.

We rejected blocks by host, because every rank would have to know the same hosts before the tree stands, and a rank that
missed a round does not. We rejected a small store on each node, because a leader that freezes would freeze the members
of its block inside a call to its store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

FLAT = 64
"""Ranks up to which the first one hears each of them itself."""

FAN_IN = 128
"""Blocks, or ranks, that one rank hears at the most."""


class Node(NamedTuple):
    """A block of neighbours, the ``number``-th of its level; on level 0 a rank by itself. Its first rank leads it."""

    level: int
    number: int


@dataclass(frozen=True)
class Tree:
    """Blocks of ``width`` blocks each, on so many ``levels`` that the topmost, the root, holds all ranks."""

    size: int
    width: int
    levels: int

    @property
    def root(self) -> Node:
        return Node(self.levels, 0)

    def children(self, node: Node) -> list[Node]:
        """The blocks, or ranks, that the leader of a block hears."""
        first, reach = node.number * self.width, self.width ** (node.level - 1)
        end = min(first + self.width, -(-self.size // reach))
        return [Node(node.level - 1, number) for number in range(first, end)]

    def parent(self, node: Node) -> Node:
        """The block that this one is part of."""
        return Node(node.level + 1, node.number // self.width)

    def led_by(self, rank: int) -> list[Node]:
        """The blocks that a rank leads, from the smallest to the largest."""
        levels = range(1, self.levels + 1)
        return [Node(level, rank // self.width**level) for level in levels if rank % self.width**level == 0]

    def heard_by(self, rank: int) -> Node:
        """The block from whose leader a rank hears the verdict; the root itself for the first rank."""
        led = self.led_by(rank)
        highest = led[-1] if led else Node(0, rank)
        return highest if highest == self.root else self.parent(highest)


@lru_cache(maxsize=64)
def tree_of(size: int, fan_in: int = FAN_IN) -> Tree:
    """The tree with the fewest levels, of blocks as equal as can be. ``fan_in`` is at least 2."""
    if size <= min(fan_in, FLAT):
        return Tree(size, max(size, 2), 1)
    levels = 2
    while fan_in**levels < size:
        levels += 1
    width = next(width for width in range(2, fan_in + 1) if width**levels >= size)
    return Tree(size, width, levels)
