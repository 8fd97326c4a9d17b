"""How a saved tensor is cut and where its pieces lie: the grid of its cells, and the ranks that wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from holdfast.checkpoint import Checkpoint
from holdfast.ondisk import spans
from holdfast.ondisk.cells import Cells, TensorRecord

_RANK = re.compile(r"[^/]+/(?P<rank>\d{5,})-of-\d{5,}(\.\d+)?\.[0-9a-f]{16}\.safetensors$")


@dataclass(frozen=True)
class Layout:
    """``cells``: pieces that a tensor lies in; ``grid``: how many along each axis, None if they are no grid.

    ``ranks`` wrote them, as ``0-3,7``; None where files are not those of a rank. ``files``: how many there are.
    """

    cells: int
    grid: tuple[int, ...] | None
    ranks: str | None
    files: int

    def __str__(self) -> str:
        if self.cells == 0:
            return "empty"
        cut = "whole" if self.cells == 1 else f"{self.cells} boxes"
        if self.cells > 1 and self.grid is not None:
            cut = "×".join(map(str, self.grid))
        where = f"{self.files} file{'s' if self.files > 1 else ''}"
        if self.ranks is not None:
            where = f"rank{'' if self.ranks.isdigit() else 's'} {self.ranks}"
        return f"{cut}, {where}"


class Layouts:
    """The layouts of a checkpoint's tensors; thousands are alike, and each is computed once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._records = checkpoint.records
        self._files = [file.path for file in checkpoint.manifest.data_files]
        self._known: dict[tuple[object, ...], Layout] = {}

    def of(self, name: str) -> Layout:
        """The layout of one tensor. Raises KeyError."""
        record = self._records[name]
        cells = tuple(record.cells) if isinstance(record.cells, list) else record.cells
        key = record.shape, cells, record.files
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = self._layout_of(record)
        return layout

    def boxes(self, name: str) -> list[tuple[str, str]]:
        """Each cell of a tensor as text (``[0:4,0:8]``), with its file."""
        return [(str(box), self._files[index]) for box, index in self._records[name].boxes()]

    def _layout_of(self, record: TensorRecord) -> Layout:
        used = [self._files[index] for index in spans.read(record.files)]
        ranks = {int(match["rank"]) for file in used if (match := _RANK.search(file))}
        of_ranks = len(ranks) > 0 and all(_RANK.search(file) for file in used)
        rank_text = spans.ranges(sorted(ranks)) if of_ranks else None
        grid = _grid(record)
        return Layout(len(used), grid if grid and prod(grid) == len(used) else None, rank_text, len(set(used)))


def _grid(record: TensorRecord) -> tuple[int, ...] | None:
    cells = record.cells
    if 0 in record.shape or (isinstance(cells, Cells) and cells.cuts is None):
        return None
    if cells is None:
        return (1,) * len(record.shape)
    if isinstance(cells, Cells):
        return tuple(len(cuts) - 1 for cuts in cells.cuts or ())
    return tuple(-(-n // cell) for n, cell in zip(record.shape, cells, strict=True))
