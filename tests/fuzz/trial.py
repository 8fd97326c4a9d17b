"""One trial: a checkpoint that was made wrong is used, and its outcome is one of two, or a fault of the library.

Allowed: it reads, or a `HoldfastError` is raised that names a file of it; within `SECONDS` of processor time, and with
memory for twice the files and `CONSTANT`. Everything else is a `Fault`, and tells where it came from.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import HoldfastError
from tests.fuzz.targets import TEXTS, Took, Tree, use, use_text

SECONDS = 20
"""Of processor time, which does not depend on who else is at work."""

WAITING = 120
"""Of any time: who waits for a pipe that nobody writes to takes no processor time."""

CONSTANT = 48 << 20
"""Buffers of the threads that read, and what Python keeps."""


class Hung(BaseException):
    """Raised into a trial that takes too long: no handler for `Exception` may swallow it."""


@dataclass(frozen=True)
class Fault:
    """What must not be. ``where`` names the place in the library, so that the same fault is told once."""

    kind: str
    where: str
    text: str


@dataclass
class Outcome:
    """``fault`` is None if all went as it should; ``error`` is the name of the error that refused, if one did."""

    error: str = ""
    fault: Fault | None = None
    took: Took | None = None


def tried(target: str, made: Tree, folder: Path) -> Outcome:
    """Write ``made`` into ``folder``, use it, and clean up."""
    if target in TEXTS:
        return _outcome(target, folder, made, lambda took: use_text(made["url"]))
    path = folder / "step-000000001"
    shutil.rmtree(path, ignore_errors=True)
    for name, data in made.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return _outcome(target, path, made, lambda took: use(target, path, took))


def _outcome(target: str, path: Path, made: Tree, work: Any) -> Outcome:
    told, size = Outcome(took=Took()), sum(map(len, made.values()))
    limit = 2 * size + CONSTANT
    try:
        with _watched(), _counted(limit), _peak(limit):
            work(told.took)
    except HoldfastError as error:
        told.error = type(error).__name__
        if target not in TEXTS and path.name not in str(error):
            told.fault = Fault("names no file", _where(error), f"{type(error).__name__}: {error}"[:500])
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, (HoldfastError, OSError)):
            told.fault = _fault(error.__cause__)  # it was caught by the last net, for want of a check
    except ValueError as error:
        told.error = type(error).__name__
        if target not in TEXTS:  # a URL that cannot be meant is a ValueError
            told.fault = _fault(error)
    except (Hung, Exception) as error:
        told.fault = _fault(error)
    return told


def _fault(error: BaseException) -> Fault:
    text = "".join(traceback.format_exception(error))
    return Fault(type(error).__name__, _where(error), text[-3000:])


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/holdfast/" in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.name}" for f in frames[-3:][::-1])


class TooMuch(BaseException):
    """Memory for more than twice the files was asked for."""


@contextmanager
def _watched() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hung("it takes too long")

    old = signal.signal(signal.SIGPROF, late), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, old[0])
        signal.signal(signal.SIGALRM, old[1])


_empty = torch.empty


@contextmanager
def _counted(limit: int) -> Iterator[None]:
    """No tensor may be asked for that is larger than the files can fill, whether or not it would be touched."""

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        size = (kwargs.get("dtype") or torch.float32).itemsize
        for n in shape:
            size *= n
        if size > limit:
            raise TooMuch(f"torch.empty of {size} bytes, {limit} are the limit")
        return _empty(*args, **kwargs)

    torch.empty = counted  # type: ignore[assignment]
    try:
        yield
    except TooMuch as error:
        raise MemoryError(str(error)).with_traceback(error.__traceback__) from None
    finally:
        torch.empty = _empty  # type: ignore[assignment]


@contextmanager
def _peak(limit: int) -> Iterator[None]:
    """The process may not grow by more than the limit: told by the kernel, which can forget the peak before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
    except OSError:
        before = -1
    yield
    if before >= 0 and _memory("VmHWM") - before > limit:
        raise MemoryError(f"grew by {_memory('VmHWM') - before} bytes, {limit} are the limit")


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return -1


def bound_memory() -> None:
    """For all of this process: what asks for more address space than any trial may take gets none."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), resource.RLIM_INFINITY))
