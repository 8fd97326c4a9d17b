"""What frames every benchmark: its options, a folder to work in, what there is to know of the machine, figures as JSON.

Called by the commands, before and after they measure. Never measures, never judges.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

import holdfast
from benchmarks.bar import Bar

OUT = Path("bench-out")
CLEANING = 10.0
"""Seconds after a signal in which a second one changes nothing: the benchmark is cleaning up."""
_FOLDER = re.compile(r"holdfast-bench-[\w-]+-(?P<pid>\d+)")


def options_of(name: str, doc: str | None, *, quick: str, writes: bool = True) -> argparse.ArgumentParser:
    """The options that every benchmark has; ``quick`` says what is smaller then. Those that write have a folder."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    if writes:
        parser.add_argument("--dir", type=Path, default=OUT / "work", help="where to write (made, then removed)")
    figures = OUT / f"{name.replace('_', '-')}.json"
    parser.add_argument("--out", type=Path, default=figures, help="the figures as JSON")
    return parser


@contextmanager
def folder(above: Path, name: str) -> Iterator[Path]:
    """A new folder to work in, never one that held something before; removed at the end, also by Ctrl-C and SIGTERM.

    Folders that killed benchmarks left beside it are removed first.
    """
    above = above.resolve()
    for left in [path for path in above.glob("holdfast-bench-*") if _is_left(path)]:
        remove(left)
    work = above / f"holdfast-bench-{name}-{os.getpid()}"
    with stoppable():
        work.mkdir(parents=True)
        try:
            yield work
        finally:
            remove(work)
            with suppress(OSError):
                work.parent.rmdir()  # unless it holds what is not ours


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does; a second signal does not disturb what cleans up after one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -CLEANING

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > CLEANING:
            last = time.monotonic()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def remove(path: Path) -> None:
    """Delete a folder. What is gone already is no error, and what a process adds meanwhile is deleted too."""
    for _ in range(100):
        shutil.rmtree(path, onerror=_unless_gone)
        if not path.exists():
            return
        time.sleep(0.05)
    shutil.rmtree(path)


def _unless_gone(function: Callable[..., object], path: str, error: tuple[object, BaseException, object]) -> None:
    """Pass over a file that another process deleted, and over a folder that is not empty yet."""
    if not isinstance(error[1], OSError) or error[1].errno not in (errno.ENOENT, errno.ENOTEMPTY):
        raise error[1]


def _is_left(path: Path) -> bool:
    name = _FOLDER.fullmatch(path.name)
    return name is not None and not Path("/proc", name["pid"]).exists()


def machine() -> dict[str, object]:
    """What one must know of the machine and the versions to read figures."""
    return {
        "torch": str(torch.__version__),
        "holdfast": holdfast.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, load average {os.getloadavg()[1]:.1f}",
    }


def write(
    out: Path, facts: Mapping[str, object], rows: Sequence[Mapping[str, object]], bars: Sequence[Bar] = (),
    **more: object,
) -> None:  # fmt: skip
    """The figures as JSON, and a line that says where they are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    judged = [{**vars(bar), "met": bar.met} for bar in bars]
    text = json.dumps({"facts": facts, "bars": judged, "rows": rows, **more}, indent=1)
    out.write_text(text + "\n")
    print(f"written to {out}")


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)
