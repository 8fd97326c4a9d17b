"""A hub on the loopback for tests: as much of its API as huggingface_hub calls to create a repository and to push.

`Hub` is the server, and `main` a process with a Trainer that pushes to one: huggingface_hub reads its endpoint from the
environment once, when it is imported.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Commit(NamedTuple):
    """What was changed: None where a file was deleted."""

    summary: str
    files: dict[str, bytes | None]


class Hub(ThreadingHTTPServer):
    """Commits are kept in ``commits``, and the repositories' names in ``repositories``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.commits: list[Commit] = []
        self.repositories: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def files(self) -> dict[str, bytes]:
        """What is there now."""
        there = {path: data for commit in self.commits for path, data in commit.files.items()}
        return {path: data for path, data in there.items() if data is not None}

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if re.match(r"/api/models/[^/]+/[^/]+/tree/main", self.path):
            self._answer(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": "0"}
                    for path, data in self.server.files.items()
                ]
            )
        else:
            self._answer({"error": f"this hub knows nothing of {self.path}"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            name = f"somebody/{json.loads(body)['name']}"
            self.server.repositories.append(name)
            self._answer({"url": f"{self.server.url}/{name}"})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", self.path):
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self._answer({"files": files})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/commit/main", self.path):
            lines = [json.loads(line) for line in body.splitlines()]
            files: dict[str, bytes | None] = {}
            for line in lines:
                if line["key"] != "header":
                    gone = line["key"] == "deletedFile"
                    files[line["value"]["path"]] = None if gone else base64.b64decode(line["value"]["content"])
            summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            self.server.commits.append(Commit(summary, files))
            number = f"{len(self.server.commits):040x}"
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            self._answer({"commitUrl": f"{self.server.url}/{name}/commit/{number}", "commitOid": number})
        else:
            self._answer({"error": f"this hub knows nothing of {self.path}"}, 404)

    def _answer(self, answer: Any, code: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(folder: str, attached: str, strategy: str) -> None:
    """Train six steps with three saves; says what is left in the output folder."""
    from holdfast.run.keep import Keep
    from holdfast.trainers.huggingface import HoldfastCallback
    from tests.trainers import hf_runs

    output = os.path.join(folder, "mine")
    trainer = hf_runs.trainer_of(
        output, push_to_hub=True, hub_token="hf_nobody", hub_strategy=strategy, hub_always_push=True,
        num_train_epochs=1, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    if attached == "holdfast":
        HoldfastCallback(os.path.join(folder, "steps"), keep=Keep(last=1), worker="thread").attach(trainer)
    trainer.train()
    print("left", *sorted(os.listdir(output)))


if __name__ == "__main__":
    main(*sys.argv[1:])
