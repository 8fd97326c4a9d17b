"""`make gpu`: says what will run and for how long, then runs it, and leaves a JSON, a page and a log.

Needs Python's standard library alone; what the parts need and the machine lacks comes as wheels from a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu import page
from benchmarks.gpu.plan import LANES, PARTS, Part, chosen, longest, most
from benchmarks.gpu.run import ROOT, Run, after, device

NEEDED = ["torch", "numpy", "rich", "typer", "xxhash", "pytest", "msgspec"]

_LOOK = """
import importlib.util, json
missing = [name for name in %r if importlib.util.find_spec(name) is None]
cuda = False
if "torch" not in missing:
    import torch
    cuda = torch.cuda.is_available()
broken = ""
try:
    import holdfast
except Exception as error:
    broken = f"{type(error).__name__}: {error}"
print(json.dumps([missing, cuda, broken]))
"""


def unpacked(wheels: Path, site: Path) -> list[str]:
    """Unpack wheels into a folder of ours, for PYTHONPATH: nothing is installed, and no pip is needed."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    found = [wheel for wheel in sorted(wheels.glob("*.whl")) if _fits(wheel.name)]
    for wheel in found:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    return [wheel.name for wheel in found]


def _fits(wheel: str) -> bool:
    """Whether a wheel is for this Python, by its name."""
    python, abi, _ = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    mine = "cp{}{}".format(*sys.version_info[:2])
    return mine in python.split(".") or "py3" in python.split(".") or abi == "abi3"


def look(site: Path) -> tuple[list[str], bool, str]:
    """What is missing, whether there is a CUDA device, and why holdfast cannot be imported."""
    paths = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", _LOOK % (NEEDED,)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if done.returncode:
        return [], False, done.stderr[-2000:]
    missing, cuda, broken = json.loads(done.stdout.splitlines()[-1])
    return missing, cuda, broken


def announce(parts: list[Part], out: Path, *, small: bool) -> None:
    """What will run, and for how long at the most."""
    lanes = 1 if small else LANES
    seconds = longest(parts, lanes) if small else most(parts)
    print(f"{seconds / 60:.1f} minutes at the most, for {len(parts)} of {len(PARTS)} parts:")
    for part in parts:
        beside = "" if part.alone else f" (up to {lanes} at a time)"
        beside = " (and what the others leave of the time)" if part.stretches and not small else beside
        print(f"  {part.name:12} {part.seconds:4.0f} s  {part.what}{beside}")
    where = "in small, on the CPU, with a device that pretends" if small else "on the first CUDA device"
    print(f"{where}; figures, page and log go to {out}", flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make gpu", description="what one CUDA device tells of holdfast")
    parser.add_argument("--only", default="", help="names of parts, with blanks or commas between them")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu/wheels", help="a folder of wheels")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-out"), help="where answers go")
    parser.add_argument("--work", type=Path, default=ROOT / ".gpu/work", help="where to write (removed at the end)")
    parser.add_argument("--small", action="store_true", help="on the CPU, to see that all of it runs")
    options = parser.parse_args()
    try:
        parts = chosen(options.only.replace(",", " ").split(), small=options.small)
    except ValueError as error:
        parser.error(str(error))
    announce(parts, options.out, small=options.small)
    site = ROOT / ".gpu/site"
    wheels = unpacked(options.wheels, site)
    missing, cuda, broken = look(site)
    if missing or broken:
        why = f"{', '.join(missing)} cannot be imported" if missing else broken
        print(f"cannot run: {why}; wheels in {options.wheels}: {', '.join(wheels) or 'none'}")
        print("Fetch them for this Python where there is a network: make gpu-wheels FOR=3.12")
        return 2
    if not cuda and not options.small:
        print("cannot run: torch finds no CUDA device. make gpu SMALL=1 runs the same in small, on the CPU.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.log").unlink(missing_ok=True)
    shutil.rmtree(options.work, ignore_errors=True)
    run = Run(options.out, options.work, site, options.small)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    before = device()
    run.facts = {"small": options.small, "parts": [part.name for part in parts], "before": before}
    run.keep()
    try:
        run.all(parts)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
        run.facts["after"] = after(before)
        run.keep()
    print(f"written: {options.out / 'gpu.json'}, gpu.md, gpu.log", flush=True)
    return 0 if page.is_good(run.told) else 1


if __name__ == "__main__":
    sys.exit(main())
