"""Objects with ``state_dict()`` and ``load_state_dict()``: a save asks the one, and a load calls the other.

The table names `gather` and `hand_back`. Never calls any other method of an object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.state import trees
from holdfast.state.leaves import Target
from holdfast.state.trees import bare_tensors, copied
from holdfast.state.walk import Loading, Put, Walk

FILLED_IN_PLACE = "holdfast_fills_in_place"
"""An attribute of objects whose state dict holds tensors that they keep. A load fills these where they lie and calls
``load_state_dict`` when all tensors are filled."""


def gather(walk: Walk, path: str, node: Any, put: Put) -> None:
    """Add what the object's state dict holds."""
    trees.add_tree(path, node.state_dict(), walk.into, walk.noted, owned=False)


def hand_back(walk: Loading, path: str, node: Any, put: Put) -> None:
    """Hand the object all that was saved below its path, in new tensors."""
    present = dict(bare_tensors(path, present_state(node)))  # an object may refuse here to be loaded now
    in_place = bool(getattr(node, FILLED_IN_PLACE, False))
    maker = walk.maker(present=present, in_place=in_place)
    undo = None if in_place else partial(undoing, node)
    walk.into.handback.targets.append(Target(path, node.load_state_dict, maker, undoing=undo))


def present_state(node: Any) -> Any:
    """The state dict of an object that is about to be loaded; its attributes stay as they were.

    Loaders begin to iterate when they are asked, and some then ignore the state that they are given.
    """
    attributes = getattr(node, "__dict__", {})
    before = dict(attributes)
    try:
        return node.state_dict()
    finally:
        if attributes.keys() != before.keys() or any(attributes[key] is not value for key, value in before.items()):
            attributes.clear()
            attributes.update(before)


def undoing(node: Any) -> Callable[[], None]:
    """A function that gives the object its present state back.

    If the object has no state yet, that function raises what ``state_dict()`` raised. An error of holdfast is raised at
    once: with it an object refuses to be loaded now.
    """
    try:
        present = copied(present_state(node))
    except HoldfastError:
        raise
    except Exception as error:  # noqa: BLE001 - it may have none before its first step
        return partial(_raise, error)
    return lambda: node.load_state_dict(present)


def _raise(error: Exception) -> None:
    raise error
