"""Hugging Face's form of a torchtitan model: read into the live parameters, and written from them.

`trainers.titan` calls it. Names and shapes are those that torchtitan's own adapter gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from holdfast.convert import convert
from holdfast.dcp import hugging_face
from holdfast.load import load
from holdfast.ondisk import names
from holdfast.storage.place import Place

_MODEL = "model"

_EXTRAS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt",
           "chat_template*")  # fmt: skip
"""What `from_pretrained` needs beside the weights."""


def read(adapter: Any, model: Mapping[str, Any], path: str, *, quantized: bool) -> dict[str, Any]:
    """The model state of the Hugging Face folder ``path``, under the names that ``model`` has."""
    into = adapter.to_hf(dict(model))
    if quantized:
        hugging_face.read(adapter, into, path)
    else:
        load(path, {_MODEL: into}, only=[names.join((_MODEL, name)) for name in into], cast=True)
    loaded: dict[str, Any] = adapter.from_hf(into)
    return loaded


def write(adapter: Any, model: Mapping[str, Any], folder: Place, dtype: torch.dtype) -> None:
    """Write ``model`` as ``dtype`` to ``folder``, in the place of a checkpoint that may be there."""
    convert(
        {_MODEL: adapter.to_hf(dict(model))}, folder, to="huggingface", only=_MODEL, dtype=dtype, overwrite=True,
        extras=_assets(getattr(adapter, "hf_assets_path", None)),
    )  # fmt: skip


def _assets(folder: str | None) -> list[Path]:
    """The config and the tokenizer of the folder that training began with."""
    files = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
    return [file for file in files if file.is_file() and any(fnmatch(file.name, name) for name in _EXTRAS)]
