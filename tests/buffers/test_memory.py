"""Reading and writing take the state and a window, whatever the size of the largest tensor: measured as peaks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.buffers.memory_trials import LOADS

pytestmark = pytest.mark.timed

MIB = 1 << 20
STATE = 256 * MIB

LOCAL = 64 * MIB
"""Four threads with 8 MiB from the disk, and what torch takes to cast or scatter them; one tensor has as much."""

STORE = 224 * MIB
"""Sixteen requests of 8 MiB under way, and what the allocator keeps of answers before."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    command = [sys.executable, "-m", "tests.buffers.memory_trials", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one.pop("case"): one for one in found}


def test_every_case_came_to_its_end(figures: dict[str, dict[str, int]]) -> None:
    assert not {case: found["failed"] for case, found in figures.items() if "failed" in found}
    assert len(figures) > 20
    assert figures["state_dict read"]["own"] > STATE - MIB, "a copy of the state shows, so a smaller one would"


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_takes_a_window(figures: dict[str, dict[str, int]], kind: str) -> None:
    mine = {case: found["above"] for case, found in figures.items() if case.startswith(f"load {kind} ")}
    assert mine and all(above < LOCAL for case, above in mine.items() if not case.endswith("store")), mine
    assert all(above < STORE for above in mine.values()), mine


def test_of_a_larger_state_a_load_from_a_store_takes_little_more(figures: dict[str, dict[str, int]]) -> None:
    """The allocator keeps more of the answers before, in the memory of each thread."""
    assert figures["larger load store"]["above"] < 2 * STORE


def test_a_resharded_load_reads_each_block_once(figures: dict[str, dict[str, int]]) -> None:
    for case, found in figures.items():
        if case.startswith("load") and case.endswith(("resharded", "blocks")):
            parts = 2 if "resharded" in case and "columns" in case else 1
            assert found["read"] <= (STATE + MIB) // parts, case


def test_a_mapped_state_is_no_copy(figures: dict[str, dict[str, int]]) -> None:
    """Mapped, it costs no memory of this process's own even when it was looked at; proving it costs a window."""
    for case, found in figures.items():
        if case.startswith("state_dict mmap"):
            assert found["own"] < 16 * MIB and found["above"] < LOCAL, case


def test_a_cache_on_disk_takes_no_more_than_each_answer_twice(figures: dict[str, dict[str, int]]) -> None:
    assert figures["cached load"]["above"] < 320 * MIB and figures["cached load again"]["above"] < STORE


@pytest.mark.parametrize(
    ("what", "most"),
    [
        ("convert torch", 128), ("convert dcp", 128), ("convert holdfast", 128),
        ("convert one byte", 160), ("unshard", 160), ("verify", 64),
        ("open", 8), ("save", 96), ("save transposed", 160), ("save store", 96), ("save background", 288),
        ("save background limited", 96),
    ],
)  # fmt: skip
def test_other_ways_take_windows_too(figures: dict[str, dict[str, int]], what: str, most: int) -> None:
    """All but a background save without a limit, which holds an image of what this rank writes."""
    assert figures[what]["above"] < most * MIB
