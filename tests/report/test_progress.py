"""Progress bars: at a terminal and after two seconds, else silence."""

from __future__ import annotations

import io
import sys

import pytest

from holdfast.events import Event
from holdfast.report.progress import Bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _watch(bars: Bars, *, seconds: float) -> None:
    for kind, done in (("start", 0), ("advance", 500), ("advance", 1000), ("end", 1000)):
        bars(Event(kind, "save", "/ckpt/step-7", 0, done, 1000, seconds))


@pytest.mark.parametrize(("seconds", "rank", "shown"), [(3.0, "0", True), (1.0, "0", False), (3.0, "1", False)])
def test_bar(seconds: float, rank: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("TERM", "xterm")
    _watch(Bars(), seconds=seconds)
    assert ("save /ckpt/step-7" in terminal.getvalue()) == shown


def test_silence_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    _watch(Bars(), seconds=9.0)
    assert not pipe.getvalue()
