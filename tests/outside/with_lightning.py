"""Lightning's checkpointing tests with `HoldfastCheckpointIO` wherever Lightning would take its `TorchCheckpointIO`.

A pytest plugin: it replaces the class that strategies make when a test gives them no checkpoint plugin. Some tests put
doubles in the place of `torch.save` or of `TorchCheckpointIO.save_checkpoint`, and look at how these are called. The
shim calls such a double for each save that our plugin makes.
"""

from __future__ import annotations

import io
import os
from typing import Any
from unittest import mock

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import strategy as fabric
from lightning.pytorch.strategies import strategy as pytorch

from holdfast.trainers.lightning import HoldfastCheckpointIO

SAVE = HoldfastCheckpointIO.save_checkpoint


def save_checkpoint(
    self: HoldfastCheckpointIO, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
) -> None:
    if isinstance(TorchCheckpointIO.save_checkpoint, mock.Mock):
        TorchCheckpointIO.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    SAVE(self, checkpoint, path, storage_options)
    if isinstance(torch.save, mock.Mock):
        torch.save(checkpoint, io.BytesIO())


HoldfastCheckpointIO.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
fabric.TorchCheckpointIO = pytorch.TorchCheckpointIO = HoldfastCheckpointIO  # type: ignore[attr-defined,misc]
