"""What the arguments of public functions take, and the error that names the one that is something else.

Functions and option classes check theirs before anything happens. Never looks at more than one value at a time.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, TypeVar

Given = TypeVar("Given")


@dataclass(frozen=True)
class Takes:
    """What an argument takes: ``what`` to give, in words; values of the right kind; and which of them ``fit``."""

    what: str
    kind: Callable[[Any], bool]
    fit: Callable[[Any], bool] = lambda value: True

    def check(self, name: str, value: object) -> None:
        """Raise TypeError for another kind of value, ValueError for one that does not fit."""
        kind = self.kind(value)
        if kind and self.fit(value):
            return
        text = f"{_shown(name, value)}: give {self.what}"
        raise ValueError(text) if kind else TypeError(text)

    def checked(self, name: str, value: Given) -> Given:
        """The value, if it is one that fits; otherwise raises as `check`."""
        self.check(name, value)
        return value


def check(takes: Mapping[str, Takes], values: Mapping[str, object]) -> None:
    """Check the values that a table names."""
    for name, one in takes.items():
        if name in values:
            one.check(name, values[name])


def whole(least: int, what: str = "a whole number") -> Takes:
    """A whole number from ``least`` on."""
    return Takes(f"{what}, at least {least}", is_whole, lambda value: value >= least)


def one_of(*choices: str) -> Takes:
    """One of these texts."""
    quoted = [f'"{choice}"' for choice in choices]
    return Takes(f"{', '.join(quoted[:-1])} or {quoted[-1]}", lambda value: True, lambda value: value in choices)


def or_none(takes: Takes) -> Takes:
    """The same, or None."""
    return Takes(
        f"{takes.what}, or None", lambda value: value is None or takes.kind(value),
        lambda value: value is None or takes.fit(value),
    )  # fmt: skip


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, also one of NumPy or a tensor of one."""
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_patterns(value: object) -> bool:
    """None too, of which `patterns.patterns_in` says more. What can be walked only once is not looked into."""
    if value is None or isinstance(value, str):
        return True
    if isinstance(value, Collection):
        return all(isinstance(one, str) for one in value)
    return isinstance(value, Iterable)


def _is_path(value: object) -> bool:
    """A place in a store is no path of the system, and this room knows no stores: all places have the attribute."""
    return isinstance(value, str) or hasattr(value, "__fspath__") or hasattr(value, "is_remote")


SECONDS = Takes("a number of seconds, more than 0", _is_number, lambda value: value > 0)
GRACE = Takes("a number of seconds, at least 0", _is_number, lambda value: value >= 0)
PATTERNS = Takes('names of the checkpoint, such as "model" or ["model", "step"]', _is_patterns)
VERIFY = Takes(
    'True, False or "blocks"', lambda value: isinstance(value, (bool, str)),
    lambda value: isinstance(value, bool) or value == "blocks",
)  # fmt: skip
STEP = whole(0, "the number of steps that are done")
STATE = Takes('a dict, such as {"model": model, "optimizer": optimizer}', lambda value: isinstance(value, Mapping))
PATH = Takes("a path or a URL", _is_path)
SIGNALS = Takes(
    "signals, such as (signal.SIGTERM,), or () for none",
    lambda value: isinstance(value, Collection) and all(isinstance(one, (signal.Signals, int)) for one in value),
)


def step_number(step: int, state: object) -> int:
    """A step as a plain number. Raises TypeError or ValueError if it, or the state that is given with it, is none."""
    STEP.check("step", step)
    STATE.check("state", state)
    return index(step)


def _shown(name: str, value: object) -> str:
    """``name=value``, or the type of a value that is long or no plain one: a state is never written out."""
    plain = (str, int, float, bool, type(None))
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    if len(inside) <= 8 and all(isinstance(one, plain) for one in inside):
        text = repr(value)
        if len(text) <= 200:
            return f"{name}={text}"
    return f"{name} is a {type(value).__qualname__}"
