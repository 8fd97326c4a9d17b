"""Asks the warm process to run a command in its place, with this process's files, folder and environment.

Called as `python`, `torchrun` and `holdfast` by the commands that pages show. Imports the standard library alone, and
little of it: it stands where a program would start that takes seconds to import torch.
"""

import json
import os
import signal
import socket
import sys


def ask(word, args, *, fds=(0, 1, 2), folder=None, environment=None):
    """Its exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        environment = dict(os.environ if environment is None else environment)
        asked.connect(environment["HOLDFAST_DOCS_WARM"])
        told = {"word": word, "args": list(args), "folder": folder or os.getcwd(), "environment": environment}
        socket.send_fds(asked, [json.dumps(told).encode()], list(fds))
        if __name__ == "__main__":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, lambda number, _: asked.send(str(number).encode()))
        return int(asked.recv(64) or b"1")


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
