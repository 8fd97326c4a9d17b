"""Runs one command, shows and keeps its output, and writes its row.

`python -m evidence run NAME` calls it. Never writes a row for a run that was interrupted, or whose
code changed meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO, Any

from evidence import counts, row
from evidence.digest import ROOT, digest, look_again
from evidence.row import Row
from evidence.runs import Run

LOGS = Path("bench-out") / "evidence"
"""Where the output of each run is kept; `make clean` removes it."""
PATIENCE = 60.0
"""Seconds that an interrupted run may take to clean up."""
GENERATED = (":!evidence/rows", ":!docs/trust.md", ":!zoo/results.md")
"""What recording changes itself, so that it does not count as a change of the tree."""
NARROWING = (
    "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTEST_ADDOPTS", "FUZZ_SECONDS", "FUZZ_TARGETS", "SOAK_MINUTES",
    "SOAK_SEED", "TORCH", "ONLY", "JOBS",
)  # fmt: skip
"""Variables that would make a run smaller than its row says."""

_FACTS = """
import importlib.metadata, json, platform
try: torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError: torch = "none"
print(json.dumps({"python": platform.python_version(), "torch": torch}))
"""


class NotRecorded(Exception):
    """There is no new row; the text says why."""


def record(run: Run, folder: Path = row.ROWS, root: Path = ROOT) -> Row:
    """Run it and write its row, also if it fails. Raises NotRecorded."""
    command = [_expanded(word, run.name) for word in run.command]
    before, load = digest(run, root), os.getloadavg()[0]
    commit, clean = _git(root, "rev-parse", "HEAD"), _is_clean(root)
    began, clock, wall = datetime.now(timezone.utc), time.monotonic(), time.time()
    code, text = _run(run, command, root)
    seconds = time.monotonic() - clock
    look_again()
    if digest(run, root) != before:
        raise NotRecorded(f"{run.name}: code that it exercises changed meanwhile; there is no new row. Run it again")
    figures = _figures(root / run.figures, wall) if run.figures else None
    counted = counts.read(run.output, text, figures)
    why = [
        *([f"ended with {code}"] if code else []),
        *counts.bad(counted),
        *([] if counted else ["its counts are missing"]),
    ]
    facts = {**_machine(run, root), "load": round(load, 1)}
    made = Row(
        name=run.name,
        command=list(run.command),
        began=began.isoformat(timespec="seconds").replace("+00:00", "Z"),
        seconds=round(seconds, 1),
        commit=commit,
        clean=clean,
        digest=before,
        machine=facts,
        counts=counted,
        result="failed" if why else "passed",
        why=why,
        figures=figures,
    )
    row.write(made, folder)
    return made


def _expanded(word: str, name: str) -> str:
    before, dollar, variable = word.partition("$")
    if not dollar:
        return word
    if variable not in os.environ:
        raise NotRecorded(f"{name}: set {variable} in the environment, as in {variable}=… make evidence RUN={name}")
    return before + os.environ[variable]


def _run(run: Run, command: list[str], root: Path) -> tuple[int, str]:
    """Its exit status and its output."""
    log = root / LOGS / f"{run.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in NARROWING}
    environment = {**inherited, **run.environment, "PYTHONUNBUFFERED": "1"}
    with log.open("w+", errors="replace") as kept, _sigterm_as_interrupt():
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        reader = Thread(target=_copy, args=(process.stdout, kept), daemon=True)
        reader.start()
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise NotRecorded(f"{run.name} was interrupted; there is no new row") from None
        reader.join(PATIENCE)  # longer only if a process that it left behind holds the pipe
        kept.flush()
    if code in (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise NotRecorded(f"{run.name} was interrupted; there is no new row")
    return code, log.read_text(errors="replace")


def _copy(source: IO[str], kept: IO[str]) -> None:
    for line in source:
        print(line, end="", flush=True)
        with suppress(ValueError):  # closed: something that the run left behind still writes
            kept.write(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C for the run and all that it started; what does not end is killed."""
    for number, seconds in ((signal.SIGINT, PATIENCE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _figures(path: Path, began: float) -> Mapping[str, Any] | None:
    """What the run wrote there; None if it wrote nothing."""
    if not path.exists() or path.stat().st_mtime < began - 1:
        return None
    written = json.loads(path.read_text())
    return {"bars": written["bars"], "rows": written["rows"]}


def _machine(run: Run, root: Path) -> dict[str, str | int | float]:
    python = root / run.python
    asked = [str(python) if python.exists() else sys.executable, "-c", _FACTS]
    facts: dict[str, str] = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1), **facts}


def _is_clean(root: Path) -> bool:
    return not _git(root, "status", "--porcelain", "--", ".", *GENERATED)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
