"""Every state that a power cut may leave: restore runs on it, and nothing promised is lost and nothing mixed."""

from __future__ import annotations

import pytest

from tests.crash.__main__ import check
from tests.crash.operations import OPERATIONS

FEWEST = {"drop": 20, "late commit": 12}
"""Distinct states that a full check of an operation has at least, where that is not the usual hundreds."""


@pytest.mark.parametrize("name", [*OPERATIONS, "killed and again"])
@pytest.mark.fast_cases("save", "late commit", "drop")
def test_states_in_short(name: str) -> None:
    for report in check(name, quick=True, seed=1):
        assert not report.violations, "\n".join(report.violations)
        assert report.distinct >= 5, report


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*OPERATIONS, "killed and again"])
def test_all_states(name: str) -> None:
    for report in check(name, quick=False, seed=2):
        assert not report.violations, "\n".join(report.violations)
        assert report.distinct >= FEWEST.get(name, 200), report
