"""holdfast: saves the state of a distributed training run and gets it back, whole, on any number of ranks."""

from importlib import import_module
from typing import Any

from holdfast.checkpoint import Checkpoint, TensorInfo, recover
from holdfast.checkpoint import open_checkpoint as open
from holdfast.convert import convert
from holdfast.copy import Copied, copy
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
from holdfast.load import Loaded, load
from holdfast.manager import CheckpointManager
from holdfast.ondisk.version import __version__
from holdfast.read.damage import Damage, Verified
from holdfast.repair import signing
from holdfast.repair.drop import Dropped, drop
from holdfast.repair.repair import Repaired, repair
from holdfast.repair.rescue import Rescued, rescue
from holdfast.repair.signing import sign
from holdfast.repair.verify import verify
from holdfast.report.progress import Bars
from holdfast.report.timeline import from_environment, timeline
from holdfast.run.interval import Advice
from holdfast.run.keep import Keep, Upload
from holdfast.run.tiers.home import Durability
from holdfast.save import save
from holdfast.saver import Saver
from holdfast.saving import Saving, Timing
from holdfast.state import RNG, PerRank, Shard
from holdfast.storage.store_place import StorePlace as Place
from holdfast.storage.urls import at

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
