"""What a wrapper of `CheckpointManager` hands on to it: run where the wrapper can be imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest import mock

from holdfast.ondisk.arguments import Takes
from holdfast.run.options import ResumeOptions, RunOptions
from holdfast.saving.options import values_of


def lost(wrapper: type, make_manager: Callable[[Any], Any]) -> list[str]:
    """Options of the manager and of its `restore` that ``wrapper`` does not take, or that do not get to the manager."""
    given = {field.name: object() for kind in (RunOptions, ResumeOptions) for field in fields(kind)} | {
        "every": 7,
        "step": 5,
    }
    with mock.patch.object(Takes, "check"):  # these values are of no kind: only where they go counts
        made = wrapper(**given)
    arrived: dict[str, Any] = values_of(made._options, ResumeOptions)

    def record(**options: Any) -> Any:
        arrived.update(options)
        raise StopIteration

    with mock.patch(f"{wrapper.__module__}.CheckpointManager", record):
        try:
            make_manager(made)
        except StopIteration:
            return [name for name, value in given.items() if arrived.get(name) is not value]
    raise AssertionError("no manager was made")
