"""A run's folder with a folder for each step: the newest of them that is complete.

Readers of formats whose users name such a folder call `newest`. Never takes the files' times for an order.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from holdfast.errors import NotACheckpoint
from holdfast.formats import members
from holdfast.storage.place import Place

_NUMBER = re.compile(r"[0-9]+")


def newest(run: Place, is_complete: Callable[[Place], bool]) -> tuple[Place, str] | None:
    """The folder with the highest numbers in its name that is complete, and why it was taken; None if there is none.

    Names that differ in more than their numbers belong to several runs. Raises NotACheckpoint if more than one of them
    has a checkpoint.
    """
    series: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in members.folders(run):
        numbers = tuple(map(int, _NUMBER.findall(name)))
        if numbers:
            series.setdefault(_NUMBER.sub("#", name), []).append((numbers, name))
    found: list[tuple[Place, str]] = []
    for steps in series.values():
        skipped: list[str] = []
        for _, name in sorted(steps, reverse=True):
            if is_complete(run / name):
                newer = f"; {', '.join(skipped[:3])} {'is' if len(skipped) == 1 else 'are'} not complete"
                found.append((run / name, f"{name}, the newest of {len(steps)} steps{newer if skipped else ''}"))
                break
            skipped.append(name)
    if len(found) > 1:
        names = ", ".join(path.name for path, _ in found)
        raise NotACheckpoint(f"{run} holds several series of checkpoints; open one of them: {names}")
    return found[0] if found else None
