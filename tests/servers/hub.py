"""A hub on the loopback for tests: what holdfast reads of one, what huggingface_hub calls to push, and a second host.

`Hub` is the server; tests write what it serves with `push`. Large files lie on its second host, which must not see a
token, and to which it redirects with addresses that expire. Never leaves the loopback.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

LARGE = (".safetensors", ".bin", ".pt", ".distcp", ".pth")
TOKEN = "hf_mayReadAndWrite"


class Commit(NamedTuple):
    """What was changed: None where a file was deleted."""

    summary: str
    files: dict[str, bytes | None]


class Asked(NamedTuple):
    """A request; ``host`` is ``hub`` or ``second``."""

    host: str
    method: str
    path: str
    range: str
    token: str


@dataclass
class Repository:
    """Its commits, and what each branch and commit holds."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    commits: list[Commit] = field(default_factory=list)
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def push(self, files: dict[str, bytes | None], branch: str = "main", summary: str = "a push") -> str:
        """A commit; returns its number."""
        tree = {**self.trees.get(self.branches.get(branch, ""), {}), **files}
        number = hashlib.sha1(f"{self.kind}{self.name}{branch}{len(self.trees)}".encode()).hexdigest()
        self.trees[number] = {path: data for path, data in tree.items() if data is not None}
        self.branches[branch] = number
        self.commits.append(Commit(summary, files))
        return number

    @property
    def files(self) -> dict[str, bytes]:
        """What is on the main branch."""
        return self.trees[self.branches["main"]]


class Host(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler], hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error."""


class Hub:
    """Repositories by ``kind/owner/name``. The rest is what it does wrong, and what was asked."""

    def __init__(self) -> None:
        from tests.servers.hub_answers import Front, Second

        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.blobs: dict[str, bytes] = {}
        self.page = 1000
        self.has_ranges = True
        # Bytes after which the second host cuts its next answers.
        self.cuts: list[int] = []
        # Statuses of the next answers of the hub, with their headers, in the place of what was asked.
        self.faults: list[tuple[int, dict[str, str]]] = []
        # Addresses of an earlier age have expired.
        self.age = 0
        self.accepted: set[str] = set()
        self._front, self._second = Host(Front, self), Host(Second, self)
        self.url, self.second = self._front.url, self._second.url

    def make(self, name: str, files: dict[str, bytes] | None = None, kind: str = "models", **more: Any) -> Repository:
        made = self.repositories[f"{kind}/{name}"] = Repository(kind, name, **more)
        made.push({".gitattributes": b"*.safetensors filter=lfs\n"}, summary="initial commit")
        if files:
            made.push({**files})
        return made

    def at(self, name: str) -> Repository:
        return self.repositories[f"models/{name}"]

    def paths(self, pattern: str = "") -> list[str]:
        """What was asked since the last look, without queries."""
        asked, self.asked[:] = [one.path.partition("?")[0] for one in self.asked], []
        return [path for path in asked if re.search(pattern, path)]

    def environment(self) -> dict[str, str]:
        """For a process whose hub this is."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip

    def __enter__(self) -> Hub:
        for host in (self._front, self._second):
            threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self._front, self._second):
            host.shutdown()
            host.server_close()
