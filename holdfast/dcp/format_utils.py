"""torch's conversions to and from one `torch.save` file, where the folder may be a checkpoint of holdfast.

Programs call them. Never unpickles what lies in a folder.
"""

from __future__ import annotations

import os

import torch
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    torch_save_to_dcp,
)

from holdfast.dcp.failures import as_torch_raises
from holdfast.dcp.opening import open_by_key

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Write what a checkpoint of holdfast or of torch holds to one `torch.save` file, through this process's memory.

    Values that differ by rank are left out. `holdfast.convert(…, to="torch")` needs less memory. Raises as `load` does.
    """
    with as_torch_raises():
        torch.save(open_by_key(dcp_checkpoint_dir).state_dict(), torch_save_path)
