"""Drop-in for `torch.distributed.checkpoint`: its signatures over holdfast's format, and its storage interfaces.

Change `import torch.distributed.checkpoint as dcp` to `import holdfast.dcp as dcp`. To keep torch's own engine, give it
`Writer` and `Reader`.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as _theirs
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    metadata,
    planner,
    staging,
    state_dict,
    state_dict_saver,
    stateful,
    storage,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from holdfast.dcp import format_utils
from holdfast.dcp.loading import load, load_sharded_optimizer_state_dict
from holdfast.dcp.reader import Reader
from holdfast.dcp.saving import async_save, save
from holdfast.dcp.writer import Writer

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "Reader",
    "SavePlan",
    "SavePlanner",
    "Stateful",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "Writer",
    "async_save",
    "default_planner",
    "filesystem",
    "format_utils",
    "load",
    "load_sharded_optimizer_state_dict",
    "metadata",
    "planner",
    "save",
    "staging",
    "state_dict",
    "state_dict_saver",
    "stateful",
    "storage",
]


_DEPRECATED = ("load_state_dict", "save_state_dict")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:  # what a newer torch has besides
        if name.startswith("_") or name in _DEPRECATED or not hasattr(_theirs, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_theirs, name)
