"""What an opened checkpoint answers, of holdfast (`Own`) or of another library (`Foreign`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import Manifest
from holdfast.read.damage import Findings
from holdfast.read.files import Files
from holdfast.read.ranges import Verify
from holdfast.storage.place import Place


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a saved tensor without reading it: torch dtype, global shape, bytes, and its cells' boxes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    record: TensorRecord

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, lengths) of each cell that it was saved in."""
        return [(b.offsets, b.lengths) for b, _ in self.record.boxes()]


class Reader(Protocol):
    """One checkpoint at ``path``. Nothing is read before it is asked for."""

    @property
    def path(self) -> Place: ...

    @property
    def manifest(self) -> Manifest:
        """What it holds. Raises NotACheckpoint, Unsupported, Damaged or Untrusted."""

    @property
    def files(self) -> Files:
        """Where the bytes of its tensors lie."""

    def stored_name(self, name: str) -> str:
        """The name under which a tensor is read: of tied ones the same."""

    @property
    def format(self) -> str:
        """``"holdfast"``, or the name of a foreign format."""

    @property
    def reading(self) -> str:
        """Which reading of the path was taken where several were possible."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """What it holds that has no place in a state, by path, with the reason."""

    @property
    def signed_by(self) -> str | None:
        """The public key whose signature was required and is right."""

    @property
    def attachments(self) -> Mapping[str, int]:
        """Names of the attached files with their bytes."""

    def attachment(self, name: str) -> bytes:
        """The content of an attached file. Raises KeyError or Damaged."""

    def per_rank(self, path: str, rank: int) -> Any:
        """The value that ``rank`` saved at ``path``. Raises KeyError or Damaged."""

    def verifying(self, verify: Verify) -> Verify:
        """How reads are verified, if a caller asks for ``verify``."""

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        """What is wrong in the r-th of n even parts (``share``); what is no data belongs to the first part."""
