"""A process that ends with whoever started it: `python guard.py FOLDER COMMAND…`.

Run by `tests.servers.process`, with a pipe as its input that closes when the starter ends, however it ends: the command
and all that it started are then killed, the last of FOLDER/output, where they wrote, is told, and FOLDER is removed.
Never imports anything of the project.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main(folder: Path, command: list[str]) -> int:
    with (folder / "output").open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )

    def kill() -> None:
        # The group outlives its first process for as long as anything is left in it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def watch() -> None:
        os.read(0, 1)
        kill()

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    kill()
    with contextlib.suppress(OSError):
        # Nobody listens if the starter was killed; a whole pipe of it always fits.
        os.write(1, (folder / "output").read_bytes()[-4000:])
    shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Not sys.exit: the watching thread may be inside a read of the input.
    os._exit(main(Path(sys.argv[1]), sys.argv[2:]))
