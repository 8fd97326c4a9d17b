"""torch's conversions to and from one `torch.save` file, where the folder may be a checkpoint of holdfast."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    torch_save_to_dcp,
)

from holdfast.dcp.failures import as_torch_raises
from holdfast.dcp.opening import open_by_key
from holdfast.export import torch_file
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Write what a checkpoint of holdfast or of torch holds to one file that `torch.load` reads.

    It goes through this process's memory. Values that differ by rank are left out. `holdfast.convert(…, to="torch")`
    needs less memory. Raises as `load` does.
    """
    path = LocalPlace(torch_save_path)

    def name(temporary: Path) -> None:
        with naming(path, "replace"):
            disk.replace(temporary, path)
        path.parent.sync_folder()

    with as_torch_raises():
        image = torch_file.copied(open_by_key(dcp_checkpoint_dir).state_dict())
        torch_file.write(image, path, {}, name)
