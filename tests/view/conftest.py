"""One browser for all tests of pages. Not for the whole session: while it runs, its thread has an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.view.browser import FLAGS, NAMES, Tab, chromium


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium is here: none of {', '.join(NAMES)} is in PATH, and HOLDFAST_CHROMIUM names none")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: its exit code, and what it said."""
    from holdfast.cli import app

    def running(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return running


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Makes tabs; at the end none may have had an error, and none may have asked the network (`Tab.network`)."""
    made: list[Tab] = []

    def make(**kwargs: Any) -> Tab:
        made.append(Tab(browser, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not one.errors
