"""What frames every benchmark: its options, a folder to work in, what there is to know of the machine, figures as JSON.

Called by the commands, before and after they measure. Never measures, never judges.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import holdfast
from benchmarks.bar import Bar

OUT = Path("bench-out")


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
    """A new folder to work in, never one that held something before; removed at the end."""
    work = above.resolve() / f"{name}-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work)
        with suppress(OSError):
            work.parent.rmdir()  # unless it holds what is not ours


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
