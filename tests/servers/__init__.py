"""Object stores and web servers for tests and benchmarks: fetched once, started on 127.0.0.1, gone with this process.

Each module starts one kind (`tests.servers.moto.start()`), `tests.servers.fixtures` lends them to tests, and
`python -m tests.servers` runs one by hand. Never installs anything on the host.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.servers.unavailable import Unavailable

__all__ = ["Server", "Unavailable"]


def nothing_to_stop() -> None: ...


def no_buckets(name: str) -> None:
    raise NotImplementedError(f"this server has no buckets: {name}")


@dataclass(frozen=True)
class Server:
    """A running server, and what obstore needs to reach it.

    ``obstore.store.from_url(server.url(bucket), config=server.options, client_options=server.client_options)``
    """

    kind: str
    endpoint: str
    scheme: str
    options: Mapping[str, str] = field(default_factory=dict)
    client_options: Mapping[str, bool | str] = field(default_factory=dict)
    make_bucket: Callable[[str], None] = no_buckets
    end: Callable[[], None] = nothing_to_stop
    # What a web server serves; a store has none.
    folder: Path | None = None

    def bucket(self) -> str:
        """The name of a fresh bucket (container, or folder of a web server)."""
        name = f"holdfast-{uuid.uuid4().hex[:12]}"
        self.make_bucket(name)
        return name

    def url(self, bucket: str, path: str = "") -> str:
        """Where ``path`` in ``bucket`` is, in the words of its cloud: s3://…, gs://…, az://…, or http://…."""
        place = f"{self.endpoint}/{bucket}" if self.scheme == "http" else f"{self.scheme}://{bucket}"
        return f"{place}/{path}" if path else place

    def through(self, endpoint: str) -> Server:
        """The same server, reached through a proxy at ``endpoint``."""
        options = {name: value.replace(self.endpoint, endpoint) for name, value in self.options.items()}
        return replace(self, endpoint=endpoint, options=options)

    def stop(self) -> None:
        """End it; it also ends when this process does."""
        self.end()
