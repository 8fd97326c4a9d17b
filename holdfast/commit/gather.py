"""The first stage of a save: what one rank has, from its state and the files that it attaches.

`save`, the Saver and dcp call `gather` before they meet the other ranks. Never moves bytes of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.buffers.device import Moments, devices_of
from holdfast.buffers.stable import Watched, watch_all
from holdfast.commit.attachments import Attached, check_attachment, read_attachments, readable_attachments
from holdfast.commit.job import Job, Signing
from holdfast.plan.layout import Layout
from holdfast.state import Collected, Recall, collect
from holdfast.state.outline import layout_of


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
