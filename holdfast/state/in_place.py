"""Saved values put into the containers that a state already has, so that references to these stay true.

The walk hands the values of a loaded target to `Filling`. Never touches a tensor or an object with a state of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.ondisk import arrays
from holdfast.ondisk.containers import kind_of
from holdfast.ondisk.values import SINGLE


class Filling:
    """One load; it remembers what it has filled, since a container may stand at several places of a state.

    With ``keep`` a dict keeps what it has under other keys than the saved ones.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._filled: set[int] = set()

    def put(self, present: Any, put: Callable[[Any], None], saved: Any) -> None:
        """Fill ``present`` with ``saved``, or ``put`` what belongs in its place."""
        made = self.filled(present, saved)
        if made is not present:
            put(made)

    def filled(self, present: Any, saved: Any) -> Any:
        """What now belongs in the place of ``present``: itself, filled with ``saved``, if it is of the same kind."""
        if not _alike(present, saved):
            return saved
        if isinstance(present, tuple):
            return tuple(self._items(present, saved))
        if id(present) in self._filled:  # so it now holds what was saved at another place
            return present if _equal(present, saved) else saved
        self._filled.add(id(present))
        if isinstance(present, dict):
            self._fill_dict(present, saved)
        elif isinstance(present, (list, deque)):
            items = self._items(present, saved)
            present.clear()
            present.extend(items)
        elif isinstance(present, set):
            present.clear()
            present.update(saved)
        else:
            present[... if arrays.is_array(present) else slice(None)] = saved
        return present

    def _fill_dict(self, present: dict[Any, Any], saved: dict[Any, Any]) -> None:
        children = {k: self.filled(present[k], v) if k in present else v for k, v in saved.items()}
        if not self._keep:
            present.clear()
        present.update(children)
        if isinstance(present, defaultdict) and isinstance(saved, defaultdict):
            present.default_factory = saved.default_factory

    def _items(self, present: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        items = list(saved)
        if set(map(type, present)) <= SINGLE:
            return items
        for at, (one, other) in enumerate(zip(present, saved, strict=False)):
            items[at] = self.filled(one, other)
        return items


def _alike(present: Any, saved: Any) -> bool:
    """Whether one can be made equal to the other, and stay of its own type."""
    if isinstance(present, dict) and type(saved) is dict:
        return True  # also one of a class of its own, and a Counter that version 0.1 saved as a dict
    if type(present) is not type(saved):
        return False
    if arrays.is_array(present):
        return bool(present.dtype == saved.dtype and present.shape == saved.shape and present.flags.writeable)
    if isinstance(present, deque):
        return bool(present.maxlen == saved.maxlen)
    return isinstance(present, (set, bytearray)) or kind_of(present) is not None


def _equal(present: Any, saved: Any) -> bool:
    try:
        return bool(present == saved)
    except (ValueError, RuntimeError):  # arrays inside, of which each element is compared
        return False
