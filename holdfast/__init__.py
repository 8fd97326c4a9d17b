"""holdfast: saves the state of a distributed PyTorch training run and gets it back, whole, on any number of ranks.

``import holdfast`` imports nothing else: each name is imported when it is first used, so that the command's help and
the completion of a shell answer at once. It starts no thread, registers no listener and changes no signal.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.ondisk.version import __version__

if TYPE_CHECKING:
    from holdfast import dcp, errors, events, remap, storage, testing, tools  # noqa: F401
    from holdfast.checkpoint import Checkpoint
    from holdfast.checkpoint import open_checkpoint as open
    from holdfast.convert import convert
    from holdfast.copy import copy
    from holdfast.errors import HoldfastError, SaveFailed
    from holdfast.load import load
    from holdfast.manager import CheckpointManager
    from holdfast.run.keep import Keep
    from holdfast.save import save
    from holdfast.saver import Saver
    from holdfast.saving import Saving
    from holdfast.state import RNG, PerRank, Shard

__all__ = [
    "RNG",
    "Checkpoint",
    "CheckpointManager",
    "HoldfastError",
    "Keep",
    "PerRank",
    "SaveFailed",
    "Saver",
    "Saving",
    "Shard",
    "__version__",
    "convert",
    "copy",
    "load",
    "open",
    "save",
]

_NAMES = {
    "Checkpoint": "checkpoint:Checkpoint",
    "CheckpointManager": "manager:CheckpointManager",
    "HoldfastError": "errors:HoldfastError",
    "Keep": "run.keep:Keep",
    "PerRank": "state:PerRank",
    "RNG": "state:RNG",
    "SaveFailed": "errors:SaveFailed",
    "Saver": "saver:Saver",
    "Saving": "saving:Saving",
    "Shard": "state:Shard",
    "convert": "convert:convert",
    "copy": "copy:copy",
    "load": "load:load",
    "open": "checkpoint:open_checkpoint",
    "save": "save:save",
}
"""Where each public name is defined."""

_MOVED = {
    "Advice": "run.interval:Advice",
    "Converted": "export.work:Converted",
    "Copied": "copy:Copied",
    "Damage": "read.damage:Damage",
    "Damaged": "errors:Damaged",
    "Dropped": "repair.drop:Dropped",
    "Durability": "run.tiers.home:Durability",
    "Event": "events:Event",
    "Loaded": "load:Loaded",
    "Mismatch": "errors:Mismatch",
    "NotACheckpoint": "errors:NotACheckpoint",
    "RankLost": "errors:RankLost",
    "Repaired": "repair.repair:Repaired",
    "Rescued": "repair.rescue:Rescued",
    "StorageError": "errors:StorageError",
    "TensorInfo": "checkpoint:TensorInfo",
    "Timing": "saving:Timing",
    "Unsupported": "errors:Unsupported",
    "Untrusted": "errors:Untrusted",
    "Upload": "storage:Upload",
    "Verified": "read.damage:Verified",
    "Place": "storage:Place",
    "at": "storage:at",
    "drop": "tools:drop",
    "listen": "events:listen",
    "recover": "tools:recover",
    "repair": "tools:repair",
    "rescue": "tools:rescue",
    "sign": "tools:sign",
    "signing": "tools:signing",
    "timeline": "report.timeline:timeline",
    "verify": "tools:verify",
}
"""Names that version 0.1 had here, and where they are. They go in the next release."""

_ROOMS = ("dcp", "errors", "events", "remap", "storage", "testing", "tools")
"""Modules that may be used as ``holdfast.errors`` without an import of their own."""


class _Package(ModuleType):
    """This package. ``holdfast.load`` is the function, also once something has imported the module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system sets each submodule as an attribute of its package, and would hide the name.
        if not (isinstance(value, ModuleType) and (name in _NAMES or name in _MOVED)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _defined(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


def _import_name(name: str) -> Any:
    if name in _NAMES:
        value = globals()[name] = _defined(_NAMES[name])
        return value
    if name in _MOVED:
        place = _MOVED[name].replace(":", ".")
        warnings.warn(f"holdfast.{name} has moved: use holdfast.{place}", DeprecationWarning, stacklevel=3)
        return _defined(_MOVED[name])
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds those that are not there

    def __getattr__(name: str) -> Any:
        return _import_name(name)


def _warn_of_namesake() -> None:
    """Warn if the other project of this name is installed in the same place: the two overwrite each other's files."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        names = os.listdir(folder)
    except OSError:  # the package lies in an archive, or the folder may not be listed
        return
    other = [name for name in names if name.startswith("holdfast-") and name.endswith(".dist-info")]
    if other:
        warnings.warn(
            f"{other[0].removesuffix('.dist-info')} is installed beside holdfast-torch. It is another project, and its "
            "files overwrite this package's: pip uninstall holdfast holdfast-torch, then pip install holdfast-torch",
            stacklevel=2,
        )


_warn_of_namesake()
