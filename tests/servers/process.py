"""Processes that leave nothing behind: started here, they die with this process.

Called by every server of this package, and by what fetches them. Never waits without a deadline, never looks for a
process by its name.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.servers.unavailable import Unavailable

GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True)
class Process:
    """A command, with all it starts, in a folder that goes when it ends."""

    guard: subprocess.Popen[bytes]
    folder: Path

    def stop(self) -> str:
        """Kill it and remove its folder; the last that it said, in one line."""
        # Closes the guard's input, which is what it waits for.
        said, _ = self.guard.communicate(timeout=60)
        return " | ".join(line.strip() for line in said.decode(errors="replace").splitlines()[-4:])[-600:]

    @property
    def is_over(self) -> bool:
        return self.guard.poll() is not None


def folder_for(kind: str) -> Path:
    """A fresh folder for one process; `launch` sees to it that it goes."""
    return Path(tempfile.mkdtemp(prefix=f"holdfast-{kind}-"))


def launch(command: Sequence[str | Path], folder: Path) -> Process:
    """Start ``command`` in ``folder``, a fresh one; what it says goes to ``folder``/output."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), str(folder), *map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return Process(guard, folder)


def fetch(command: Sequence[str | Path], *, seconds: float) -> None:
    """Run a command that fetches something; Unavailable, with what it said, if it fails or takes too long."""
    name = Path(command[0]).name
    process = launch(command, folder_for("fetch"))
    reason = f"{name} failed"
    try:
        process.guard.wait(seconds)
    except subprocess.TimeoutExpired:
        reason = f"{name} did not end within {seconds:.0f} s"
    finally:
        said = process.stop()
    if process.guard.returncode:
        raise Unavailable(f"{reason}: {said}")


def hold_port() -> socket.socket:
    """A free port of 127.0.0.1, kept while the socket is open: nobody gets it by chance, who asks for it does.

    The socket never listens, so a server that sets SO_REUSEADDR, as all do, can.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def wait_until_it_answers(process: Process, kind: str, answers: Callable[[], bool], seconds: float = 240.0) -> None:
    """Until ``answers()`` is true; Unavailable, and the process stopped, if it ends before or takes too long."""
    deadline = time.monotonic() + seconds
    while not answers():
        if process.is_over or time.monotonic() > deadline:
            reason = "ended by itself" if process.is_over else f"did not answer within {seconds:.0f} s"
            raise Unavailable(f"{kind} {reason}: {process.stop()}")
        time.sleep(0.05)
