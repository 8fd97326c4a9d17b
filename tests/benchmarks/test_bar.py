"""A bar is met, missed, or out of reach of any program on this machine."""

from __future__ import annotations

from benchmarks.bar import Bar


def test_a_bar_is_met_by_a_figure_within_its_limit() -> None:
    assert Bar("time", 1.1, most=1.15).met and not Bar("time", 1.2, most=1.15).met
    assert Bar("rate", 2.0, least=2.0).met and not Bar("rate", None, least=2.0).met


def test_it_is_out_of_reach_where_the_floor_alone_takes_nine_tenths_of_the_limit() -> None:
    assert Bar("time", 1.3, most=1.0, floor=0.95).out_of_reach
    assert not Bar("time", 1.3, most=1.0, floor=0.85).out_of_reach
    assert not Bar("time", 1.0, most=1.0, floor=0.95).out_of_reach, "it is met"
    assert not Bar("time", None, most=1.0, floor=0.95).out_of_reach, "nothing was measured"
    assert not Bar("time", 1.3, most=1.0).out_of_reach
