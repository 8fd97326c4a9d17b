"""The processes of one episode: forked from this warm one, heard through a pipe, and all gone at the end.

The loop makes one `World` for each episode. It says what the ranks told and never judges it, but for one thing: a
process that is still there long after everything should have ended.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.soak.faults import send
from tests.soak.plan import Episode
from tests.soak.rank import serve
from tests.trials import forked, read_line, serve_store

GUARD = 240.0
"""Seconds without any word after which ranks count as hung; every deadline is a fraction of it."""

ADOPT = 36  # PR_SET_CHILD_SUBREAPER: writers that lose their trainer become children of this program


class Violation(Exception):
    """Something does not hold that must hold."""


def adopt() -> None:
    """Let writer processes whose trainer is gone be children of this one."""
    if ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0) != 0:
        raise OSError(errno.EINVAL, "the system cannot hand orphans to this process")


class World:
    """The ranks of an episode, a server for their store, and what they told: ``[kind, rank, …]`` each."""

    def __init__(self, episode: Episode, base: Path) -> None:
        self.episode, self.base = episode, base
        self.words = base / "words" / f"episode-{episode.number}"
        self.words.mkdir(parents=True)
        self.told: list[list[Any]] = []
        self.codes: dict[int, int] = {}
        self._heard, told = os.pipe()
        self._rest = b""
        port_read, port_told = os.pipe()
        self.server = forked(serve_store, port_told)
        port = int(read_line(port_read))
        os.close(port_read)
        os.close(port_told)
        self.pids = [forked(serve, episode, rank, base, self.words, told, port) for rank in range(episode.world)]
        os.close(told)

    # What they tell

    def of(self, kind: str) -> list[list[Any]]:
        return [line[1:] for line in self.told if line[0] == kind]

    @property
    def writers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, pid in self.of("writer"):
            found.setdefault(rank, []).append(pid)
        return found

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def hear(self, seconds: float) -> bool:
        """Take what is told, waiting so long for a first word; whether there was any."""
        ready, _, _ = select.select([self._heard], [], [], seconds)
        if ready:
            self._rest += os.read(self._heard, 1 << 16)
            *lines, self._rest = self._rest.split(b"\n")
            self.told += [json.loads(line) for line in lines]
        for rank in self.living:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return bool(ready)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Until it holds: True; False after so many seconds. Without ``seconds`` it has to come about."""
        until = time.monotonic() + (GUARD if seconds is None else seconds)
        while not holds():
            left = until - time.monotonic()
            if left <= 0:
                if seconds is None:
                    self._give_up(what)
                return False
            if not self.living:
                while self._drains():
                    pass
                return holds()
            self.hear(min(left, 0.01))
        return True

    def _drains(self) -> bool:
        """Whether there was something left to be heard of ranks that are gone; writers may hold the pipe open."""
        before = len(self.told), len(self._rest)
        if select.select([self._heard], [], [], 0)[0]:
            self.hear(0)
        return before != (len(self.told), len(self._rest))

    def say(self, word: str) -> None:
        (self.words / word).touch()

    def _give_up(self, what: str) -> None:
        for rank in self.living:
            send(self.pids[rank], signal.SIGCONT)
            send(self.pids[rank], signal.SIGUSR2)  # each rank writes its stacks to its log
        time.sleep(1)
        raise Violation(f"hung: {what} has not come about within {GUARD:g} s; ranks {self.living} are at it")

    # The end

    def end(self) -> None:
        """Until all ranks are gone, and what they told is heard."""
        self.wait(lambda: not self.living, "the end of all ranks")
        while self._drains():
            pass
        self._reap_server()

    def _reap_server(self) -> None:
        if self.server:
            send(self.server, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.server, 0)
            self.server = 0

    def await_writers(self) -> None:
        """Writer processes end by themselves once their trainer is gone."""
        until = time.monotonic() + GUARD
        while children := children_of(os.getpid()):
            for pid in children:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > until:
                raise Violation(f"processes {children} live on: {[_command(pid) for pid in children]}")
            time.sleep(0.002)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for pid in self.pids:
            send(pid, signal.SIGKILL, group=True)
        for rank in self.living:
            with suppress(ChildProcessError):
                os.waitpid(self.pids[rank], 0)
        self._reap_server()
        for pids in self.writers.values():
            for pid in pids:
                if pid in children_of(os.getpid()):  # else its number may be another's by now
                    send(pid, signal.SIGKILL)
                    with suppress(ChildProcessError):
                        os.waitpid(pid, 0)
        os.close(self._heard)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"
