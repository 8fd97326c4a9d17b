"""Which steps a rule keeps, by itself: no file, no manager."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Keep
from tests.marks import examples


@settings(max_examples=examples(200))
@given(
    st.dictionaries(st.integers(0, 100), st.none() | st.floats(allow_nan=True), min_size=1, max_size=30),
    st.builds(Keep, last=st.integers(1, 5), every=st.none() | st.integers(1, 20), best=st.integers(0, 4)),
)
def test_kept_steps(steps: dict[int, float | None], keep: Keep) -> None:
    kept = keep.kept(steps)
    assert (
        kept <= set(steps)
        and max(steps) in kept
        and len(kept & set(sorted(steps)[-keep.last :])) == min(keep.last, len(steps))
    )
    assert all(step in kept for step in steps if keep.every and step % keep.every == 0)
    rated = [m for m in steps.values() if m is not None and m == m]
    assert not keep.best or not rated or any(steps[s] == min(rated) for s in kept)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(last=1), {8}),
        (Keep(last=3), {6, 7, 8}),
        (Keep(last=1, every=3), {3, 6, 8}),
        (Keep(last=1, best=2), {2, 6, 8}),
        (Keep(last=1, best=1, mode="max"), {5, 8}),
        (Keep(last=20), {1, 2, 3, 4, 5, 6, 7, 8}),
    ],
)
def test_each_rule_keeps_its_steps(keep: Keep, kept: set[int]) -> None:
    assert keep.kept({1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 9.0, 6: 0.5, 7: float("nan"), 8: 4.0}) == kept


def test_of_equal_metrics_the_newer_step_is_kept() -> None:
    assert Keep(last=1, best=1).kept({1: 2.0, 2: 2.0, 3: 5.0}) == {2, 3}


@pytest.mark.parametrize("bad", [{"last": 0}, {"every": 0}, {"best": -1}, {"mode": "low"}])
def test_keep_is_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(**bad)


METRICS = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 9.0, 6: 0.5, 7: float("nan"), 8: 4.0}


@pytest.mark.parametrize(
    ("keep", "kept", "whole"),
    [
        (Keep(last=3), {6, 7, 8}, {6, 7, 8}),
        (Keep(last=3, optimizer_last=1), {6, 7, 8}, {8}),
        (Keep(last=3, optimizer_last=9), {6, 7, 8}, {6, 7, 8}),
        (Keep(last=2, every=3, optimizer_last=3), {3, 6, 7, 8}, {6, 7, 8}),
        (Keep(last=2, model_every=3), {3, 6, 7, 8}, {7, 8}),
        (Keep(last=3, model_every=3), {3, 6, 7, 8}, {6, 7, 8}),
        (Keep(last=2, every=4, model_every=2), {2, 4, 6, 7, 8}, {4, 7, 8}),
        (Keep(last=2, model_every=3, optimizer_last=1), {3, 6, 7, 8}, {8}),
        (Keep(last=1, best=2, optimizer_last=2), {2, 6, 8}, {6, 8}),
    ],
)
def test_what_stays_whole(keep: Keep, kept: set[int], whole: set[int]) -> None:
    assert keep.kept(METRICS) == kept and keep.whole(METRICS) == whole
    verdict = keep.verdict(METRICS)
    assert (verdict.steps, verdict.whole, verdict.loses) == (kept, whole, "optim*")
    assert verdict.and_whole([4]) == (kept | {4}, whole | {4}, "optim*")


@settings(max_examples=examples(200))
@given(
    st.sets(st.integers(0, 100), min_size=1, max_size=30),
    st.builds(
        Keep,
        last=st.integers(1, 5),
        every=st.none() | st.integers(1, 20),
        optimizer_last=st.none() | st.integers(1, 5),
        model_every=st.none() | st.integers(1, 20),
    ),
)
def test_the_newest_is_whole_whatever_is_dropped(steps: set[int], keep: Keep) -> None:
    kept, whole = keep.kept(dict.fromkeys(steps)), keep.whole(dict.fromkeys(steps))
    assert max(steps) in whole and whole <= kept <= steps
    assert all(step in kept for step in steps if keep.model_every and step % keep.model_every == 0)
    assert keep.optimizer_last is None or len(whole) <= keep.optimizer_last


@pytest.mark.parametrize("bad", [{"optimizer_last": 0}, {"model_every": 0}])
def test_what_is_dropped_is_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(**bad)
