"""Ranks by the hundred, each a thread over one in-memory store, and stores in which they die, stop or are counted.

For tests of the protocol between ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from holdfast.ranks.messages import FAN_IN
from holdfast.ranks.ranks import Ranks

PATIENCE = 120.0
"""Seconds after which a rank counts as left waiting."""

STACK = 512 << 10
"""Bytes of stack of a rank's thread: there are many."""


class Dead(BaseException):
    """What ends a rank's thread in the middle of a round: it says and does nothing more."""


class Deadly:
    """A rank's view of the store, in which it dies (or stops for a while) when it comes to a certain operation."""

    def __init__(self, store: Any, at: Callable[[str, str], bool], pause: threading.Event | None = None) -> None:
        self._store, self._at, self._pause = store, at, pause

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)

        def operation(key: Any, *args: Any) -> Any:
            name = key if isinstance(key, str) else key[0] if key else ""
            if self._at is not None and self._at(verb, name):
                if self._pause is None:
                    raise Dead
                self._at = lambda verb, name: False
                self._pause.wait(PATIENCE)
            return method(key, *args)

        return operation


class Counting:
    """A store that counts operations but for idle looks, and the largest message, of one rank."""

    def __init__(self, store: Any) -> None:
        self._store, self.operations, self.looks, self.largest = store, 0, 0, 0

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)

        def operation(key: Any, *args: Any) -> Any:
            found = method(key, *args)
            if verb == "check" and not found:
                self.looks += 1
            else:
                self.operations += 1
            messages = [*args, found] if verb != "check" else []
            self.largest = max([self.largest, *(len(m) for m in messages if isinstance(m, bytes))])
            return found

        return operation


@dataclass
class Fleet:
    """Ranks of one tree over one store, each with a thread of its own while it works."""

    size: int
    fan_in: int = FAN_IN
    store: Any = field(default_factory=dist.HashStore)
    ranks: list[Ranks] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [
            Ranks(r, self.size, dist.PrefixStore("p", self.store), host=f"host{r // 8}", fan_in=self.fan_in)
            for r in range(self.size)
        ]

    def start(self, function: Callable[[Ranks], Any], only: Iterable[int]) -> dict[int, Future[Any]]:
        found: dict[int, Future[Any]] = {}
        go = threading.Event()  # so that no rank is late only because its thread has to be made
        before = threading.stack_size(STACK)
        try:
            for rank in only:
                future = found[rank] = Future[Any]()
                threading.Thread(target=_attempt, args=(future, go, function, self.ranks[rank]), daemon=True).start()
        finally:
            threading.stack_size(before)
        go.set()
        return found

    def all(self, function: Callable[[Ranks], Any], only: Iterable[int] | None = None) -> dict[int, Any]:
        """What the function returned on each of these ranks, or the exception that it raised."""
        return outcomes_of(self.start(function, range(self.size) if only is None else only))

    def dies(self, rank: int, verb: str, key: str) -> None:
        """Let a rank die when it comes to this operation."""
        self.ranks[rank].store = Deadly(self.ranks[rank].store, comes_to(verb, key))


def comes_to(verb: str, key: str) -> Callable[[str, str], bool]:
    return lambda v, k: v == verb and key in f"{k}/"


def _attempt(future: Future[Any], go: threading.Event, function: Callable[[Ranks], Any], ranks: Ranks) -> None:
    go.wait()
    try:
        future.set_result(function(ranks))
    except BaseException as error:
        future.set_result(error)


def outcomes_of(started: dict[int, Future[Any]]) -> dict[int, Any]:
    _, waiting = wait(started.values(), PATIENCE)
    assert not waiting, f"{len(waiting)} ranks were left waiting"
    return {rank: future.result() for rank, future in started.items()}


def one_text(found: dict[int, Any]) -> tuple[type, str]:
    """The one class and text that all of these ranks raised."""
    assert all(isinstance(error, Exception) for error in found.values()), found
    assert len({(type(error), str(error)) for error in found.values()}) == 1, {str(e) for e in found.values()}
    return next((type(error), str(error)) for error in found.values())
