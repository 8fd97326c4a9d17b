"""What several tests of the engine need: a worker of either kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.write.jobs import Worker
from holdfast.write.worker import start


@pytest.fixture(params=["thread", "process"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = start(request.param)
    yield made
    made.close()
