"""`python -m zoo [--only PATTERN …]`: every case, in processes of its own; a JSON of results and the page of the docs.

Ends with 1 if anything is wrong. `make zoo` calls it.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import json
import os
import time
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from zoo import judge, page, verdict  # noqa: E402
from zoo.case import Case  # noqa: E402
from zoo.forks import Stage, Task, run  # noqa: E402

CATALOGUES = {
    "optimizers": ("zoo.optimizers", "zoo.optimizers_of_libraries", "zoo.wrappers"),
    "modules": (
        "zoo.modules",
        "zoo.odd_modules",
        "zoo.odd_buffers",
        "zoo.wrapped_modules",
        "zoo.quantised",
        "zoo.transformers_models",
        "zoo.modules_of_libraries",
    ),
    "schedules": ("zoo.schedules", "zoo.loaders"),
}
LOCAL = Stage(judge.in_one_process, 1, verdict.LOCAL)
SHARDED = [
    Stage(judge.on_ranks, 2, verdict.SHARDED[:1]),
    Stage(judge.gathered, 1, verdict.SHARDED[1:2], "whole.pt"),
    Stage(judge.spread, 4, verdict.SHARDED[2:], "whole.pt"),
]


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    began = time.monotonic()
    chosen: dict[str, list[Case]] = {}
    for kind, modules in CATALOGUES.items():
        found = [case for name in modules for case in _cases(name)]
        chosen[kind] = [c for c in found if any(fnmatch.fnmatch(f"{kind}/{c.name}".lower(), p) for p in options.only)]
    tasks = [
        Task(case, [LOCAL, *(SHARDED if case.sharded and not options.local else [])])
        for found in chosen.values()
        for case in found
    ]
    if options.list:
        for kind, found in chosen.items():
            print(f"{kind}: {len(found)}")
            print("\n".join(f"    {case.name}" for case in found))
        return 0
    gc.collect()
    gc.freeze()  # what is forked shares it
    done = {}
    for number, task in enumerate(run(tasks, options.jobs, options.limit), 1):
        done[task.case.name] = task
        print(f"{number}/{len(tasks)} {task.seconds:5.1f} s  {task.case.name}: {page.line(task.cells)}", flush=True)
        for column, cell in task.cells.items():
            if cell.verdict != "right" and cell.text != "as above":
                print(f"        {cell.verdict} {column}: {cell.text}", flush=True)
    results = page.results(chosen, done)
    Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    seconds = time.monotonic() - began
    if options.page:
        Path(options.page).write_text(page.markdown(chosen, done, _left_out()))
    print(page.summary(chosen, done, seconds))
    return 1 if any(cell.verdict == "wrong" for task in done.values() for cell in task.cells.values()) else 0


def _cases(module: str) -> list[Case]:
    try:
        return list(importlib.import_module(module).cases())
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return []


def _left_out() -> list[str]:
    """What of the requirements is not installed."""
    missing = []
    for requirement in (Path(__file__).parent / "requirements.txt").read_text().split():
        try:
            distribution(requirement)
        except PackageNotFoundError:
            missing.append(requirement)
    return [name for name in missing if not name.startswith("-")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns over kind/name, as optimizers/*adam*")
    parser.add_argument("--local", action="store_true", help="one process alone, no ranks")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--limit", type=float, default=90, help="seconds that a stage of a case may take")
    parser.add_argument("--json", default="zoo-results.json", help="where the results go")
    parser.add_argument("--page", default="", help="where the page goes")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    options = parser.parse_args()
    options.only = [f"*{p.lower().strip('*')}*" for p in options.only]
    return options


if __name__ == "__main__":
    raise SystemExit(main())
