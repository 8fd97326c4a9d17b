"""A bar is met or missed by its figure alone."""

from __future__ import annotations

from benchmarks.bar import Bar


def test_a_bar_is_met_by_a_figure_within_its_limit() -> None:
    assert Bar("time", 1.1, most=1.15).met and not Bar("time", 1.2, most=1.15).met
    assert Bar("rate", 2.0, least=2.0).met and not Bar("rate", 1.9, least=2.0).met
    assert not Bar("rate", None, least=2.0).met, "nothing was measured"


def test_a_floor_excuses_no_miss() -> None:
    assert not Bar("time", 1.3, most=1.0, floor=1.2).met
