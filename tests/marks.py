"""Which cases of a test `make test` runs: conftest.py and property tests call it.

It never takes anything away from `make test-all`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Of a test with ``fast_cases("id", …)`` all other cases become slow; with ``slow_cases("id", …)`` these do.

    If none of the fast cases is there, as after a case got another name, the first one stays fast.
    """
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        ids = {_id_of(item) for item in same}
        fast = {id for mark in same[0].iter_markers("fast_cases") for id in mark.args}
        slow = {id for mark in same[0].iter_markers("slow_cases") for id in mark.args}
        if fast:
            slow |= ids - (fast & ids or {_id_of(same[0])})
        for item in same:
            if _id_of(item) in slow:
                item.add_marker(pytest.mark.slow)


def _id_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def examples(most: int) -> int:
    """How many examples a property test tries: ``most``, or a part of them with ``--hypothesis-profile=quick``."""
    return max(min(most, 5), most * settings.default.max_examples // 100)


def every(step: int, cases: Sequence[T]) -> Sequence[T]:
    """All of ``cases``, or each ``step``-th of them with ``--hypothesis-profile=quick``."""
    return cases[::step] if settings.default.max_examples < 100 else cases
