"""What a load did: the report that `load` returns.

Comparing, reading and handing back each fill in a part of it. Never decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.checkpoint import Checkpoint


@dataclass(frozen=True)
class Loaded:
    """What a load did.

    ``restored``: names of tensors and values that came; ``skipped``: left out by ``only``; ``kept``: not in the
    checkpoint, kept as they were; ``cleared``: state of optimizers that went, since the checkpoint says that there was
    none; ``handed``: given to methods of a module or optimizer, and not in its state dict as saved (it may have
    converted them);
    ``cast``: name to (saved, own) dtype; ``renamed``: saved name to own name.
    Bytes are this rank's: ``bytes_needed`` by its boxes, ``bytes_read`` from storage, ``bytes_received`` from ranks
    that want the same and have read them, ``bytes_unverified`` of those needed whose blocks were read only in part, by
    whichever rank, and so could not be checked (``verify="blocks"`` checks all).
    """

    checkpoint: Checkpoint
    restored: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_unverified: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int | None:
        """The training step of the checkpoint."""
        return self.checkpoint.step
