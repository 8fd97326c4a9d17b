"""What is injected: on a rank the places where it waits for a fault and calls to the disk that fail; from outside
kills, freezes, full disks, limits, and files that are deleted or altered.

Ranks call `watch` and `heal`, the program the rest. Never decides what must hold.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.buffers.stable import CopyGuard
from holdfast.commit import settle
from holdfast.commit.agree import _Agreeing
from holdfast.commit.job import Job
from holdfast.commit.outgoing import Outgoing
from holdfast.storage.local import disk
from holdfast.write import write
from tests.soak.plan import Episode

SMALL = 96 << 20
"""Bytes of a file system of a run's own."""

# On a rank.

_healing: list[Callable[[], None]] = []


def watch(rank: Any, episode: Episode, start: int) -> None:
    """Let the rank stop where its episode says, and let calls to the disk fail in that save."""
    fault = episode.fault
    step = start + fault.step * episode.every - start % episode.every
    if fault.kind == "disk":
        _fail_calls(rank, episode, step)
    elif fault.stage is not None and fault.kind in ("kill", "freeze", "full", "limit", "signal"):
        _stop_at(rank, fault.stage, step)


def heal() -> None:
    """From now on nothing fails any more."""
    while _healing:
        _healing.pop()()


def _stop_at(rank: Any, stage: str, step: int) -> None:
    arrived = threading.Lock()

    def arrive(folder: Any) -> None:
        if folder is not None and folder.name == f"step-{step:09d}" and arrived.acquire(blocking=False):
            rank.tell("at", stage)
            rank.await_word("go")

    def around(owner: Any, name: str, folder_of: Callable[..., Any], *, after: bool = False) -> None:
        done = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if not after:
                arrive(folder_of(*args))
            result = done(*args, **options)
            if after:
                arrive(folder_of(*args))
            return result

        setattr(owner, name, watched)

    places: dict[str, Callable[[], None]] = {
        "save": lambda: around(Job, "check", lambda job, *_: job.folder),
        "plan": lambda: around(_Agreeing, "run", lambda agreeing, *_: agreeing.job.folder),
        "planned": lambda: around(_Agreeing, "run", lambda agreeing, *_: agreeing.job.folder, after=True),
        "staging": lambda: around(write.Writing, "stage", lambda writing, *_: writing.folder, after=True),
        "staged": lambda: around(CopyGuard, "copied", lambda guard, *_: guard._copying._path, after=True),
        "handed": lambda: around(write.Writing, "leave", lambda writing, *_: writing.folder, after=True),
        "durable": lambda: around(Outgoing, "finish", lambda outgoing, *_: outgoing.job.folder, after=True),
        "committing": lambda: around(settle, "commit", lambda folder, *_: folder),
        "committed": lambda: around(settle, "commit", lambda folder, *_: folder, after=True),
        "parts": lambda: around(settle, "take_away", lambda folder, *_: folder),
    }
    places[stage]()


def _fail_calls(rank: Any, episode: Episode, step: int) -> None:
    """From that save on the n-th call of a kind to the disk fails, or all take longer, until the rank is healed."""
    fault = episode.fault
    if rank.rank not in fault.ranks:
        return
    lock, count, began = threading.Lock(), 0, False

    def hook(call: Any, do: Callable[[], Any]) -> Any:
        nonlocal count, began
        if str(rank.words) in call.path or fault.verb not in ("any", call.verb):
            return do()
        with lock:
            began = began or f"step-{step:09d}" in call.path
            count += began
            hit = began and (count == fault.number or (fault.error == 0 and count % 3 == 0))
        if hit:
            if count == fault.number:
                rank.tell("hit", call.verb, os.path.basename(call.path), fault.error)
            if fault.error:
                raise OSError(fault.error, os.strerror(fault.error), call.path)
            time.sleep(0.05)
        return do()

    disk.install(hook)
    _healing.append(lambda: disk.remove(hook))


# From outside.


def send(pid: int, number: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number) if group else os.kill(pid, number)


def limit(pid: int, nbytes: int | None) -> None:
    """No file that this process writes grows beyond so many bytes; None: as before."""
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))


def mounted(folder: Path) -> bool:
    """Make ``folder`` a small file system of its own, if that is permitted here."""
    folder.mkdir(parents=True, exist_ok=True)
    made = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(made, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


def fill(folder: Path, leave: int) -> Path:
    """Take all space of a file system but ``leave`` bytes."""
    ballast = folder / "ballast"
    with open(ballast, "wb") as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(free - leave, 1))
    return ballast


def spoil(path: Path, how: str, chance: random.Random) -> None:
    """Delete, cut or alter a file."""
    if how == "delete":
        path.unlink()
    elif how == "cut":
        os.truncate(path, chance.randrange(path.stat().st_size))
    else:
        with open(path, "r+b") as file:
            at = chance.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
