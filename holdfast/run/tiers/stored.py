"""How a step of the fast tier stands in the store: its manifest there, and the files that it reuses from other steps.

The uploader asks for each step that it brings. Never writes anything.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from holdfast.commit.transfer import self_contained, sharing
from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk.manifest import Manifest
from holdfast.run.steps import Steps
from holdfast.run.whole import lacking_files
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.throttled import Throttled


def lender_of(step: int, record: Manifest, store: Steps, stored: Collection[int]) -> str:
    """The step of the store that is likely to have most of the files that ``step`` reuses; empty if it reuses none."""
    if not any(file.save for file in record.data_files):
        return ""
    others = [other for other in stored if other != step]
    nearest = min(others, key=lambda other: (other > step, abs(other - step)), default=None)
    return "" if nearest is None else store.path(nearest).name


def as_stored(name: str, record: Manifest, store: Place, lender: str) -> Manifest:
    """The manifest as the store will have it: what the ``lender`` has there already is reused, and not sent.

    Attachments are named with their save, as all other files are, so that no two collide.
    """
    below = f"attachments/{record.save}/"
    attachments = [
        (path if path.startswith(below) else below + path.removeprefix("attachments/"), nbytes, digest)
        for path, nbytes, digest in record.attachments
    ]
    into = msgspec.structs.replace(self_contained(record), attachments=attachments)
    if not lender:
        return into
    try:
        theirs = read_manifest(store / lender)
    except (NotACheckpoint, Damaged, Unsupported) as error:
        log.debug("nothing is reused from %s: %s", store / lender, error)
        return into
    return sharing(into, name, theirs, lender, lacking_files(store / lender, theirs))


def throttled(root: Place, bandwidth: float | None) -> StorePlace:
    """``root`` as a place that takes at most ``bandwidth`` bytes a second."""
    place = as_store(root)
    return place if bandwidth is None else StorePlace(Throttled(place.store, bandwidth), place.key)
