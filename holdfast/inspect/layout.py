"""How a saved tensor is cut and where its pieces lie: the grid of its cells, and the ranks that wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from holdfast.checkpoint import Checkpoint
from holdfast.ondisk import spans
from holdfast.ondisk.cells import Cells, TensorRecord

_RANK = re.compile(r"[^/]+/(?P<rank>\d{5,})-of-\d{5,}(\.\d+)?\.[0-9a-f]{16}\.safetensors$")


@dataclass(frozen=True)
class Layout:
    """``cells``: pieces that a tensor lies in; ``grid``: how many along each axis, None if they are no grid.

    ``ranks`` wrote them, as ``0-3,7``; None where files are not those of a rank. ``files``: how many there are.
    ``made_of``: of how many saved tensors a map makes it; None for one that is saved.
    """

    cells: int
    grid: tuple[int, ...] | None
    ranks: str | None
    files: int
    made_of: int | None = None

    def __str__(self) -> str:
        if self.cells == 0:
            return "made up" if self.made_of == 0 else "empty"
        cut = "whole" if self.cells == 1 else f"{self.cells} boxes"
        if self.made_of is not None:
            cut = f"made of {self.made_of} tensor{'s' if self.made_of > 1 else ''}"
        if self.cells > 1 and self.grid is not None:
            cut = "×".join(map(str, self.grid))
        where = f"{self.files} file{'s' if self.files > 1 else ''}"
        if self.ranks is not None:
            where = f"rank{'' if self.ranks.isdigit() else 's'} {self.ranks}"
        return f"{cut}, {where}"


class Layouts:
    """The layouts of a checkpoint's tensors; thousands are alike, and each is computed once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._records = checkpoint, checkpoint.records
        self._files = [file.path for file in checkpoint.manifest.data_files]
        self._known: dict[tuple[object, ...], Layout] = {}

    def of(self, name: str) -> Layout:
        """The layout of one tensor. Raises KeyError."""
        stored = self._checkpoint.saved_name(name)
        if self._checkpoint.files.is_made(stored):
            origins = self._checkpoint.files.origins(stored, self._records[name])
            return replace(self._layout_of(*(record for _, record in origins)), grid=None, made_of=len(origins))
        record = self._records[name]
        cells = tuple(record.cells) if isinstance(record.cells, list) else record.cells
        key = record.shape, cells, record.files
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = self._layout_of(record)
        return layout

    def boxes(self, name: str) -> list[tuple[str, str]]:
        """Each cell of a tensor as text (``[0:4,0:8]``), with its file; of a made tensor, the cells of its origins."""
        stored = self._checkpoint.saved_name(name)
        made = self._checkpoint.files.is_made(stored)
        return [
            (f"{origin if made else ''}{box}", self._files[index])
            for origin, record in self._checkpoint.files.origins(stored, self._records[name])
            for box, index in record.boxes()
        ]

    def _layout_of(self, *records: TensorRecord) -> Layout:
        used = [self._files[index] for record in records for index in spans.read(record.files)]
        ranks = {int(match["rank"]) for file in used if (match := _RANK.search(file))}
        of_ranks = len(ranks) > 0 and all(_RANK.search(file) for file in used)
        rank_text = spans.ranges(sorted(ranks)) if of_ranks else None
        grid = _grid(records[0]) if len(records) == 1 else None
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
