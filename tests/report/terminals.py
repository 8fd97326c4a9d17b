"""A terminal for tests: a real pty, what a program wrote to it, and what a person would still see at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Mapping

_PIECES = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Watched:
    """A Python program whose standard error is a terminal."""

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        ours, theirs = pty.openpty()
        told = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", **environment}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=told, stderr=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        self._ours, self._parts = ours, [b""]
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
        code = self._process.wait(120)
        if self._process.stdout is not None:
            self._process.stdout.close()
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
