"""One round between ranks over a store: messages climb a tree to the first rank, one verdict comes down to all.

`Call` in `ranks` makes a `Round` for each. Never lets two verdicts stand: the first rank claims the root's key before
it decides, a rank that runs out of time declares the round failed in the same place, and late ranks read what stands.

We rejected blocking waits on the server. They hold the connection that all calls of a process share, neither `hurry`
nor a signal can end them, and in a file store they are polls too. A leader is only a shortcut: messages stay until the
verdict stands, so other ranks can look past a leader that is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Protocol

import msgspec

from holdfast.events import log
from holdfast.ranks.heartbeat import Watch, look_interval
from holdfast.ranks.messages import Message, Node, Tree, Verdict, decode, encode

_CLAIMED = b"claimed"  # the first rank is deciding; ranks listed behind it are asked for their labels in full
# A rank declares a round failed before it looks for absent ranks, so that thousands of ranks do not look at once.
_FAILING = b"failing"  # the rank behind it has declared the round failed, and finds out which ranks are absent
_NOTHING = b"?"  # never a message or a verdict
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02  # seconds between two looks at the store; one look costs 15 us
_MANY_FIRST, _MANY_LONGEST = 5e-6, 25e-6  # the same for each rank, where so many look that the store would drown
_TURN = 0.2  # seconds that each level below the first rank leaves it to those above to declare a round failed
_PATIENCE = 3.0  # seconds between two looks past a leader that may be gone, of a rank that leads nobody
_NAMING = 5.0  # seconds to find out which ranks are absent, before others do it too
_ASKING = 10.0  # seconds that the first rank waits for labels
_LOOKED_AT = 256  # ranks whose signs are looked at before they are named, at the most


class Lose(Protocol):
    """Makes the verdict of a round that failed because of some ranks."""

    def __call__(self, named: list[int], absent: list[int], what: str, watch: Watch | None = None) -> Verdict:
        """``named`` are lost, of all that are ``absent``; ``what`` they did not do; ``watch``: the signs they gave."""


@dataclass
class Round:
    """One round as one rank takes part in it.

    ``base`` is what its keys begin with. ``conclude`` makes a verdict of all messages, on the first rank alone.
    ``lost`` makes the verdict of a round that failed because of some ranks. ``limit`` is the moment that no wait
    outlasts. ``watch`` has seen the signs of others; ``tick`` is called while this rank waits, as a sign of its own.

    The first rank watches all that are absent, and all watch the first rank; a leader watches those of its blocks. Up
    to `FLAT` ranks, each watches all.
    """

    store: Any
    tree: Tree
    rank: int
    base: str
    label: str
    deadline: float
    limit: Callable[[], float]
    conclude: Callable[[Round, bytes], Verdict]
    lost: Lose
    watch: Watch
    tick: Callable[[], None]
    _led: list[Node] = field(default_factory=list)
    _sent: list[str] = field(default_factory=list)
    _passed: bytes = b""
    _claim: bytes = _CLAIMED
    _watched: list[int] = field(default_factory=list)
    _reported: bool = False

    def meet(self, message: Message) -> Verdict:
        """Send this rank's message and learn the verdict. Raises RuntimeError, as torch's stores do, if it is gone."""
        tree, root = self.tree, self.tree.root
        self._led = [node for node in tree.led_by(self.rank) if node != root]
        duties = tree.led_by(self.rank)
        heard = tree.heard_by(self.rank)
        self._send(self._message(Node(0, self.rank)), encode(message))
        began = time.monotonic()
        until, naming = began + self.deadline + self._turn(), math.inf
        step = look_interval(self.deadline) if duties or tree.levels == 1 else min(_PATIENCE, self.deadline / 8)
        look = began + step * (1 + self.rank / tree.size)
        pause, longest = self._pauses()
        while True:
            now = time.monotonic()
            self.tick()
            late, hurried = now > until, now > self.limit()
            # A leader that should gather messages, or pass the verdict on, may be gone: look past it now and then.
            past = hurried or now > look
            if past:
                look = now + step
            if late or hurried:
                heard = root
            stands = self._look(root if past else heard)
            if stands is not None:
                self._pass_on(stands)
                if not stands.startswith((_CLAIMED, _FAILING)):
                    return decode(stands, Verdict)
                self._tell_label(stands)
                claimed = stands.startswith(_CLAIMED)
                if naming == math.inf:
                    naming = now + _NAMING
                    self.watch.moved(0, now)
                elif claimed and hurried:  # the others do not hear of it: they may have the time
                    return self._undecided()
                elif claimed and past and self._lost_of([0], began):
                    # The first rank looks for its claim before it commits, and before it passes the outcome on.
                    self._set_if(stands, encode(self._undecided()))
                elif not claimed and (hurried or now > naming):
                    self._name_absent(stands, [])
                    continue
            elif duties and self._is_there(duties[0], past=past):
                # The claim keeps the verdict single: once it stands no rank may declare the round failed, and once a
                # rank has declared it, the first rank must not commit.
                if duties[0] != root:
                    joined = self._join(duties[0])
                    if joined is not None:  # else a verdict stands, and a rank has taken its message away
                        self._send(self._message(duties.pop(0)), joined)
                elif self._set_if(b"", _CLAIMED):
                    self._pass_on(_CLAIMED)
                    return self._decide()
                continue
            elif past:
                suspects = self._suspects(duties, late=late or hurried)
                lost = suspects if hurried else self._lost_of(suspects, began)
                if lost or hurried:
                    failing = _FAILING + b"%d" % self.rank
                    if self._set_if(b"", failing):
                        self._name_absent(failing, lost)
                    continue
                if late:
                    self._tell_slow(suspects)
            time.sleep(max(min(pause, look - now), _FIRST_PAUSE))
            pause = min(pause * 1.5, longest)

    def confirm(self) -> bool:
        """Whether the first rank's claim still stands, so that it may do what cannot be undone."""
        return self._look(self.tree.root) == self._claim

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """The labels of these ranks in full, as far as they answer; only while the first rank decides."""
        claim = _CLAIMED + msgspec.msgpack.encode(ranks)
        if not self._set_if(self._claim, claim):
            return {}  # this rank has been given up
        self._claim = claim
        self._pass_on(claim)
        keys = [self._label(rank) for rank in ranks]
        until = time.monotonic() + min(self.deadline, _ASKING)
        while not self.store.check(keys) and time.monotonic() < min(until, self.limit()):
            self.tick()
            time.sleep(_LONGEST_PAUSE)
        labels = {rank: self._peek(key) for rank, key in zip(ranks, keys, strict=True)}
        return {rank: text.decode() for rank, text in labels.items() if text is not None}

    def forget(self) -> None:
        """Leave nothing of the round in the store: each rank takes back what it sent, the last reader of a block the
        verdict that lay there for it.

        Ranks that never come leave theirs, for ranks that come late.
        """
        tree = self.tree
        for key in self._sent:
            self.store.delete_key(key)
        node = Node(0, self.rank)
        while node != tree.root:
            node = tree.parent(node)
            if self.store.add(self._key("read", node), 1) < len(tree.children(node)):
                break
            self.store.delete_key(self._verdict(node))
            self.store.delete_key(self._key("read", node))

    # Up: messages

    def _send(self, key: str, message: bytes) -> None:
        self.store.set(key, message)
        self._sent.append(key)

    def _is_there(self, node: Node, *, past: bool) -> bool:
        """Whether all messages of a block are there; with ``past`` also where a leader has not passed it on."""
        children = self.tree.children(node)
        if self.store.check([self._message(child) for child in children]):
            return True
        return (
            past
            and node.level > 1
            and all(self.store.check([self._message(child)]) or self._is_there(child, past=True) for child in children)
        )

    def _join(self, node: Node) -> bytes | None:
        """The messages of a block, as a list of those of its children, in order; None if some are gone again."""
        parts = []
        for child in self.tree.children(node):
            part = self._peek(self._message(child))
            if part is None and child.level > 0:
                part = self._join(child)
            if part is None:
                return None
            parts.append(part)
        return encode(parts)

    def _decide(self) -> Verdict:
        message = self._join(self.tree.root)
        # Nothing is left if the others have waited long enough for this rank, and gone.
        verdict = self.conclude(self, message) if message else self.lost([0], [0], "came too late to decide")
        data = encode(verdict)
        stands = bytes(self.store.compare_set(self._verdict(self.tree.root), self._claim, data))
        self._pass_on(stands)
        return verdict if stands == data else decode(stands, Verdict)

    def _undecided(self) -> Verdict:
        verdict = self.lost([0], [0], "began to decide but gave no outcome to", self.watch)
        return msgspec.structs.replace(verdict, settled=False)

    # Down: verdicts

    def _look(self, node: Node) -> bytes | None:
        key = self._verdict(node)
        return bytes(self.store.get(key)) if self.store.check([key]) else None

    def _pass_on(self, stands: bytes) -> None:
        if stands != self._passed:
            for node in reversed(self._led):
                self.store.set(self._verdict(node), stands)
            self._passed = stands

    def _tell_label(self, stands: bytes) -> None:
        ranks = stands.removeprefix(_CLAIMED)
        key = self._label(self.rank)
        if ranks and ranks != stands and key not in self._sent and self.rank in msgspec.msgpack.decode(ranks):
            self._send(key, self.label.encode())

    # Which ranks are waited for, and which are lost

    def _suspects(self, duties: list[Node], *, late: bool) -> list[int]:
        """The ranks that this one watches."""
        tree = self.tree
        if self.rank == 0 or tree.levels == 1:
            suspects = self._absent(tree.root)
        elif duties:
            suspects = self._absent(duties[-1])
        elif self._led or late:  # ranks that lead no block leave it to those that do
            node = tree.heard_by(self.rank)
            leader = node.number * tree.width**node.level
            suspects = [] if self.store.check([self._message(Node(0, leader))]) else [leader]
        else:
            return []
        return sorted({0, *suspects} - {self.rank})

    def _lost_of(self, suspects: list[int], began: float) -> list[int]:
        """Those that have made no progress for as long as the deadline says."""
        self._watched = suspects
        self.watch.expect(suspects, began)
        self.watch.look(suspects)
        now, longest = time.monotonic(), self.deadline + self._turn()
        return [rank for rank in suspects if self.watch.silent(rank, now) > longest]

    def _tell_slow(self, suspects: list[int]) -> None:
        if self._reported:
            return
        # The first rank gives signs while it waits, too.
        slow = [r for r in suspects if self.watch.progress(r) and not self.store.check([self._message(Node(0, r))])]
        if slow:
            self._reported = True
            far = ", ".join(f"rank {rank} is still at work, {self.watch.progress(rank)}" for rank in slow[:3])
            log.info("%s: waiting on for %d ranks: %s", self.label, len(slow), far)

    def _name_absent(self, failing: bytes, lost: list[int]) -> None:
        absent = self._absent(self.tree.root)
        named = [rank for rank in absent if rank in lost or self._gives_no_sign(rank, lost, absent)]
        if named:
            verdict = self.lost(named, absent, "never came to", self.watch)
        elif absent and not lost:  # the rank that knew which of them is lost is lost itself
            verdict = self.lost(absent, absent, "never came to")
        elif 0 in lost or not lost:  # all are there: the first rank has stopped between its word and its claim
            verdict = self.lost([0], sorted({0, *absent}), "came to, but never decided,", self.watch)
        else:
            verdict = self.lost(lost, sorted({*lost, *absent}), "came too late to")
        self._set_if(failing, encode(verdict))

    def _gives_no_sign(self, rank: int, lost: list[int], absent: list[int]) -> bool:
        """Of a rank that is watched by others, whether it is as lost as those that are known to be."""
        if not lost or rank in self._watched:
            return False
        if len(absent) > _LOOKED_AT:
            return True
        self.watch.expect([rank], time.monotonic())
        self.watch.look([rank])
        return not self.watch.progress(rank)

    def _absent(self, node: Node) -> list[int]:
        missing = self._missing(self.tree.children(node))
        return [rank for child in missing for rank in ([child.number] if child.level == 0 else self._absent(child))]

    def _missing(self, nodes: list[Node]) -> list[Node]:
        if self.store.check([self._message(node) for node in nodes]):
            return []
        if len(nodes) == 1:
            return nodes
        part = isqrt(len(nodes))
        return [node for i in range(0, len(nodes), part) for node in self._missing(nodes[i : i + part])]

    def _set_if(self, expected: bytes, value: bytes) -> bool:
        """Set the root's verdict if this stands there now."""
        return bytes(self.store.compare_set(self._verdict(self.tree.root), expected, value)) == value

    # Keys, and when to look at them

    def _key(self, what: str, node: Node) -> str:
        return f"{self.base}/{what}" + ("" if node == self.tree.root else f"/{node.level}.{node.number}")

    def _message(self, node: Node) -> str:
        return f"{self.base}/word/{node.number}" if node.level == 0 else self._key("words", node)

    def _verdict(self, node: Node) -> str:
        return self._key("verdict", node)

    def _label(self, rank: int) -> str:
        return f"{self.base}/label/{rank}"

    def _peek(self, key: str) -> bytes | None:
        """What a key holds, if it is there. A `get` would wait for one that somebody takes away at this moment."""
        data = bytes(self.store.compare_set(key, _NOTHING, _NOTHING))
        return None if data == _NOTHING else data

    def _turn(self) -> float:
        """How much longer than the first rank this one waits before it declares a round failed: others have done it."""
        tree = self.tree
        if tree.levels == 1 or self.rank == 0:
            return 0.0
        below = tree.levels - len(tree.led_by(self.rank))
        return _TURN * (below + self.rank / tree.size)

    def _pauses(self) -> tuple[float, float]:
        tree = self.tree
        if tree.levels == 1 or self._led:
            return _FIRST_PAUSE, _LONGEST_PAUSE
        return max(_FIRST_PAUSE, tree.size * _MANY_FIRST), max(_LONGEST_PAUSE, tree.size * _MANY_LONGEST)
