"""One process with everything imported, which forks a process for each page and for each command that a page shows.

Started once for each pytest process (`python -m tests.docs.warm SOCKET`), asked by `ask.py`, ends when its standard
input does. Forks before it has any thread; never runs a page itself.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tests.pool import LATE


def main(path: str) -> int:
    preload()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return 0
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return answer(asked)
        asked.close()


def preload() -> None:
    """What takes long to import, or is imported late. Nothing here may start a thread."""
    for module in (
        *LATE,
        "holdfast.cli.app",
        "holdfast.testing",
        "tests.docs.made",
        "tests.docs.run_page",
        "tests.frozen",
    ):
        import_module(module)
    import_module("torch").set_num_threads(1)


def answer(asked: socket.socket) -> int:
    """Run one request in a process of its own; tell how it ended, pass signals on, kill it if nobody listens."""
    message, fds, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    told = json.loads(message)
    pid = os.fork()
    if pid == 0:
        asked.close()
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        end(status_of(lambda: WORDS[told["word"]](told["args"])))
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([ended, asked], [], [])
        if ended in ready:
            asked.send(str(exit_code(os.waitpid(pid, 0)[1])).encode())
            os._exit(0)
        number = asked.recv(64)
        if number:
            os.kill(pid, int(number))
        else:
            os.killpg(pid, signal.SIGKILL)
            os._exit(0)


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def status_of(work: Callable[[], Any]) -> int:
    """As Python itself would: what a program's end or its exception means as an exit status."""
    try:
        code = work()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    return int(code or 0)


def end(status: int) -> NoReturn:
    """What an interpreter does at its end, but for taking apart all that was imported, which takes seconds here."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def holdfast_(args: Sequence[str]) -> Any:
    from holdfast.cli.app import main

    sys.argv = ["holdfast", *args]
    return main()


def python(args: Sequence[str]) -> None:
    match args:
        case ["-m", "holdfast", *rest]:
            holdfast_(rest)
        case ["-m", module, *rest]:
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *rest] if not script.startswith("-"):
            sys.path.insert(0, str(Path(script).resolve().parent))
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")
        case _:
            sys.exit(subprocess.run([sys.executable, *args]).returncode)


def torchrun(args: Sequence[str]) -> int:
    """Ranks as torchrun starts them on one machine: its environment, and all end if one fails."""
    ranks, args = 1, list(args)
    while args and args[0].startswith("--"):
        word, _, value = args.pop(0).partition("=")
        if word.replace("_", "-") in ("--nproc-per-node", "--nnodes", "--max-restarts"):
            value = value or args.pop(0)
            ranks = int(value) if "nproc" in word else ranks
        elif word != "--standalone":
            raise SystemExit(f"this torchrun, of the tests of the documentation, does not know {word}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=str(port))
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
            os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            end(status_of(lambda: python(args)))
        pids[pid] = rank
    failed = 0

    def pass_on(number: int, _: object) -> None:
        for pid in pids:
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status and not failed:
            failed = 1
            print(f"rank {rank} failed with exit code {exit_code(status)}", file=sys.stderr)
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return failed


def page(args: Sequence[str]) -> int:
    from tests.docs.run_page import run

    return run(args[0])


WORDS = {"holdfast": holdfast_, "python": python, "torchrun": torchrun, "page": page}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
