"""What a caller wants of a checkpoint: a box of a tensor, and the memory that takes it.

Loads, conversions and `Checkpoint` make it, and `read_boxes` fulfils it.
"""

from __future__ import annotations

import msgspec
import torch

from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord


class Wanted(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A box of a saved tensor and the memory that takes it; ``view`` has the box's lengths as shape.

    ``name`` is the saved name. A view of another dtype, on a device or scattered is filled a window at a time.
    ``cell``: the box counts elements of this saved cell, in the order in which they lie in the file; ``record`` has the
    cell as its one axis then, and the tensor's own record comes with the cell.
    ``fill``: the view takes this number everywhere, and no file is read.
    """

    name: str
    record: TensorRecord
    box: Box
    view: torch.Tensor
    cell: tuple[Box, TensorRecord] | None = None
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return 0 if self.fill is not None else self.box.size * dtypes.itemsize(self.record.dtype)

    def touching(self) -> list[tuple[Box, int]]:
        """The saved cells that meet the box, each with the index of its file; none where no file is read."""
        return [] if self.fill is not None else self.record.touching(self.box)
