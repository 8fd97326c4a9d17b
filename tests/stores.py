"""Checkpoints in a bucket: the bucket behind a proxy and directly, small states, and what must be there afterwards.

Called by the tests of stores, by their ranks and by their subprocesses. Never looks into a store with the code that
is tested, but for reading a checkpoint back directly, past the proxy.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import holdfast
from holdfast.storage.store_place import StorePlace
from tests.servers import Server
from tests.servers.faults import Proxy
from tests.servers.fixtures import lend
from tests.servers.passing import Exchange
from tests.storage.cloud.clouds import options_of

PATIENT = {"read_timeout": 120.0, "write_timeout": 120.0, "connect_timeout": 120.0, "retry_timeout": 240.0}
"""Options with which nothing is asked again because the machine is busy."""

IMPATIENT = {"read_timeout": 1.0, "write_timeout": 2.0, "connect_timeout": 2.0, "retry_timeout": 10.0}
"""Options with which what can fail does so in seconds."""

PART = 1 << 20
"""Bytes of a part, at a server that takes such small ones: a checkpoint of some parts is quickly made then."""


def small_parts() -> Iterator[Server]:
    """A moto that takes parts of uploads of any size, where others want 5 MiB."""
    from tests.servers.moto import start

    before = os.environ.get("S3_UPLOAD_PART_MIN_SIZE")
    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "1024"
    try:
        lent = lend(start)
        server = next(lent)
    finally:
        if before is None:
            del os.environ["S3_UPLOAD_PART_MIN_SIZE"]
        else:
            os.environ["S3_UPLOAD_PART_MIN_SIZE"] = before
    yield server
    yield from lent


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server, through a proxy (`at`) and past it (`direct`)."""

    server: Server
    name: str
    proxy: Proxy
    timeouts: Mapping[str, float]

    def options(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What reaches the bucket through the proxy."""
        return options_of(self.server.through(self.proxy.endpoint), {**self.timeouts, **(more or {})})

    def url(self, key: str) -> str:
        return f"{self.server.scheme}://{self.name}/{key}"

    def at(self, key: str, more: Mapping[str, Any] | None = None) -> StorePlace:
        return holdfast.storage.at(self.url(key), self.options(more))

    def direct(self, key: str) -> StorePlace:
        return holdfast.storage.at(self.url(key), options_of(self.server))

    def files(self, key: str = "") -> dict[str, int]:
        """What lies below a folder, by its path from there, with its bytes."""
        place = self.direct(key)
        skip = len(key) + 1 if key else 0
        return {entry.key[skip:]: entry.nbytes for entry in place.store.list(place.key, deep=True).files}

    def uploads(self) -> int:
        """Uploads in parts that nobody has ended."""
        from urllib.request import urlopen

        with urlopen(f"{self.server.endpoint}/{self.name}?uploads") as answer:
            return int(answer.read().count(b"<Upload>"))


@contextmanager
def bucket_of(server: Server, name: str | None = None, *, timeouts: Mapping[str, float] = PATIENT) -> Iterator[Bucket]:
    """A bucket (a fresh one) behind a proxy of its own, so that the client for it is new too."""
    with Proxy(server.endpoint) as proxy:
        yield Bucket(server, name or server.bucket(), proxy, timeouts)


def kinds(requests: list[Exchange]) -> Counter[str]:
    """Requests by what they are for."""
    return Counter(kind(request) for request in requests)


def kind(request: Exchange) -> str:
    """What a request is for: its verb, and which file of a checkpoint it is about."""
    name = request.path.rpartition("/")[2]
    verb = request.method.lower()
    if "list-type" in request.query:
        return "list"
    if "delete" in request.query.split("&") or "delete=" in request.query:
        return "delete"
    if "partNumber" in request.query:
        return "part"
    if "uploadId" in request.query:
        return "complete" if verb == "post" else "abort"
    if "uploads" in request.query:
        return "initiate"
    if ".holdfast-probe-" in name:
        return f"{verb} probe"
    if ".claim." in name:
        return f"{verb} claim"
    if name.endswith(".safetensors"):
        return f"{verb} data"
    if name == "manifest.json":
        return f"{verb} manifest"
    if "/parts/" in request.path:
        return f"{verb} note"
    if "/attachments/" in request.path:
        return f"{verb} attachment"
    return f"{verb} {name}"


def state_of(seed: int, *, rows: int = 256, width: int = 64) -> dict[str, Any]:
    """A state of two sections, ``rows * width * 4`` bytes in its largest tensor."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.rand(rows, width, generator=made)
    return {
        "model": {"w": weight, "odd": torch.arange(7, dtype=torch.int16) + seed, "none": torch.empty(0, 3)},
        "optim": {"m": weight.t() * 2, "lr": 0.1 * seed},
        "step": seed,
    }


def empty_like(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state before anything was loaded into it."""
    fresh: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            fresh[name] = empty_like(value)
        else:
            fresh[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()
    return fresh


def is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and set(one) == set(other) and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def is_whole(path: StorePlace, expected: Mapping[str, Any]) -> None:
    """Every byte of the checkpoint is proved, and its content is what was saved."""
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    assert is_same(checkpoint.state_dict(), expected)
    into = empty_like(expected)
    holdfast.load(path, into)
    assert is_same(into, expected)
