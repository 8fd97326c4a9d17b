"""Which steps of a fast tier go to the store: what a user asks for. `run.keep` says what follows from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Upload:
    """Which steps of the fast tier go to the store.

    Args:
        every: Each multiple of it goes, the oldest first.
        newest: Whenever the uploader is free it takes the newest step, if the store has none as new. Older ones are
            passed over. With ``every``, the two take turns.
        bandwidth: Bytes a second that a node may send at most.

    Raises:
        ValueError: Nothing would ever be uploaded, or a number is not positive.
    """

    every: int | None = None
    newest: bool = True
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"Upload(every={self.every}) must be at least 1, or None")
        if self.every is None and not self.newest:
            raise ValueError(
                "Upload(every=None, newest=False) would never upload anything: say what, or leave fast= out"
            )
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"Upload(bandwidth={self.bandwidth}) must be more than 0 bytes a second, or None")
