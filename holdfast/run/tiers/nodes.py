"""Which ranks share a fast folder, and what their first ranks, the leaders, tell each other.

The tiers of a manager own one `Nodes`. Never moves more than manifests and numbers of steps, and never waits for long.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from holdfast.errors import Mismatch, RankLost
from holdfast.events import log
from holdfast.ondisk import manifest
from holdfast.ranks.heartbeat import Watch
from holdfast.ranks.ranks import Call, Ranks
from holdfast.run.keep import Kept
from holdfast.storage.local import disk
from holdfast.storage.naming import naming
from holdfast.storage.place import Place

MARK = ".holdfast-tier.json"
"""What a fast folder belongs to, so that two runs do not take each other's steps for their own."""

_TOKEN = ".holdfast-{}.node"
_OLD = 3600.0  # seconds after which a token is what a process left that died here
_PAUSE = 0.02

Word = TypeVar("Word")


class News(msgspec.Struct, array_like=True):
    """What becomes of a save: its manifest (empty if it is swept already), and what to keep, if that is known."""

    manifest: bytes
    kept: Kept | None


class Instruction(msgspec.Struct, array_like=True):
    """What the leaders have to upload: the step of this ``name``. Up to the step ``upto`` what is not ``kept`` goes.

    ``lender`` is a step of the store that has some of its files.
    """

    number: int
    name: str = ""
    save: str = ""
    kept: Kept | None = None
    upto: int = 0
    lender: str = ""


class _Mark(msgspec.Struct):
    root: str


@dataclass
class Nodes:
    """The nodes of a run as one rank sees them. ``leaders`` are their first ranks, ``leader`` that of this one's.

    Messages go through the store of the process group, under ``key``. Raises RankLost if that does not answer.
    """

    ranks: Ranks
    key: str
    leaders: list[int] = field(default_factory=lambda: [0])
    leader: int = 0
    _ordered: int = 0

    @property
    def first(self) -> bool:
        return self.ranks.first

    @property
    def leads(self) -> bool:
        return self.leader == self.ranks.rank

    @cached_property
    def signs(self) -> Any:
        """Where leaders tell how far they are with what was ordered."""
        return self.ranks.lane(f"{self.key}/uploads").store

    @property
    def several(self) -> bool:
        return len(self.leaders) > 1

    @property
    def followers(self) -> list[int]:
        """The leaders but for the first rank."""
        return self.leaders[1:]

    # What any leader tells another: a manifest, and what to keep

    def tell(self, about: str, news: News) -> None:
        """Tell the leaders that will ask."""
        with self._asking():
            self.ranks.store.set(f"{self.key}/{about}", zlib.compress(msgspec.msgpack.encode(news), 1))

    def hear(self, about: str, patience: float, listeners: int) -> News | None:
        """The news about a save; None after ``patience`` seconds. The last of the ``listeners`` deletes it."""
        until, key = time.monotonic() + patience, f"{self.key}/{about}"
        with self._asking():
            while not self.ranks.store.check([key]):
                if time.monotonic() > min(until, self.ranks.limit):
                    return None
                time.sleep(_PAUSE)
            news = msgspec.msgpack.decode(zlib.decompress(bytes(self.ranks.store.get(key))), type=News)
            if self.ranks.store.add(f"{key}/heard", 1) == listeners:
                self.ranks.store.delete_key(key)
                self.ranks.store.delete_key(f"{key}/heard")
            return news

    # What the first rank orders, and the other leaders report

    def order(self, **what: Any) -> int:
        """Give all leaders an `Instruction`; its number."""
        self._ordered += 1
        if self.several:
            self._set("order", Instruction(self._ordered, **what))
        return self._ordered

    def ordered(self) -> Instruction | None:
        """The last order, unless it was heard before."""
        order = self._get("order", Instruction)
        if order is None or order.number == self._ordered:
            return None
        self._ordered = order.number
        return order

    def report(self, number: int, failure: str) -> None:
        """Tell the first rank what became of an order; an empty text is success."""
        self._set(f"report/{number}/{self.leader}", failure)

    def reports(self, number: int) -> dict[int, str]:
        """What the leaders have reported so far."""
        texts = {leader: self._get(f"report/{number}/{leader}", str) for leader in self.followers}
        return {leader: text for leader, text in texts.items() if text is not None}

    def silent(self, leaders: list[int], watch: Watch) -> list[int]:
        """Those of them that have made no progress with an order for as long as the deadline of ``watch`` says."""
        with self._asking():
            watch.look(leaders)
        now = time.monotonic()
        return [leader for leader in leaders if watch.silent(leader, now) > watch.deadline]

    def forget(self, number: int) -> None:
        """Leave nothing of the reports in the store."""
        for leader in self.followers:
            with self._asking():
                self.ranks.store.delete_key(f"{self.key}/report/{number}/{leader}")

    def show(self, step: int | None) -> None:
        """Let all ranks see which step is uploaded right now."""
        if self.ranks.store is not None:
            self._set("now", -1 if step is None else step)

    def shown(self) -> int | None:
        """The step that is uploaded right now, as all ranks can see it."""
        step = self._get("now", int) if self.ranks.store is not None else None
        return None if step == -1 else step

    def moves(self, *, moved: bool) -> int:
        """Report whether this node has ``moved`` bytes; returns how often any node has reported that it has."""
        if not self.several:
            return 0
        with self._asking():
            return int(self.ranks.store.add(f"{self.key}/moves", int(moved)))

    def end(self) -> None:
        """Tell the other leaders that nothing more will be ordered."""
        if self.several:
            self._set("end", self._ordered)

    def ended(self, obeyed: int) -> bool:
        """Whether nothing was ordered after the order of number ``obeyed``, nor will be."""
        return self._get("end", int) == obeyed

    def _set(self, name: str, word: Any) -> None:
        with self._asking():
            self.ranks.store.set(f"{self.key}/{name}", msgspec.msgpack.encode(word))

    def _get(self, name: str, kind: type[Word]) -> Word | None:
        with self._asking():
            if not self.ranks.store.check([f"{self.key}/{name}"]):
                return None
            return msgspec.msgpack.decode(bytes(self.ranks.store.get(f"{self.key}/{name}")), type=kind)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch's stores raise when their server is gone
            raise RankLost(f"the store of the process group does not answer ({error})") from error


def find_nodes(call: Call, folder: Place, root: str, key: str) -> Nodes:
    """Find out which ranks see the same ``folder``, and mark it as belonging to ``root``.

    Two rounds. Raises on all ranks what a rank raises: StorageError, Mismatch if the folder belongs to another root.
    """
    ranks = call.ranks
    token = secrets.token_hex(8)
    own = folder / _TOKEN.format(token)

    def put() -> str:
        folder.make_folder()
        _mark(folder, root, f".holdfast-{token}.tmp")
        with naming(own, "create"):
            os.close(disk.open(own, os.O_WRONLY | os.O_CREAT))
        return token

    def look() -> int:
        return next(rank for rank, other in enumerate(tokens) if (folder / _TOKEN.format(other)).exists())

    try:
        tokens = call.exchange("fast folder", put, lambda found: found, list[str])
        leader_of = call.exchange("nodes", look, lambda found: found, list[int])
    finally:
        with suppress(OSError):  # it is swept another time
            disk.delete(own)
    nodes = Nodes(ranks, key, sorted(set(leader_of)), leader_of[ranks.rank])
    if nodes.leads:
        _sweep_tokens(folder)
    if ranks.first and nodes.several:
        log.debug("%s: %d nodes, led by ranks %s", folder, len(nodes.leaders), nodes.leaders)
    return nodes


def root_of_fast(folder: Place) -> str | None:
    """The root whose fast tier a folder is marked as; None if it is not."""
    try:
        return msgspec.json.decode((folder / MARK).read_small(), type=_Mark).root
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # it has no mark, or none that can be read
        return None


def _mark(folder: Place, root: str, temporary: str) -> None:
    mark = folder / MARK
    data = msgspec.json.encode(_Mark(root))
    if mark.is_file() or not mark.create_small(data, temporary):
        try:
            owner = msgspec.json.decode(mark.read_small(), type=_Mark).root
        except msgspec.MsgspecError as error:
            owner = f"something else ({error})"
        if owner != root:
            raise Mismatch(
                f"the fast folder {folder} belongs to {owner}, not to {root}: give each run a fast folder of its own, "
                f"or delete {mark} if the run has moved"
            )


def _sweep_tokens(folder: Place) -> None:
    for path in folder.glob(_TOKEN.format("*")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD:
                disk.delete(path)


def bytes_of(path: Place) -> bytes:
    """The manifest of a step as it is sent; empty if there is none."""
    try:
        return (path / manifest.FILE_NAME).read_small()
    except FileNotFoundError:  # a later save has swept it
        return b""


def bring_manifest(path: Place, data: bytes) -> None:
    """Write what another node has committed; this one may have an older save of the step."""
    target, temporary = path / manifest.FILE_NAME, f".manifest.{os.getpid()}.{time.monotonic_ns()}.tmp"
    path.make_folder()
    if not target.create_small(data, temporary) and target.read_small() != data:
        target.replace_small(data, temporary)
