"""For tests of what is built on holdfast: faults, damage, a store in memory, and tests that every store has to pass."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.events import LOADING, SAVING
    from holdfast.storage.memory import Memory
    from holdfast.storage.wrappers.retrying import transient
    from holdfast.testing.contract import StoreContract
    from holdfast.testing.damage import Damage, corrupt_block, drop_file, flip_bit, truncate
    from holdfast.testing.disk_faults import Faults, count_calls, faults, flip, short_writes, slow, torn_writes
    from holdfast.testing.failing import Failing
    from holdfast.testing.orders import Hit
    from holdfast.testing.phases import at_phase, freeze_at, kill_at
    from holdfast.testing.reading import ReadOnlyContract

# Imported when they are asked for: the contracts bring pytest, and the writer process, which carries orders out too,
# is to import nothing but `orders`.
_HOMES = {
    "holdfast.storage.memory": ("Memory",),
    "holdfast.storage.wrappers.retrying": ("transient",),
    "holdfast.events": ("LOADING", "SAVING"),
    "holdfast.testing.contract": ("StoreContract",),
    "holdfast.testing.damage": ("Damage", "corrupt_block", "drop_file", "flip_bit", "truncate"),
    "holdfast.testing.failing": ("Failing",),
    "holdfast.testing.disk_faults": ("Faults", "count_calls", "faults", "flip", "short_writes", "slow", "torn_writes"),
    "holdfast.testing.orders": ("Hit",),
    "holdfast.testing.phases": ("at_phase", "freeze_at", "kill_at"),
    "holdfast.testing.reading": ("ReadOnlyContract",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _HOME[name]
    if module in ("holdfast.testing.contract", "holdfast.testing.reading"):
        import pytest

        # Before their import: failures then show values.
        pytest.register_assert_rewrite("holdfast.testing.contract", "holdfast.testing.reading")
    return getattr(import_module(module), name)


__all__ = [
    "LOADING",
    "SAVING",
    "Damage",
    "Failing",
    "Faults",
    "Hit",
    "Memory",
    "ReadOnlyContract",
    "StoreContract",
    "at_phase",
    "corrupt_block",
    "count_calls",
    "drop_file",
    "faults",
    "flip",
    "flip_bit",
    "freeze_at",
    "kill_at",
    "short_writes",
    "slow",
    "torn_writes",
    "transient",
    "truncate",
]
