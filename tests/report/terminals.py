"""A terminal for tests: a real pty, what a program wrote to it, and what a person would still see at the end."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Mapping

from tests.pool import context

_PIECES = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def _run(code: str, terminal: str, environment: Mapping[str, str]) -> None:
    """In a process of its own, whose imports are done."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    exec(code, {"__name__": "__main__"})


class Watched:
    """A Python program whose standard error is a terminal."""

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        self._ours, self._theirs = pty.openpty()
        told = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", **environment}
        self._process = context.Process(target=_run, args=(code, os.ttyname(self._theirs), told), daemon=True)
        self._process.start()
        self._parts = [b""]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._ours, 1 << 16):
                self._parts.append(part)
        except OSError:  # the other end of a terminal that is closed
            pass
        os.close(self._ours)

    def written(self) -> str:
        """All that was written to the terminal, once the program has ended well."""
        self._process.join(120)
        code = self._process.exitcode
        self._process.kill()
        os.close(self._theirs)  # the last end of the terminal: the reader gets what is left, and ends
        self._reader.join()
        text = b"".join(self._parts).decode()
        assert code == 0, text
        return text


def seen(written: str) -> str:
    """What stands on the screen at the end, as far as bars of rich use a terminal."""
    lines, row, column = [""], 0, 0
    for codes, letter, control, text in _PIECES.findall(written):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0  # as a terminal that maps it, which a pty does by default
            lines += [""] * (row + 1 - len(lines))
        elif letter == "A":
            row = max(row - int(codes or 1), 0)
        elif letter == "K":
            assert codes in ("2", "0", "")
            lines[row] = "" if codes == "2" else lines[row][:column]
        else:
            assert letter in "mhl", (codes, letter)
    return "\n".join(lines).strip()
