"""What fuzzing has found stays mended, and some hundred changes of every kind are told as they should be.

`make fuzz` goes on from there for as long as one likes (docs/security.md). Each fault that it found is here by the seed
that led to it, so that nothing large is kept; targets of theirs are the golden checkpoints.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from tests.fuzz import trial
from tests.fuzz.targets import TARGETS, changed, seeds
from tests.fuzz.trial import tried
from tests.marks import examples

FEW, MANY = 60, 1500

FOUND = {
    "manifest": (6, 318, 205586), "values": (18328,), "datafile": (19, 56, 65), "part": (13, 53, 107, 111, 1245),
    "megatron": (339,), "dcp": (744, 13836), "full": (342, 13994, 41819),
    "deepspeed": (8172, 19198, 22614, 22726, 23283, 23580, 29644),
}  # fmt: skip
"""Seeds that led to a fault once, by target."""


def _faults(target: str, numbers: range | tuple[int, ...], folder: Path) -> dict[int, str]:
    sound, found = seeds(target), {}
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in numbers:
                name, tree = sound[number % len(sound)]
                fault = tried(target, changed(target, tree, number), folder).fault
                if fault is not None:
                    found[number] = f"{name}: {fault.kind} at {fault.where}\n{fault.text}"
    finally:
        logging.disable(logging.NOTSET)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_wrong_is_told_or_read(target: str, tmp_path: Path) -> None:
    assert _faults(target, range(examples(FEW)), tmp_path) == {}


@pytest.mark.parametrize("target", FOUND)
def test_what_was_found_stays_mended(target: str, tmp_path: Path) -> None:
    assert _faults(target, FOUND[target], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_more_of_what_is_wrong(target: str, tmp_path: Path) -> None:
    assert _faults(target, range(10_000, 10_000 + MANY), tmp_path) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_sound_is_read(target: str, tmp_path: Path) -> None:
    for name, tree in seeds(target):
        outcome = tried(target, tree, tmp_path)
        assert outcome.fault is None and (target == "url" or outcome.error == ""), (name, outcome)


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda: {}["x"], "KeyError"), (lambda: trial.torch.empty(1 << 40), "MemoryError"),
        (lambda: b"x" * (256 << 20), "MemoryError"), (lambda: [0] and _for_ever(), "Hung"),
        (lambda: _raise("it"), "names no file"),
    ],
)  # fmt: skip
@pytest.mark.slow_cases("<lambda>-Hung")
def test_a_trial_can_fail(work: object, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 2)
    monkeypatch.setattr(trial, "use", lambda target, path, took: work())  # type: ignore[operator]
    outcome = tried("dcp", {"x": b"x"}, tmp_path)
    assert outcome.fault is not None and outcome.fault.kind == kind


def _for_ever() -> None:
    while True:
        pass


def _raise(text: str) -> None:
    from holdfast.errors import Damaged

    raise Damaged(text)
