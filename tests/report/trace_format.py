"""The rules of the Trace Event Format that a trace of ours has to keep, as Chrome and Perfetto read it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

ROUNDING = 0.0005
"""Microseconds by which times that are equal may differ: less than the last digit."""

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
            "thread_sort_index": "sort_index"}  # fmt: skip


def check(trace: dict[str, Any]) -> None:
    """Raise AssertionError where a rule is broken."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named, used, lanes = set(), set(), defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            kind = METADATA[event["name"]]
            assert list(event["args"]) == [kind]
            assert isinstance(event["args"][kind], str if kind == "name" else int)
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
        assert event["args"]["path"] and isinstance(event["cat"], str)
        used.add((event["pid"], event["tid"]))
        lanes[event["pid"], event["tid"]].append(event)
    for pid, tid in used:
        assert ("thread_name", pid, tid) in named and ("process_name", pid, 0) in named
    for events in lanes.values():
        _check_nesting(events)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Complete events of one thread have to lie in each other, or beside each other."""
    around: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while around and around[-1] <= event["ts"] + ROUNDING:
            around.pop()
        assert not around or end <= around[-1] + ROUNDING, event
        around.append(end)
