"""Programs of the tests, run in a process that is forked from a warm one: it has imported torch and holdfast.

Starting an interpreter that imports them takes four seconds. Tests of imports, and of what an interpreter does at its
end, start one all the same.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.patience import LONG
from tests.pool import context


def run_module(module: str, *arguments: object, seconds: float = LONG) -> subprocess.CompletedProcess[str]:
    """As ``python -m module arguments`` ends, with its output; Subprocess.TimeoutExpired if it does not."""
    return _run(module, "module", [module, *map(str, arguments)], seconds)


def run_code(code: str, *arguments: object, seconds: float = LONG) -> subprocess.CompletedProcess[str]:
    """As ``python -c code arguments`` ends."""
    return _run(code, "code", ["-c", *map(str, arguments)], seconds)


def _run(what: str, kind: str, argv: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    # Files in the place of pipes: a process that the program leaves behind would keep a pipe open.
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        process = context.Process(target=_main, args=(what, kind, argv, *map(str, said)))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in said)
    if late:
        raise subprocess.TimeoutExpired(argv, seconds, out, err)
    return subprocess.CompletedProcess(argv, process.exitcode or 0, out, err)


def _main(what: str, kind: str, argv: list[str], *said: str) -> None:
    for number, path in enumerate(said, 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = argv
    if kind == "module":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<code>", "exec"), {"__name__": "__main__"})
