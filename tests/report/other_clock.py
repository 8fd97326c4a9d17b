"""A rank in a time namespace of its own: its monotonic clock, and its writer process's, is truly another one.

    python -m tests.report.other_clock SECONDS SCRIPT ARGUMENTS…

Started by a test. Ends with `REFUSED` if the system does not permit it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

REFUSED = 77
_NEW_TIME = 0x80  # CLONE_NEWTIME


def main() -> None:
    seconds, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_TIME):
        raise SystemExit(REFUSED)
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0")
    # Children are in the new one, and what they are replaced by; this process stays where it is.
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(_start(command), 0)[1]))


def _start(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, *command])
    return child


if __name__ == "__main__":
    main()
