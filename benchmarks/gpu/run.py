"""Runs the parts of `plan`, each in a process of its own with a limit, and keeps what they found as one JSON.

`make gpu` starts it; it needs Python's standard library alone. A part that hangs, crashes or finds no device is a row
of the answer, never its end. Never installs anything, and ends every process that it began.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page
from benchmarks.gpu.plan import LANES, MOST, STARTING, Part, in_turn

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")
LOG = 100_000
"""Bytes at the end of what a part printed that are kept."""

AGAIN = 15.0
"""Seconds that must be left to go on with the tests behind one that ended its process."""

SHOWN = [
    "name", "driver_version", "memory.used", "compute_mode", "persistence_mode", "power.limit", "mig.mode.current",
]  # fmt: skip
"""What is looked at before and after."""

Answer = dict[str, Any]


@dataclass
class Run:
    """One run of some parts. ``site``: where what is missing on the machine was unpacked."""

    out: Path
    work: Path
    site: Path
    small: bool
    tests: Path = ROOT / "tests/gpu"
    facts: Answer = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: set[int] = field(default_factory=set)
    _over: bool = False
    _began: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> Answer:
        """All that is known by now."""
        return {"facts": self.facts, "parts": self.answers}

    def all(self, parts: list[Part]) -> None:
        """Run them, and keep the answers of each as soon as it ended."""
        for turn in in_turn(parts):
            with ThreadPoolExecutor(1 if self.small else LANES) as pool:
                try:
                    list(pool.map(self._one, turn))
                except BaseException:
                    self._end()
                    raise

    def _one(self, part: Part) -> None:
        if self._over:
            return
        began = time.monotonic()
        if part.stretches and not self.small:
            part = replace(part, seconds=max(part.seconds, MOST - STARTING - (began - self._began)))
        folder = self.work / part.name
        folder.mkdir(parents=True)
        log = folder / "log"
        outcome = self._tests(part, folder, log) if part.tests else self._measured(part, folder, log)
        answer: Answer = {
            "part": part.name, "what": part.what, "limit": round(part.seconds), "outcome": outcome,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        if part.tests:
            answer["tests"] = list(rows_of(folder / "rows").values())
        else:
            figures = folder / "figures.json"
            answer |= json.loads(figures.read_text()) if figures.exists() else {}
            shutil.copy(figures, self.work / f"{part.name}.json") if figures.exists() else None
        text = self.masked(log.read_text(errors="replace")[-LOG:])
        answer = json.loads(self.masked(json.dumps(answer)))
        with self._lock:
            self.answers.append(answer)
            with (self.out / "gpu.log").open("a") as file:
                file.write(f"===== {part.name}: {outcome}\n{text}\n")
            self.keep()
            print(f"  {part.name:12} {answer['seconds']:6.1f} s  {outcome}{summary(answer)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _tests(self, part: Part, folder: Path, log: Path) -> str:
        """Run tests; behind one that ended the process, those that are left."""
        until = time.monotonic() + part.seconds
        there = [str(self.tests / name) for name in part.tests]
        ini = ["-c", str(ROOT / "tests/gpu/pytest.ini"), "--confcutdir", str(self.tests)]
        command = ["-m", "pytest", *ini, "--basetemp", str(folder / "tmp"), "--tb=short", *there]
        rows, begun = folder / "rows", -1
        while True:
            code = self._run(part, command, until - time.monotonic(), folder, log)
            if rows.with_name("rows.all").exists():  # a code does not tell: who hangs ends as if a test had failed
                return "done"
            count = tell_end(rows, log, ended(code, part.seconds))
            if until - time.monotonic() < AGAIN or count <= begun or self._over:
                return ended(code, part.seconds)
            begun = count

    def _measured(self, part: Part, folder: Path, log: Path) -> str:
        command = [
            "-m", part.module, "--out", str(folder / "figures.json"), "--work", str(folder / "work"),
            "--seconds", str(part.seconds), "--rates", str(self.work / "rates.json"),
            *(["--small"] if self.small else []),
        ]  # fmt: skip
        code = self._run(part, command, part.seconds, folder, log)
        return "done" if code == 0 else ended(code, part.seconds)

    def _run(self, part: Part, command: list[str], seconds: float, folder: Path, log: Path) -> int | None:
        """The exit status; None if it had to be ended. Whatever it started is ended with it."""
        paths = [str(ROOT), str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        temporary = tempfile.mkdtemp(prefix="gpu-")  # not in the work folder: names of sockets must be short
        environment = {
            "HOLDFAST_GPU_LONGEST": "280" if self.small else "60", "HOLDFAST_GPU_LIMIT": "250" if self.small else "45",
            **os.environ, **part.settings, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
            "HOLDFAST_GPU_ROWS": str(folder / "rows"), "TMPDIR": temporary,
            "OMP_NUM_THREADS": "1" if self.small else "4",
        }  # fmt: skip
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        self._running.add(process.pid)
        try:
            return process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process.pid)
            process.wait()
            self._running.discard(process.pid)
            for left in (SHARED / f"holdfast-gpu-{process.pid}", temporary):
                shutil.rmtree(left, ignore_errors=True)

    def _end(self) -> None:
        """End what is still running, and begin nothing more."""
        self._over = True
        for pid in list(self._running):
            end_group(pid)

    def masked(self, text: str) -> str:
        """Without what only this machine's owner should know, and what differs from run to run."""
        known = [(str(self.work), "WORK"), (str(ROOT), "."), (str(Path.home()), "~"), (socket.gethostname(), "host")]
        for found, name in known:
            text = text.replace(found, name) if len(found) > 2 else text
        return text

    def keep(self) -> None:
        """The JSON and the page, as far as they are known."""
        for name, text in (("gpu.json", json.dumps(self.told, indent=1) + "\n"), ("gpu.md", page(self.told))):
            half = self.out / f"{name}.half"
            half.write_text(text)
            half.replace(self.out / name)


def end_group(pid: int) -> None:
    """End a process and all that it started, but for what leads a session of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def ended(code: int | None, seconds: float) -> str:
    """How a process ended that should have ended otherwise."""
    if code is None:
        return f"ended after its {seconds:g} s"
    return f"killed by signal {-code}" if code < 0 else f"failed with code {code}"


def rows_of(rows: Path) -> dict[str, Answer]:
    """What became of each test, in order; one that began and has told no end has no outcome."""
    found: dict[str, Answer] = {}
    for line in rows.read_text().splitlines() if rows.exists() else []:
        row = json.loads(line)
        before = found.setdefault(row["test"], {})
        if before.get("outcome") != "failed":  # of a test and what follows it, a failure counts
            before.update(row)
    return found


def tell_end(rows: Path, log: Path, how: str) -> int:
    """The process of these tests is gone: the row of the one that it was at. How many tests have begun."""
    found, traces = rows_of(rows), rows.with_name("rows.traces")
    why = log.read_text(errors="replace")[-1000:]
    if traces.exists():
        why = traces.read_text(errors="replace")[:4000] or why  # where it was comes first
        traces.unlink()
    with rows.open("a") as file:
        for row in found.values():
            if "outcome" not in row:
                told = {"test": row["test"], "outcome": "did not end", "seconds": None, "why": f"{how}\n{why}"}
                file.write(json.dumps(told) + "\n")
    return len(found)


def summary(answer: Answer) -> str:
    """In a few words."""
    if "tests" not in answer:
        missed = [bar["what"] for bar in answer.get("bars", []) if not bar["met"]]
        return "".join(f"; missed: {what}" for what in missed)
    counts: dict[str, int] = {}
    for row in answer["tests"]:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    return ": " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def device() -> Answer:
    """The device as its tool shows it: what it holds and how it is set; nothing where there is no such tool."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(SHOWN)}", "--format=csv,noheader"], capture_output=True, text=True,
            timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    told = done.stdout.splitlines()[:1]
    return dict(zip(SHOWN, (value.strip() for value in told[0].split(",")), strict=False)) if told else {}


def after(before: Answer, patience: float = 5.0) -> Answer:
    """The device once all has ended: a driver takes a moment to clear up."""
    until = time.monotonic() + patience
    while True:
        found = device()
        if not found or found == before or time.monotonic() > until:
            return found
        time.sleep(0.5)
