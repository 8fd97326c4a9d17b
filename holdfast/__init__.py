"""holdfast: saves the state of a distributed training run and gets it back, whole, on any number of ranks."""

from importlib import import_module
from typing import Any

from holdfast import signing
from holdfast.checkpoint import Checkpoint, TensorInfo, recover
from holdfast.checkpoint import open_checkpoint as open
from holdfast.convert import convert
from holdfast.copy import Copied, copy
from holdfast.drop import Dropped, drop
from holdfast.engine.damage import Damage, Verified
from holdfast.engine.state import RNG, PerRank, Shard
from holdfast.engine.stores.place import Place
from holdfast.engine.stores.urls import at
from holdfast.errors import (
    Damaged,
    HoldfastError,
    Mismatch,
    NotACheckpoint,
    RankLost,
    SaveFailed,
    StorageError,
    Unsupported,
    Untrusted,
)
from holdfast.events import Event, install, listen
from holdfast.export.work import Converted
from holdfast.interval import Advice
from holdfast.keep import Keep, Upload
from holdfast.load import Loaded, load
from holdfast.manager import CheckpointManager
from holdfast.repair import Repaired, repair
from holdfast.report.progress import Bars
from holdfast.report.timeline import from_environment, timeline
from holdfast.rescue import Rescued, rescue
from holdfast.save import save
from holdfast.saver import Saver
from holdfast.saving import Saving, Timing
from holdfast.signing import sign
from holdfast.tiers.home import Durability
from holdfast.verify import verify
from holdfast.version import __version__

install(Bars())
from_environment()


def __getattr__(name: str) -> Any:
    # Loaded when they are first asked for: the one brings all of torch.distributed.checkpoint with it, the other is
    # for tests alone.
    if name in ("dcp", "testing"):
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "RNG",
    "Advice",
    "Checkpoint",
    "CheckpointManager",
    "Converted",
    "Copied",
    "Damage",
    "Damaged",
    "Dropped",
    "Durability",
    "Event",
    "HoldfastError",
    "Keep",
    "Loaded",
    "Mismatch",
    "NotACheckpoint",
    "PerRank",
    "Place",
    "RankLost",
    "Repaired",
    "Rescued",
    "SaveFailed",
    "Saver",
    "Saving",
    "Shard",
    "StorageError",
    "TensorInfo",
    "Timing",
    "Unsupported",
    "Untrusted",
    "Upload",
    "Verified",
    "__version__",
    "at",
    "convert",
    "copy",
    "drop",
    "listen",
    "load",
    "open",
    "recover",
    "repair",
    "rescue",
    "save",
    "sign",
    "signing",
    "timeline",
    "verify",
]
