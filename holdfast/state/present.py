"""The state that an object has before a load: asked for without changing the object, and given back if the load fails.

The walk asks here about objects with methods of their own. Never calls a method but ``state_dict``, and
``load_state_dict`` to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.state.trees import copied


def told(node: Any) -> Any:
    """The state dict of an object that is about to be loaded, its attributes as they were before.

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

    If the object has no state to tell yet, that function raises what the object raised. An error of holdfast is raised
    at once: by it an object refuses to be loaded now.
    """
    try:
        present = copied(told(node))
    except HoldfastError:
        raise
    except Exception as error:  # noqa: BLE001 - it may have none before its first step
        return partial(_raise, error)
    return lambda: node.load_state_dict(present)


def _raise(error: Exception) -> None:
    raise error
