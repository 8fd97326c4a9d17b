"""What programs of trials share: ranks forked from one warm process, the store they meet at, trials beside each other.

Imported by the programs that kill, freeze or starve ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

import holdfast


def forked(work: Any, *args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        work(*args)
    except holdfast.SaveFailed as error:
        code = 3 if isinstance(error, holdfast.errors.RankLost) else 4  # what a survivor ends with
    except BaseException:
        traceback.print_exc()
        code = 4
    os._exit(code)


def serve_store(port_told: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port_told, f"{store.port}\n".encode())
    time.sleep(3600)


def read_line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(fd, 1)
        if not got:
            raise RuntimeError("a process ended early")
        line += got
    return line.decode()


def beside(trials: Sequence[Any], conduct: Callable[[int, Any], dict[str, float]], most: int) -> Counter[str]:
    """The sums of what ``conduct(number, trial)`` counts, each in a process of its own, ``most`` at a time.

    Exits at the first that fails: the others are killed, and what failed is on standard error.
    """
    waiting, counts = list(enumerate(trials)), Counter[str]()
    under_way: dict[int, tuple[Any, int]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < most:
            number, trial = waiting.pop(0)
            read, write = os.pipe()
            under_way[forked(_conduct, conduct, number, trial, write)] = trial, read
            os.close(write)
        pid, status = os.wait()
        if pid not in under_way:
            continue
        trial, read = under_way.pop(pid)
        if status:
            for other in under_way:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"in {trial}")
        counts.update(json.loads(read_line(read)))
        os.close(read)
    return counts


def _conduct(conduct: Callable[[int, Any], dict[str, float]], number: int, trial: Any, write: int) -> None:
    os.write(write, f"{json.dumps(conduct(number, trial))}\n".encode())
