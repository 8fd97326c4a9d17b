"""Hugging Face's form of a torchtitan model, read and written as torchtitan does it.

`titan` calls it for `initial_load_in_hf` and `last_save_in_hf`. The names are those of the model's own adapter, the
files go through torch's Hugging Face reader and writer. Never makes a checkpoint of holdfast's format.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from holdfast.errors import Unsupported
from holdfast.ondisk.manifest import FILE_NAME


def read(adapter: Any, model: Mapping[str, Any], path: str, *, quantized: bool) -> dict[str, Any]:
    """The model state of the Hugging Face folder ``path``, under the names that ``model`` has."""
    into = adapter.to_hf(dict(model))
    state_dict_loader.load(into, storage_reader=adapter.get_hf_storage_reader(path, quantized))
    loaded: dict[str, Any] = adapter.from_hf(into)
    return loaded


def write(adapter: Any, model: Mapping[str, Any], folder: str) -> None:
    """Write ``model`` to ``folder`` as Hugging Face safetensors, one file or as many as the adapter's index says.

    A holdfast checkpoint that is there is removed first: its manifest must not stand among other files.
    """
    if "://" in folder:
        raise Unsupported(f"last_save_in_hf: torch writes Hugging Face's form to a local folder only, not to {folder}")
    _remove_checkpoint(folder)
    index = adapter.fqn_to_index_mapping
    sharded = os.path.join(folder, "sharded") if index else folder
    writer = HuggingFaceStorageWriter(
        path=sharded, save_distributed=True, fqn_to_index_mapping=index, enable_consolidation=not index
    )
    state_dict_saver.save(adapter.to_hf(dict(model)), storage_writer=writer)
    if index:
        consolidate_safetensors_files_on_every_rank(
            input_dir=sharded, output_dir=folder, fqn_to_index_mapping=index, num_threads=5
        )


def _remove_checkpoint(folder: str) -> None:
    ranks = dist.is_available() and dist.is_initialized()
    if (not ranks or dist.get_rank() == 0) and os.path.isfile(os.path.join(folder, FILE_NAME)):
        shutil.rmtree(folder)
    if ranks:
        dist.barrier()  # no rank writes before the old files are gone
