"""The first stage of a save: what one rank has, from its state and the files that are attached to it.

`save`, the Saver and dcp call `gather` before they meet the other ranks. Never moves bytes of a tensor, and never lets
the name of an attachment leave the checkpoint's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast import events
from holdfast.buffers.device import Moments, devices_of
from holdfast.buffers.stable import Watched, watch_all
from holdfast.commit.job import Job, Signing
from holdfast.errors import StorageError, Unsupported
from holdfast.ondisk import blocks
from holdfast.plan.layout import Layout
from holdfast.state import Collected, Recall, collect
from holdfast.state.leaves import layout_of
from holdfast.storage.naming import naming


class Guard(Protocol):
    """Keeps training from changing tensors while a background save copies them."""

    def copied(self, moments: Moments) -> None:
        """Every tensor is copied, or queued to be copied until ``moments``. Raises HoldfastError if one has changed."""

    def landed(self) -> None:
        """All copies have arrived. Raises HoldfastError if a tensor has changed since they were queued."""


@dataclass(frozen=True)
class Gathered:
    """What one rank has, as of the ``moments`` of its devices.

    ``watched`` are the versions of all tensors, where the save relies on a state that does not change. ``signer`` is
    the first rank's, if the save is signed. ``guard`` belongs to a background save.
    """

    state: Collected
    layout: Layout
    moments: Moments
    attachments: Mapping[str, bytes]
    watched: Watched
    signer: Signing | None = None
    guard: Guard | None = None


def gather(job: Job, state: Mapping[str, Any], attachments: Attached, recall: Recall | None = None) -> Gathered:
    """Collect the state and read the attached files; ``recall`` remembers the walk of the last save."""
    with job.span("gather"):
        job.reached("gather")
        job.check()
        collected = collect(state, job.ranks, recall=recall)
        # What is copied is what the streams that train will have computed when they reach this moment.
        moments = Moments.now(devices_of(collected.tensors()))
        layout = layout_of(collected)
        signer = job.sign() if job.sign is not None and job.ranks.first else None
        for name in attachments:
            check_attachment(name)
        data: dict[str, bytes] = {}
        if job.ranks.first:
            data = read_attachments(attachments)
        elif job.degraded:
            data = readable_attachments(attachments)
        relies_on_stillness = not job.background and (job.degraded or sends_from_memory(job))
        watched = watch_all(collected) if relies_on_stillness else []
        return Gathered(collected, layout, moments, data, watched, signer)


def sends_from_memory(job: Job) -> bool:
    """Whether tensors in host memory are uploaded from where they lie."""
    return not job.background and job.folder is not None and job.folder.is_remote


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
