"""What the tests of all formats convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export import states


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks; nobody changes it."""
    return states.make(tmp_path_factory.mktemp("convert") / "source")
