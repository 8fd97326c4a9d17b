"""`FileSystemWriter` and `FileSystemReader` replaced by `Writer` and `Reader` of holdfast.dcp: a pytest plugin.

Everything else is torch's own: its functions, its planners and its engine. What torch's classes can be told and
holdfast's cannot (how many threads, one file for each rank, a compression) is left out: what is loaded is the same.
"""

from __future__ import annotations

from typing import Any

import on_cpu  # noqa: F401 - the tests run on the CPU
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils

from holdfast.dcp import Reader, Writer


class AsTheirWriter(Writer):
    def __init__(self, path: Any, *_: Any, overwrite: bool = True, **__: Any) -> None:
        super().__init__(path, overwrite=overwrite)


class AsTheirReader(Reader):
    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path)


class AsFsspecWriter(AsTheirWriter):
    """Another class, as a test replaces a method of the other one."""

    validate_checkpoint_id = Writer.validate_checkpoint_id


class AsFsspecReader(AsTheirReader):
    validate_checkpoint_id = Reader.validate_checkpoint_id


for module in (torch_dcp, filesystem, format_utils, _storage_utils):
    vars(module).update(FileSystemWriter=AsTheirWriter, FileSystemReader=AsTheirReader)
vars(_fsspec_filesystem).update(FsspecWriter=AsFsspecWriter, FsspecReader=AsFsspecReader)
