"""holdfast: saves the state of a distributed training run and gets it back, whole, on any number of ranks."""

from holdfast.checkpoint import Checkpoint, TensorInfo
from holdfast.checkpoint import open_checkpoint as open
from holdfast.engine.state import RNG, PerRank, Shard
from holdfast.errors import (
    Damaged,
    HoldfastError,
    Mismatch,
    NotACheckpoint,
    RankLost,
    SaveFailed,
    StorageError,
    Unsupported,
)
from holdfast.events import Event, install, listen
from holdfast.load import Loaded, load
from holdfast.manager import CheckpointManager, Keep
from holdfast.report.progress import Bars
from holdfast.save import save
from holdfast.version import __version__

install(Bars())

__all__ = [
    "RNG",
    "Checkpoint",
    "CheckpointManager",
    "Damaged",
    "Event",
    "HoldfastError",
    "Keep",
    "Loaded",
    "Mismatch",
    "NotACheckpoint",
    "PerRank",
    "RankLost",
    "SaveFailed",
    "Shard",
    "StorageError",
    "TensorInfo",
    "Unsupported",
    "__version__",
    "listen",
    "load",
    "open",
    "save",
]
