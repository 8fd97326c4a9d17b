"""What signs of life cost the store of the process group: operations of a rank in a minute, counted, not timed.

`python -m benchmarks.scale_heartbeat [RANKS …]`, 16,384 if none is given. Ranks of each kind (the first, a leader, one
that leads nobody) go through a minute of a round in which one rank, or a whole block but its leader, is slow; time is
simulated. Where nobody is slow there is no sign and no look at one: `tests/ranks/test_heartbeat.py`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from holdfast.ranks import heartbeat, rounds
from holdfast.ranks.heartbeat import Watch, interval
from holdfast.ranks.messages import Message, tree_of
from holdfast.ranks.ranks import DEADLINE
from holdfast.ranks.rounds import Round

MINUTE = 60.0


class _Over(Exception):
    """The time is up."""


@dataclass
class _Store:
    """A store in which all words lie but those of ranks that are slow, and in which signs of these go on."""

    now: Callable[[], float]
    slow: set[str]
    counts: Counter[str] = field(default_factory=Counter)

    def set(self, key: str, value: bytes) -> None:
        self.counts["words and verdicts"] += 1

    def delete_key(self, key: str) -> None:
        self.counts["words and verdicts"] += 1

    def check(self, keys: list[str]) -> bool:
        verdict = any("verdict" in key for key in keys)
        self.counts["looks for the verdict" if verdict else "looks for words"] += 1
        return not verdict and not any(key in self.slow for key in keys)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        if "heartbeat" in key:
            self.counts["looks at signs"] += 1
            return rounds.msgspec.msgpack.encode(heartbeat.Sign(int(self.now()), int(self.now() * 1000), 1))
        self.counts["words and verdicts"] += 1
        return b"a word"


def operations(rank: int, size: int, slow: list[int], seconds: float) -> Counter[str]:
    """What a rank that waits for the ``slow`` ones does in so many seconds, by kind."""
    clock = [0.0]
    tree = tree_of(size)
    absent = {f"b/word/{r}" for r in slow} | {f"b/words/1.{r // tree.width}" for r in slow}
    store = _Store(lambda: clock[0], absent)

    def sleep(pause: float) -> None:
        clock[0] += pause
        if clock[0] > seconds:
            raise _Over

    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)

    def never(*args: Any, **options: Any) -> Any:
        raise RuntimeError("nobody is lost, and nothing is decided")

    meeting = Round(
        store, tree, rank, "b", "save", DEADLINE, lambda: float("inf"), never, never, Watch(store, DEADLINE),
        lambda: None,
    )  # fmt: skip
    with patch.object(rounds, "time", time), patch.object(heartbeat, "time", time), suppress(_Over):
        meeting.meet(Message(b"", b""))
    return store.counts


def main(sizes: list[int]) -> None:
    print(f"deadline {DEADLINE:g} s: a rank at work writes a sign every {interval(DEADLINE):g} s")
    print("operations on the store a minute; of all ranks together a second\n")
    print("| ranks | slow | signs of one | looks: first | leader | elsewhere | no leader | all, a second |")
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        tree = tree_of(size)
        written = MINUTE / interval(DEADLINE)
        block = range(tree.width * 2, tree.width * 3) if tree.levels > 1 else range(2, 3)
        for slow in ([block[-1]], list(block)[1:]):
            leaders = len(tree.children(tree.root)) if tree.levels > 1 else size
            kinds = [0, tree.width * 2, tree.width * 3, size - 1] if tree.levels > 1 else [0, 1, 1, 1]
            looks = [operations(rank, size, slow, MINUTE)["looks at signs"] for rank in kinds]
            rest = looks[2] * (leaders - 2) + looks[3] * (size - leaders)
            together = (looks[0] + looks[1] + rest + written * len(slow)) / MINUTE
            print(f"| {size} | {len(slow)} | {written:.0f} | {' | '.join(map(str, looks))} | {together:.1f} |")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1024, 4096, 16384])
