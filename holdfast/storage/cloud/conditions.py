"""Creates a file that must have one writer: by the store's own condition, or by claims where it ignores conditions.

`StorePlace` calls `create_once` for a manifest. Never trusts a store before it has seen it refuse.
"""

from __future__ import annotations

import errno
import threading
import time
import uuid
import weakref
from typing import Any

from holdfast.events import log
from holdfast.storage.store import Store
from holdfast.storage.wrappers.wrapper import nested

SETTLE = 2.0
"""Seconds between a claim and the look at the others, and between a file and the look whether it is still ours."""

STALE = 300.0
"""Seconds after which the claim of a writer that wrote nothing no longer counts: it is taken for dead."""

_honoured: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def create_once(store: Store, key: str, data: bytes, save_id: str) -> bool:
    """Write a small file if there is none of this key: False if another writer was first.

    ``save_id`` is a name (without ``/``) that no other writer has; ``data`` must differ from everybody else's too.
    """
    if honours_conditions(store, key.rpartition("/")[0]):
        return store.create(key, data)
    return create_by_claims(store, key, data, save_id)


def honours_conditions(store: Store, folder: str) -> bool:
    """Whether a second `create` of a key fails: tried in ``folder`` with a file of its own, once for each store."""
    # What is put around a store is new for each save; the store within is the same.
    *_, innermost = nested(store)
    with _lock:
        try:
            known = _honoured.get(innermost)
        except TypeError:  # a store that cannot be referred to weakly is tried each time
            return _probe(store, folder)
        if known is None:
            known = _honoured[innermost] = _probe(store, folder)
        return known


def _probe(store: Store, folder: str) -> bool:
    key = f"{folder}/.holdfast-probe-{uuid.uuid4().hex}".lstrip("/")
    try:
        if not store.create(key, b"the first"):
            text = f"{store.url}/{key} was just named at random and exists: the store answers at random"
            raise OSError(errno.EIO, text)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        _warn(store, "refuses conditions")
        return False
    try:
        honoured = not store.create(key, b"the second")
    finally:
        _tidy(store, key)
    if not honoured:
        _warn(store, "ignores conditions: two writers that create one file both succeed")
    return honoured


def _tidy(store: Store, key: str) -> None:
    try:
        store.delete([key])
    except OSError as error:
        log.warning("%s/%s could not be deleted and stays; it can be removed at any time: %s", store.url, key, error)


def _warn(store: Store, why: str) -> None:
    log.warning(
        "%s %s. Commits use claims instead: each writer puts a claim beside the manifest, and after %.0f s the oldest "
        "one wins. That holds as long as the store lists what was just written, and no writer is stopped for minutes "
        "between its claim and its manifest; else two that write one checkpoint may replace each other's manifest",
        store.url,
        why,
        SETTLE,
    )


def create_by_claims(store: Store, key: str, data: bytes, save_id: str) -> bool:
    """`create_once` for a store that ignores conditions: the writer of the oldest claim wins.

    A claim is a file ``<key>.claim.<save id>``; the store's clock says which is the oldest, and names decide between
    equals. Raises OSError if this writer was stopped so long that others took it for dead.
    """
    if store.size(key) is not None:
        return False
    prefix = f"{key}.claim."
    own = prefix + save_id
    began = time.monotonic()
    store.put(own, [save_id.encode()], len(save_id.encode()))
    try:
        time.sleep(SETTLE)
        if not _is_oldest(store, key, own, prefix):
            _await(store, key, 3 * SETTLE)
            return False
        if store.size(key) is not None:
            return False
        if time.monotonic() - began > STALE / 2:
            raise OSError(
                errno.ETIMEDOUT,
                f"{store.url}/{key} was not written: {time.monotonic() - began:.0f} s have passed since the claim of "
                "this writer, and others may have taken it for dead",
            )
        store.put(key, [data], len(data))
        time.sleep(SETTLE)
        return bytes(store.get(key).data) == data
    finally:
        # After the manifest: a writer that sees no claim then sees the manifest.
        _tidy(store, own)


def _await(store: Store, key: str, patience: float) -> None:
    """Wait until the file is there: then the writer that lost can say to whom."""
    until = time.monotonic() + patience
    while store.size(key) is None and time.monotonic() < until:
        time.sleep(patience / 20)


def _is_oldest(store: Store, key: str, own: str, prefix: str) -> bool:
    listed = store.list(key.rpartition("/")[0], deep=False).files
    claims = {entry.key: entry.modified for entry in listed if entry.key.startswith(prefix)}
    if own not in claims:
        raise OSError(errno.EIO, f"{store.url}/{own} was written and is not listed: this store cannot hold checkpoints")
    living = [claim for claim in claims if claims[claim] > claims[own] - STALE]
    return min(living, key=lambda claim: (claims[claim], claim)) == own
