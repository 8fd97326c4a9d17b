"""For the tests of devices: the lab. Where the kit runs them: a row for each test, and an end for one that hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.lab import Lab, a_lab

torch.set_num_threads(min(4, torch.get_num_threads()))
signal.signal(signal.SIGINT, signal.default_int_handler)

_ROWS = os.environ.get("HOLDFAST_GPU_ROWS", "")
_LONGEST = float(os.environ.get("HOLDFAST_GPU_LONGEST", "60"))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with a_lab() as made:
        yield made


def _tell(row: dict[str, object]) -> None:
    with Path(_ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")


if _ROWS:
    _traces = Path(f"{_ROWS}.traces").open("a")  # noqa: SIM115

    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what an earlier process of the same part has begun: one of them may have ended it."""
        rows = Path(_ROWS)
        begun = {json.loads(line)["test"] for line in rows.read_text().splitlines()} if rows.exists() else set()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
        items[:] = [item for item in items if item.nodeid not in begun]

    def pytest_runtest_logstart(nodeid: str) -> None:
        _tell({"test": nodeid})
        faulthandler.dump_traceback_later(_LONGEST, exit=True, file=_traces)

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = ""
            if report.skipped and isinstance(report.longrepr, tuple):
                why = report.longrepr[2].removeprefix("Skipped: ")
            elif report.failed:
                why = str(report.longrepr)[-3000:]
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), "why": why}
            _tell(row)

    def pytest_runtest_logfinish(nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_sessionfinish() -> None:
        Path(f"{_ROWS}.all").touch()
