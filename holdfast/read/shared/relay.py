"""A process group made for one load: ranks that want the same bytes hand them to each other, a slice at a time.

`share` makes one for each set of such ranks and closes it after the load. The ranks of a host share memory, so no byte
passes a socket between them; hosts gather from each other over gloo. Never touches a group that training uses.

We rejected sockets within a host, because each byte costs two copies more than with shared memory. The ranks of a host
still meet over gloo, because it notices at once when one of them dies. We rejected groups kept for later loads, because
loads are rare, and an idle group holds sockets, threads, and ranks that died.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.buffers.memory import Buffer, buffer
from holdfast.ranks.heartbeat import Vigil

MOST_LANES = 16
"""Ranks of one host that read and gather; more of them would make the windows too short."""

CONNECTING = 30.0
"""Seconds to wait for a rank to connect: all come from the same round, so one that is not there by then never comes."""

LONGEST = 600.0
"""Seconds that one slice may take at the least, as long as all ranks make progress."""

TRAILER = 64
"""Bytes at the end of a slice that tell how its sender fares."""

_TOKEN = 16
_HEAD = 4096  # bytes before the memory that is shared: the token that proves it is the same
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002

_PrefixStore: Any = getattr(dist, "PrefixStore", None)
_Gloo: Any = getattr(dist, "ProcessGroupGloo", None)  # missing from a torch that was built without it
_NOTHING = buffer(mmap.PAGESIZE)


class Lost(Exception):
    """The others do not answer, or not in time."""


@dataclass(frozen=True)
class Seat:
    """Where a rank sits among those that want the same: its host, and its place there.

    Those in the first ``lanes`` places of each host read: reader ``place * hosts + host``.
    """

    hosts: int
    lanes: int
    host: int
    place: int
    beside: tuple[int, ...]  # the ranks of this host, by place
    across: tuple[int, ...]  # the ranks in the same place of each host; empty if some host has no such place

    @property
    def reader(self) -> int | None:
        """The number of this reader, or None for a rank that does not read."""
        return self.place * self.hosts + self.host if self.place < self.lanes else None


def seat_of(holders: Sequence[int], rank: int, host_of: Sequence[int]) -> Seat:
    """The seat of ``rank`` among ``holders``, where rank r runs on host ``host_of[r]``."""
    places: dict[int, list[int]] = {}
    for holder in holders:
        places.setdefault(host_of[holder], []).append(holder)
    table = list(places.values())
    lanes = min(MOST_LANES, *(len(ranks) for ranks in table))
    host = next(i for i, ranks in enumerate(table) if rank in ranks)
    place = table[host].index(rank)
    across = tuple(ranks[place] for ranks in table) if place < lanes else ()
    return Seat(len(table), lanes, host, place, tuple(table[host]), across)


@dataclass
class Relay:
    """The connections of one rank to the others, and the memory that it shares with those of its host."""

    seat: Seat
    memory: Buffer
    deadline: float
    limit: Callable[[], float]
    vigil: Vigil
    interrupt: BaseException | None = None
    """What asked this process to stop while it was waiting for others, who wait for it in turn."""
    _beside: Any = None
    _across: Any = None
    _pending: list[Any] = field(default_factory=list)

    def sum_beside(self, values: Sequence[int]) -> list[int]:
        """The sums of all ranks of this host, once all have come here. Raises Lost."""
        if self._beside is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._wait(lambda: self._beside.allreduce([tensor]))
        sums: list[int] = tensor.tolist()
        return sums

    def gather_across(self, target: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``target`` with the ``own`` of all hosts, in their order. Raises Lost."""
        self._wait(lambda: self._across._allgather_base(target, own))

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            self._pending.append(work)
            until, pause = time.monotonic() + self.deadline, _FIRST_PAUSE
            self.vigil.begin()
            while not work.is_completed():
                # Looked at again and again instead of waited for: so it can be interrupted, and hurried.
                try:
                    now = time.monotonic()
                    # A rank that is slow may be at what it shares with others still, and is waited for.
                    if now > self.limit() or (now > until and self.vigil.in_vain()):
                        raise Lost("no answer in time")
                    self.vigil.look()
                    time.sleep(pause)
                except (KeyboardInterrupt, SystemExit) as error:
                    if self.interrupt is not None:
                        raise
                    self.interrupt = error  # the others hear of it at the next meeting
                pause = min(pause * 1.3, _LONGEST_PAUSE)
            work.wait()
            self.vigil.end()
            self._pending.clear()
        except RuntimeError as error:
            raise Lost(str(error).partition("\n")[0]) from None

    def forget(self) -> None:
        """Let the memory go; the connections stay."""
        self.memory = _NOTHING

    def close(self) -> None:
        """Leave. Ranks that still wait for this one see that the connection ends."""
        self.forget()
        groups = [g for g in (self._beside, self._across) if g is not None]
        self._beside = self._across = None
        _drop(groups, self._pending)
        self._pending = []


def _drop(groups: list[Any], pending: list[Any]) -> None:
    waits = bool(pending) and not pending[-1].is_completed()
    kept = [*groups, *pending]
    groups.clear()
    pending.clear()
    if waits:
        # A group waits, as it goes, for what is under way in it, which may last until its time is up: so the last to
        # let go of it must be that thread, and not this one.
        threading.Thread(target=kept.clear, daemon=True).start()


def meet(
    store: Any, name: str, seat: Seat, nbytes: int, deadline: float, limit: Callable[[], float], vigil: Vigil
) -> Relay:  # fmt: skip
    """Connect to the other ranks of ``seat``, with ``nbytes`` of memory shared by those of this host.

    ``name`` is equal on all of them and never used before in ``store``. ``vigil`` is kept over them in every wait.
    Raises Lost where that cannot be had.
    """
    relay = Relay(seat, _NOTHING, deadline, limit, vigil)
    try:
        vigil.begin()
        if len(seat.beside) > 1:
            relay._beside = _group(store, f"{name}/host/{seat.host}", seat.place, len(seat.beside), deadline)
        if seat.hosts > 1 and seat.across:
            relay._across = _group(store, f"{name}/lane/{seat.place}", seat.host, seat.hosts, deadline)
        relay.memory = buffer(nbytes) if relay._beside is None else _shared(relay, nbytes)
    except (RuntimeError, OSError, TypeError, Lost) as error:  # no gloo, no network, a system without memfd
        vigil.expect()  # who did not come to connect has been waited for since then
        relay.close()
        if isinstance(error, Lost):
            raise
        raise Lost(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    except BaseException:
        relay.close()
        raise
    return relay


def _group(store: Any, name: str, rank: int, size: int, deadline: float) -> Any:
    # Made by hand, so that it is known to nobody else: `new_group` would number it among those of training, and asks
    # every rank of the world to call it in the same order.
    made = _Gloo(_PrefixStore(name, store), rank, size, timedelta(seconds=min(deadline, CONNECTING)))
    # Its own end of a wait is beyond what a slow rank may take, and only lets go of what `close` has left behind.
    made._set_default_timeout(timedelta(seconds=max(LONGEST, 10 * deadline)))
    return made


def _shared(relay: Relay, nbytes: int) -> Buffer:
    """Memory that all ranks of this host have; nameless, so that nothing is left of it when they are killed."""
    fd, token = -1, b""
    sent = torch.zeros(4, dtype=torch.int64, device="cpu")
    failed = ""
    memory: mmap.mmap | None = None
    try:
        if relay.seat.place == 0:
            try:
                fd = os.memfd_create("holdfast-share", os.MFD_CLOEXEC)
                os.truncate(fd, _HEAD + nbytes)
                token = secrets.token_bytes(_TOKEN)
                os.pwrite(fd, token, 0)
                halves = [int.from_bytes(token[i : i + 8], "little", signed=True) for i in (0, 8)]
                sent = torch.tensor([os.getpid(), fd, *halves], dtype=torch.int64, device="cpu")
            except (OSError, AttributeError) as error:  # a system without memfd
                failed = str(error)
        relay._wait(lambda: relay._beside.broadcast([sent], _from_first()))
        pid, number, *halves = sent.tolist()
        try:
            memory = _mapped(pid, number, _HEAD + nbytes)
            # In a container of its own another process may have that number.
            if memory[:_TOKEN] != b"".join(half.to_bytes(8, "little", signed=True) for half in halves):
                raise OSError(f"process {pid} is another one here")
        except (OSError, ValueError) as error:
            failed = failed or str(error)
        if relay.sum_beside([int(bool(failed))])[0] or memory is None:
            raise OSError(failed or "another rank of this host cannot share memory")
    finally:
        if fd >= 0:
            os.close(fd)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return Buffer(memory, memoryview(memory)[_HEAD:], address + _HEAD)


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _mapped(pid: int, number: int, nbytes: int) -> mmap.mmap:
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # All pages at once: one fault for each of them would cost more than the copy that it is for.
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
