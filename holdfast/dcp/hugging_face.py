"""Quantized weights of a Hugging Face folder, by the reader of a torchtitan adapter; its manager calls it."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict_loader


def read(adapter: Any, into: dict[str, Any], path: str) -> None:
    """Fill the tensors of ``into``, under Hugging Face's names, from the folder ``path``."""
    state_dict_loader.load(into, storage_reader=adapter.get_hf_storage_reader(path, True))
