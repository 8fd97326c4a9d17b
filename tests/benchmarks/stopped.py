"""A small benchmark that lasts until it is stopped: its ranks, and a process of each, write into its folder.

`test_stopped` runs it: `python -m tests.benchmarks.stopped FOLDER`. Never ends by itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.frame import folder
from benchmarks.pool import Pool

WRITE_ON = """
import itertools, os, pathlib, sys
work = pathlib.Path(sys.argv[1]) / str(os.getpid())
for number in itertools.count():
    (work / str(number)).mkdir(parents=True, exist_ok=True)
    (work / str(number) / "data").write_bytes(b"data")
    (work / str(number) / "data").unlink()
    (work / str(number)).rmdir()
"""


def write_for_ever(work: Path) -> None:
    """The job of a rank, which Ctrl-C does not reach."""
    subprocess.run([sys.executable, "-c", WRITE_ON, str(work)], start_new_session=True, check=False)


def main() -> int:
    with folder(Path(sys.argv[1]), "stopped") as work:
        pool = Pool(2, daemon=False)
        try:
            pool.run(write_for_ever, work / "here")
        finally:
            pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
