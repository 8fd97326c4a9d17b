"""Files that are kept beside the state: read, named, and placed in the checkpoint.

`gather` reads them; the rank that commits writes them. Never lets a name leave the checkpoint's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast import events
from holdfast.errors import StorageError, Unsupported
from holdfast.ondisk import blocks
from holdfast.storage.naming import naming

Attached = Mapping[str, str | os.PathLike[str] | bytes]
"""Files to keep beside the state: name below ``attachments/`` to a path or the bytes themselves."""


def check_attachment(name: str) -> None:
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Unsupported(f"attachment {name!r} must be a relative path that stays below attachments/")


def read_attachments(attachments: Attached) -> dict[str, bytes]:
    """The bytes of the attached files. Raises Unsupported for a name that leaves the checkpoint, StorageError."""
    data = {}
    for name, source in attachments.items():
        check_attachment(name)
        if not isinstance(source, bytes):
            with naming(source, "read the attachment"):
                source = Path(source).read_bytes()
        data[name] = source
    return data


def readable_attachments(attachments: Attached) -> dict[str, bytes]:
    """The same, of those that can be read here; the others may lie on the first rank's disk alone."""
    data: dict[str, bytes] = {}
    for name, source in attachments.items():
        try:
            data |= read_attachments({name: source})
        except (StorageError, OSError) as error:
            events.log.debug("the attachment %r cannot be read on this rank: %s", name, error)
    return data


def place_attachments(
    attachments: Mapping[str, bytes], save: str, *, fresh: bool
) -> tuple[list[tuple[str, int, str]], list[tuple[str, bytes]]]:
    """Records of attached files, and their relative paths with their bytes.

    Beside an older checkpoint they go into a folder of this save, so that nothing is changed.
    """
    below = "attachments" if fresh else f"attachments/{save}"
    records = [(f"{below}/{name}", len(data), blocks.digest(data)) for name, data in attachments.items()]
    return records, [(f"{below}/{name}", data) for name, data in attachments.items()]
