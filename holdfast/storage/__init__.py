"""Where bytes live: local disks and object stores. Users take `at`, `Place` and `Upload` from here.

Each of the three is imported when it is first used: the process that only writes files needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.storage.store_place import StorePlace as Place
    from holdfast.storage.uploads import Upload
    from holdfast.storage.urls import at

__all__ = ["Place", "Upload", "at"]

_NAMES = {"Place": "storage.store_place:StorePlace", "Upload": "storage.uploads:Upload", "at": "storage.urls:at"}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _NAMES[name].partition(":")
        return getattr(import_module(f"holdfast.{module}"), attribute)
