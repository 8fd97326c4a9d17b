"""A checkpoint by the keys that torch's programs know: ours as it is, torch's own folders by torch's own keys.

`load` and `Reader` open with it. Never unpickles what torch has pickled: the foreign room reads it.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.foreign.assemble import Found, assemble
from holdfast.foreign.dcp import read_folder
from holdfast.ondisk import manifest


def open_by_key(path: str | os.PathLike[str]) -> Checkpoint:
    """`holdfast.open`, but a folder that torch's engine wrote keeps its keys: a program that changes one line goes on.

    `holdfast.open` gives the model and the optimizer in it holdfast's names, whatever that program called them.
    """
    folder = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    of_torch = any((folder / name).is_file() for name in (".metadata", "__0.metadata"))
    if not of_torch or (folder / manifest.FILE_NAME).exists():
        return open_checkpoint(path)
    state = read_folder(folder)
    found = Found("torch.distributed.checkpoint", state.tree, world_size=state.world_size)
    return Checkpoint(folder, foreign=assemble(found, folder))
