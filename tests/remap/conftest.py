"""Fixtures of the tests of maps."""

from __future__ import annotations

import pytest

from holdfast.read import source


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes files for cached: a disk gives whole sectors, and the kernel decides which pages it keeps."""
    monkeypatch.setattr(source, "is_cached", lambda *_: True)
