"""Whether the files of all ranks are there, and no others: a save that broke off, or two that were mixed, is refused.

Readers of formats with a file for each rank call `prove_all`. Never opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from holdfast.errors import Damaged
from holdfast.storage.place import Place


def prove_all(ranks: Collection[int], world_size: int, folder: Place, name_of: Callable[[int], str]) -> None:
    """Raise Damaged unless ``ranks``, which have a file, are 0 to ``world_size`` - 1. ``name_of`` names their files."""
    missing = [rank for rank in range(min(world_size, len(ranks) + 10)) if rank not in ranks]
    if missing:
        names = ", ".join(map(name_of, missing[:10]))
        raise Damaged(
            f"{folder} is a checkpoint of {world_size} ranks, but {names} {'is' if len(missing) == 1 else 'are'} "
            f"missing ({len(ranks)} are there): the save never finished, or files were left behind when it was copied"
        )
    if len(ranks) > world_size:
        raise Damaged(
            f"{folder} is a checkpoint of {world_size} ranks, but holds {name_of(max(ranks))} too: files of two saves "
            "are mixed. Move away those that are older"
        )
