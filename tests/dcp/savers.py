"""The Savers that `dcp.async_save` keeps until the interpreter ends, ended before: pools serve other tests too.

Called at the end of tests and of functions on ranks. Never leaves one that is open.
"""

from __future__ import annotations

from holdfast.ranks import ranks


def close_all() -> None:
    """Called on all ranks alike."""
    for known in [ranks._alone, *(found for _, found in ranks._known.values())]:
        for saver in known.remembered.pop("dcp", {}).values():
            saver.close()
