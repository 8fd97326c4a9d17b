"""The advice how often to save: against the formulas it comes from, and within its bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.run.interval import advise

seconds = st.floats(1e-4, 1e5)


@given(stall=st.floats(1e-4, 10.0), mtbf=st.floats(1e5, 1e8))
def test_a_short_stall_gives_youngs_interval(stall: float, mtbf: float) -> None:
    assert advise(mtbf, stall=stall, save=0.0, step=1e-6).seconds == pytest.approx(
        math.sqrt(2 * stall * mtbf), rel=0.01
    )


@pytest.mark.parametrize(
    ("stall", "mtbf", "best"),
    [
        # sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, by hand: d / 2M is 1/100, 1/4 and 81/100.
        (2.0, 100.0, 20 * (1 + Fraction(1, 30) + Fraction(1, 900)) - 2),
        (50.0, 100.0, 100 * (1 + Fraction(1, 6) + Fraction(1, 36)) - 50),
        (162.0, 100.0, 180 * (1 + Fraction(3, 10) + Fraction(9, 100)) - 162),
        # From d = 2M on: M.
        (200.0, 100.0, 100),
        (5000.0, 100.0, 100),
    ],
)
def test_dalys_form_for_a_stall_of_any_length(stall: float, mtbf: float, best: Fraction) -> None:
    assert advise(mtbf, stall=stall, save=0.0, step=1e-6).seconds == pytest.approx(float(best))


@given(stall=st.floats(0.01, 10.0), mtbf=st.floats(1e3, 1e7))
def test_no_other_interval_loses_less(stall: float, mtbf: float) -> None:
    """What is lost by the exact model of Daly, at the advised interval and at half and double of it."""

    def lost(interval: float) -> float:
        return mtbf * (math.expm1((interval + stall) / mtbf)) / interval

    best = advise(mtbf, stall=stall, save=0.0, step=1e-6).seconds
    assert lost(best) <= lost(best / 2) and lost(best) <= lost(best * 2)


@given(stall=seconds, save=seconds, step=seconds, mtbf=st.floats(1.0, 1e9))
def test_never_shorter_than_a_save_or_a_step(stall: float, save: float, step: float, mtbf: float) -> None:
    got = advise(mtbf, stall=stall, save=save, step=step)
    assert got.seconds >= save and got.seconds >= step and got.steps >= 1
    assert got.steps * step >= save * (1 - 1e-9), "an interval of whole steps is not shorter than a save either"
    assert got.steps * step == pytest.approx(got.seconds, abs=step)
    assert 0 < got.lost <= 1 and (got.stall, got.save) == (stall, save)


def test_a_save_that_costs_nothing_and_steps_of_no_length() -> None:
    assert advise(1000.0, stall=0.0, save=0.0, step=1.0).steps == 1
    assert advise(1000.0, stall=1.0, save=0.0, step=0.0).steps == 1


@pytest.mark.parametrize("mtbf", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_mean_time_that_is_none_is_refused(mtbf: float) -> None:
    with pytest.raises(ValueError, match="mtbf"):
        advise(mtbf, stall=1.0, save=1.0, step=1.0)
