"""The check finds what it is there to find: each safeguard that is taken out of the library is missed."""

from __future__ import annotations

import pytest

from tests.crash.judge import judge
from tests.crash.mutants import MUTANTS, Mutant
from tests.crash.profiles import PROFILES, Limits

LIMITS = Limits(names=12, bytes=8, states=12)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    """By the gentlest file system that has to."""
    with mutant.patch():
        run = mutant.run()
    gentlest = next(name for name in PROFILES if name in mutant.caught_by)
    assert judge(run, [PROFILES[gentlest]], LIMITS, enough=1).violations


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_by_each_of_its_profiles(mutant: Mutant) -> None:
    with mutant.patch():
        run = mutant.run()
    caught = {name for name in mutant.caught_by if judge(run, [PROFILES[name]], LIMITS, enough=1).violations}
    assert caught == mutant.caught_by
