"""A place in a store: whose credentials are used, its clock, and each verb that a save or a load needs.

A secret is never shown, only where it comes from.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.doctor.finding import Finding
from holdfast.storage.cloud.client import CLIENTS, clock_ahead
from holdfast.storage.cloud.conditions import honours_conditions
from holdfast.storage.cloud.credentials import credentials_for
from holdfast.storage.cloud.profiles import NoCredentials
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.wrapper import nested

DEADLINE = 30.0
SKEW = 60.0
"""Seconds; stores refuse what is signed some minutes away from their own time."""

_UNFETCHED = "no credentials could be fetched"
_WHO = "docs/stores.md says where credentials are looked for"
_PUBLIC = {"gs": "https://storage.googleapis.com", "s3": "https://s3.amazonaws.com"}


def findings(place: StorePlace, *, write: bool = True) -> Iterator[Finding]:
    """Check ``place``, and stop at the first failure."""
    spec = _spec_of(place)
    scheme, options = str(spec.get("scheme", "")), spec.get("options", {})
    endpoint = str(options.get("endpoint_url") or _PUBLIC.get(scheme, ""))
    patient = StorePlace(Deadline(place.store, DEADLINE), place.key)
    if scheme in ("http", "https"):
        tried = _verb("reading", patient.is_file)
    else:
        tried = _verb("listing", lambda: patient.store.list(patient.key, deep=False))
    who = _credentials_of_hub(place) if place.takes_pushes else _credentials(scheme, options)
    unfetched = who.verdict == "ok" and _UNFETCHED in tried.text  # their source is known, and gave none
    yield Finding(who.name, "fail", tried.text, _WHO, "storage") if unfetched else who
    if endpoint:
        yield _clock(endpoint)
    if unfetched:
        return
    yield tried
    if tried.verdict == "ok" and write and not place.no_saves:
        yield from _tried(patient)


def _spec_of(place: StorePlace) -> Mapping[str, Any]:
    *_, innermost = nested(place.store)
    spec = getattr(innermost, "spec", {})
    return spec if isinstance(spec, Mapping) else {}


def _credentials_of_hub(place: StorePlace) -> Finding:
    *_, hub = nested(place.store)
    text = f"from {hub.client.token_source}" if hub.client.token else "none are sent: enough for public repositories"
    return Finding("credentials", "ok", text)


def _credentials(scheme: str, options: Mapping[str, Any]) -> Finding:
    if scheme not in CLIENTS:
        return Finding("credentials", "ok", "none are sent")
    try:
        source = credentials_for(scheme, options).source
    except NoCredentials as error:
        return Finding("credentials", "fail", str(error), _WHO, "storage")
    return Finding("credentials", "ok", f"from {source}")


def _clock(endpoint: str) -> Finding:
    ahead = clock_ahead(endpoint)
    if ahead is None:
        text = f"{endpoint} sends no time, or cannot be reached"
        return Finding("clock", "warn", text, "check the endpoint, and this machine's network", "storage")
    if abs(ahead) > SKEW:
        text = f"this machine is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {endpoint}"
        return Finding("clock", "fail", text, "set this machine's clock (chronyc makestep, ntpd)", "storage")
    return Finding("clock", "ok", f"within {max(abs(ahead), 1):.0f} s of {endpoint}")


def _verb(name: str, do: Callable[[], object]) -> Finding:
    try:
        do()
    except OSError as error:
        # The error itself says what to do, behind a semicolon or a full stop.
        return Finding(name, "fail", str(error), "docs/stores.md lists the rights that are needed", "storage")
    return Finding(name, "ok", "works")


def _tried(place: StorePlace) -> Iterator[Finding]:
    store, key = place.store, (place / f".holdfast-doctor-{secrets.token_hex(8)}").key
    data = b"holdfast doctor was here; this can be deleted at any time\n"
    made = _verb("writing", lambda: store.put(key, [data], len(data)))
    yield made
    if made.verdict != "ok":
        return
    try:
        yield _verb("reading", lambda: _same(bytes(store.get(key).data), data))
        yield _condition(place)
    finally:
        deleted = _verb("deleting", lambda: store.delete([key]))
    yield deleted


def _same(read: bytes, written: bytes) -> None:
    if read != written:
        raise OSError("the store returns other bytes than were written")


def _condition(place: StorePlace) -> Finding:
    honoured: list[bool] = []
    tried = _verb("conditional writes", lambda: honoured.append(honours_conditions(place.store, place.key)))
    if tried.verdict == "ok" and not honoured[0]:
        text = "this store overwrites files that exist: commits use claims instead, which take some seconds"
        return Finding(
            "conditional writes", "warn", text, "let one run alone write to a folder; docs/stores.md", "storage"
        )
    return tried
