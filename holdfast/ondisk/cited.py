"""Paths in a manifest that lead to files of another checkpoint beside it.

Called wherever a manifest's files are opened, copied or counted. Never looks whether a file is there.
"""

from __future__ import annotations

from holdfast.ondisk.manifest import FileRecord


def is_cited(path: str) -> bool:
    """Whether a path of a manifest leads to a sibling."""
    return path.startswith("../")


def sibling_of(path: str) -> tuple[str, str]:
    """The folder that a cited path leads to, and the path there: ``../step-5/model/x`` is (``step-5``, ``model/x``)."""
    _, name, below = path.split("/", 2)
    return name, below


def own_path(path: str) -> str:
    """Where a file lies in a checkpoint that cites none: ``../step-5/model/x`` is ``model/x``."""
    return sibling_of(path)[1] if is_cited(path) else path


def origin_of(file: FileRecord, folder: str) -> str:
    """What an error about a file adds for the checkpoint in ``folder``: nothing, or whose file it cites."""
    if not is_cited(file.path):
        return ""
    return f" (a file of {sibling_of(file.path)[0]}, written by save {file.save}, which {folder} cites)"
