"""Hugging Face's form of a torchtitan model, read and written as torchtitan does it; `trainers.titan` calls it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.own import read_manifest
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import ranks_of
from holdfast.storage import storage
from holdfast.storage.local.local_place import LocalPlace


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
    with ranks_of(None).call(f"make room in {folder}", saving=True) as call:  # no rank writes before it is done
        call.settle("remove", lambda: True, lambda notes: _remove_checkpoint(LocalPlace(folder)), bool)
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


def _remove_checkpoint(folder: LocalPlace) -> bool:
    """On the first rank: delete the checkpoint in ``folder`` if there is one, its manifest first."""
    if not (folder / FILE_NAME).is_file():
        return False
    files: list[LocalPlace] = []
    with suppress(Damaged, Unsupported):  # then it does not say which files are its own
        files = [folder / file.path for file in read_manifest(folder).data_files if file.save is None]
    (folder / FILE_NAME).delete()
    storage.delete(*files)
    return True
