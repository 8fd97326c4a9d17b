"""What a wrapper of `CheckpointManager` takes, beside what the manager takes: run where the wrapper can be imported."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from holdfast.manager import CheckpointManager

NOT_OF_A_WRAPPER = {"self", "root", "every", "group", "state", "only"}


def forgotten(wrapper: type) -> list[str]:
    """Arguments of the manager and of its `restore` that ``wrapper`` lacks, or takes with another default or type."""
    takes = signature(wrapper).parameters
    asked = [*_arguments(CheckpointManager), *_arguments(CheckpointManager.restore)]
    return [name for name, given in asked if name not in takes or _terms(takes[name]) != _terms(given)]


def lost(make: Callable[..., Any]) -> list[str]:
    """Arguments that do not get to the manager, of a wrapper that ``make`` makes with them.

    Told by its ``_make``, a partial of the manager, and by ``_run``, ``_other_model`` and ``_require``.
    """
    given = {name: object() for name, _ in [*_arguments(CheckpointManager), *_arguments(CheckpointManager.restore)]}
    made = make(**given)
    of_restore = {name: getattr(made, f"_{name}", None) for name, _ in _arguments(CheckpointManager.restore)}
    got = {**made._make.keywords, **of_restore}
    return [name for name, value in given.items() if got.get(name) is not value]


def _arguments(of: Callable[..., Any]) -> list[tuple[str, Parameter]]:
    return [(name, p) for name, p in signature(of).parameters.items() if name not in NOT_OF_A_WRAPPER]


def _terms(parameter: Parameter) -> tuple[Any, Any]:
    return parameter.default, parameter.annotation
