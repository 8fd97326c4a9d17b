"""What every measuring part has: options, a folder to write in, a deadline, and figures that are kept as they come.

Used by the parts, each a process that may be ended at any moment: what it has measured by then is in its file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bar import Bar

SHARED = Path("/dev/shm")
"""Memory as a file system: where saves go if the disk is slow, so that writing does not take all the time there is."""

DURABLE = "durable save"


@dataclass
class Part:
    """One measuring process. ``small``: the same code in small, on the CPU with a device that pretends."""

    out: Path
    work: Path
    seconds: float
    small: bool
    rates: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)
    _until: float = 0.0

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def left(self) -> float:
        """Seconds until this process is ended."""
        return self._until - time.monotonic()

    @property
    def shared(self) -> Path:
        """A folder of this process in memory; made by who wants it, removed at the end. In small it is one on disk."""
        return self.work / "shared" if self.small else SHARED / f"holdfast-gpu-{os.getpid()}"

    def place(self, nbytes: int) -> tuple[Path, float]:
        """Where to write so much, and how fast that is in GB/s: the disk, or memory if that is much faster."""
        disk = self.rates.get(f"{DURABLE} to the disk", 1.0)
        memory = self.rates.get(f"{DURABLE} to shared memory", 0.0)
        if memory > 1.3 * disk and free(SHARED) > 1.2 * nbytes:
            self.shared.mkdir(exist_ok=True)
            self.fact("saved to", f"shared memory, {memory:.1f} GB/s (disk: {disk:.1f})")
            return self.shared, memory
        self.fact("saved to", f"the disk, {disk:.1f} GB/s")
        return self.work, disk

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that a device copies from: in small one that pretends."""
        if not self.small:
            return tensor
        from tests.gpu.standin import pretended

        return pretended(tensor)

    def fact(self, name: str, value: object) -> None:
        self.facts[name] = value
        self.keep()

    def row(self, **row: object) -> None:
        """A row of figures; shown as it comes."""
        self.rows.append(row)
        print(row, flush=True)
        self.keep()

    def bar(self, bar: Bar) -> None:
        """What must be cleared. In small nothing is."""
        if not self.small:
            self.bars.append({**asdict(bar), "met": bar.met})
            self.keep()

    def keep(self) -> None:
        text = json.dumps({"facts": self.facts, "rows": self.rows, "bars": self.bars})
        half = self.out.with_suffix(".half")
        half.write_text(text)
        half.replace(self.out)


@contextmanager
def a_part(name: str, arguments: list[str] | None = None) -> Iterator[Part]:
    """The part of this name, from its command line; its folder is removed at the end."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{name}")
    parser.add_argument("--out", type=Path, required=True, help="the figures as JSON")
    parser.add_argument("--work", type=Path, required=True, help="a folder to write in, made and removed")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which it will be ended")
    parser.add_argument("--rates", type=Path, help="the figures of `benchmarks.gpu.rates`")
    parser.add_argument("--small", action="store_true", help="on the CPU, with a device that pretends")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --small runs the same code on the CPU")
    options.work.mkdir(parents=True)
    part = Part(options.out, options.work, options.seconds, options.small)
    if options.rates is not None and options.rates.exists():
        rows = json.loads(options.rates.read_text())["rows"]
        part.rates = {row["what"]: row["value"] for row in rows if row["value"]}
    part._until = time.monotonic() + options.seconds
    part.keep()
    try:
        with _pretending() if options.small else nullcontext():
            yield part
    finally:
        for folder in (options.work, part.shared):
            shutil.rmtree(folder, ignore_errors=True)


def _pretending() -> Any:
    from tests.gpu.lab import a_lab

    return a_lab()


def free(folder: Path) -> int:
    """Bytes that can be written there."""
    if not folder.is_dir():
        return 0
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize


def synchronize(device: str) -> None:
    """Wait until the device has done all it was told."""
    if device == "cuda":
        torch.cuda.synchronize()
