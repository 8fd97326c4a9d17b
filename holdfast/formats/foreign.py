"""A checkpoint of another library, opened: it answers what our own checkpoints answer.

`assemble` makes a `Foreign` of what a reader of a format found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.formats.places import ForeignFiles
from holdfast.formats.simplified import materialized
from holdfast.formats.verify import verify_foreign
from holdfast.ondisk.manifest import Manifest
from holdfast.read.damage import Findings
from holdfast.read.ranges import Verify
from holdfast.read.source import ReadStats
from holdfast.storage.place import Place


@dataclass(frozen=True)
class Foreign:
    """A `Reader` of a foreign checkpoint.

    ``values``: those of each rank, by path. ``attached``: files beside the state, by name.
    """

    path: Place
    format: str
    reading: str
    manifest: Manifest
    files: ForeignFiles
    values: Mapping[str, tuple[Any, ...]]
    attached: Mapping[str, Place]
    left_out: Mapping[str, str]
    signed_by: str | None = None

    @property
    def attachments(self) -> Mapping[str, int]:
        return {name: path.stat().st_size for name, path in self.attached.items()}

    def attachment(self, name: str) -> bytes:
        if name not in self.attached:
            raise KeyError(f"{self.path} has no attachment {name!r}; it has {sorted(self.attached)}")
        return self.attached[name].read_small()

    def per_rank(self, path: str, rank: int) -> Any:
        return materialized(self.values[path][rank], self.path)

    def verifying(self, verify: Verify) -> Verify:
        return verify

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        stats = ReadStats()
        damages = verify_foreign(self.files, self.path, stats, share=share) if deep else []
        return Findings(self.manifest.save, stats.needed, stats.read, stats.unverified, [], damages)
