"""What the two hosts of the tests' hub answer. `tests.servers.hub` serves with it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.servers.hub import LARGE, TOKEN, Asked, Host, Hub, Repository

_REPOSITORY = re.compile(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)/(\w+)/(.*)")
_RESOLVE = re.compile(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)")
_CACHED = re.compile(r"/api/resolve-cache/(models|datasets|spaces)/([^/]+/[^/]+)/([^/]+)/(.*)")


class Refused(Exception):
    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text


class _Answers(BaseHTTPRequestHandler):
    server: Host
    protocol_version = "HTTP/1.1"
    host = ""

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, *_: Any) -> None:
        pass

    def _noted(self) -> tuple[str, dict[str, str]]:
        range_, token = self.headers.get("Range", ""), self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(self.host, self.command, self.path, range_, token))
        parts = urlsplit(self.path)
        return parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, answer: Any, status: int = 200, **headers: str) -> None:
        self._answer(json.dumps(answer).encode(), status, Content_Type="application/json", **headers)

    def _send(self, data: bytes) -> None:
        """A file, or the range of it that was asked for."""
        range_ = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not range_ or not self.hub.has_ranges:
            self._cut_or_sent(data, 200)
            return
        first, last = int(range_[1]), min(int(range_[2]), len(data) - 1)
        if first >= len(data):
            self._answer(b"", 416, Content_Range=f"bytes */{len(data)}")
        else:
            told = f"bytes {first}-{last}/{len(data)}"
            self._cut_or_sent(data[first : last + 1], 206, Content_Range=told)

    def _cut_or_sent(self, data: bytes, status: int, **headers: str) -> None:
        if self.host == "hub" or not self.hub.cuts:
            self._answer(data, status, **headers)
            return
        at = self.hub.cuts.pop(0)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data[:at])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class Second(_Answers):
    """Where large files lie."""

    host = "second"

    def do_GET(self) -> None:
        path, query = self._noted()
        if query.get("age") != str(self.hub.age) or query.get("signature") != "s3cret":
            self._answer(b"<Error><Code>AccessDenied</Code></Error>", 403)
            return
        self._send(self.hub.blobs[path.rpartition("/")[2]])

    def do_PUT(self) -> None:
        path, _ = self._noted()
        self.hub.blobs[path.rpartition("/")[2]] = self._body()
        self._answer()


class Front(_Answers):
    """The hub itself."""

    host = "hub"

    def do_GET(self) -> None:
        self._told(lambda path, query, body: self._got(path, query))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._told(self._posted)

    def _told(self, answer: Any) -> None:
        path, query = self._noted()
        body = self._body()
        if self.hub.faults:
            status, headers = self.hub.faults.pop(0)
            self._answer(b"", status, **headers)
            return
        try:
            answer(path, query, body)
        except Refused as refused:
            self._json({"error": refused.text}, refused.status, X_Error_Code=refused.code, X_Error_Message=refused.text)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repository(self, kind: str, name: str) -> Repository:
        found = self.hub.repositories.get(f"{kind}/{name}")
        if self._token not in ("", TOKEN, *self.hub.accepted):
            raise Refused(401, "", "Invalid credentials in Authorization header")
        if found is None or (found.private and self._token != TOKEN):
            raise Refused(404 if self._token else 401, "RepoNotFound", "Repository not found")
        return found

    def _tree(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        number = repository.branches.get(unquote(revision), unquote(revision))
        if number not in repository.trees:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
        return number, repository.trees[number]

    def _got(self, path: str, query: dict[str, str]) -> None:
        if path.endswith("/auth-check/write"):
            if self._token in self.hub.accepted:
                raise Refused(403, "", "this token may only read")
            self._json({})
            return
        if match := _REPOSITORY.fullmatch(path):
            repository = self._repository(match[1], match[2])
            if match[3] == "revision":
                number, _ = self._tree(repository, match[4])
                self._json({"sha": number, "lastModified": "2026-01-02T03:04:05.000Z", "id": repository.name})
                return
            if match[3] == "tree":
                revision, _, folder = match[4].partition("/")
                self._list(self._tree(repository, revision)[1], unquote(folder), query)
                return
        for pattern in (_CACHED, _RESOLVE):
            if match := pattern.fullmatch(path):
                self._resolve(match[1] or "models", match[2], match[3], unquote(match[4]), cached=pattern is _CACHED)
                return
        raise Refused(404, "", f"this hub knows nothing of {self.command} {path}")

    def _list(self, tree: dict[str, bytes], folder: str, query: dict[str, str]) -> None:
        above = f"{folder}/" if folder else ""
        below = {path: data for path, data in tree.items() if path.startswith(above)}
        if folder in tree:
            raise Refused(400, "", f"{folder} is not a directory")
        if folder and not below:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        rows: list[dict[str, Any]] = []
        folders = {path[: len(above) + at] for path in below if (at := path[len(above) :].find("/")) > 0}
        if query.get("recursive", "").lower() in ("true", "1"):
            folders = {path[: at.start()] for path in below for at in re.finditer("/", path) if at.start() > len(above)}
        else:
            below = {path: data for path, data in below.items() if "/" not in path[len(above) :]}
        rows += [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]
        rows += [_row(path, data) for path, data in below.items()]
        rows.sort(key=lambda row: str(row["path"]))
        begin, more = int(query.get("cursor", 0)), {}
        if begin + self.hub.page < len(rows):
            here = self.path.partition("&cursor")[0]
            more["Link"] = f'<{self.hub.url}{here}&cursor={begin + self.hub.page}>; rel="next"'
        self._json(rows[begin : begin + self.hub.page], **more)

    def _resolve(self, kind: str, name: str, revision: str, path: str, *, cached: bool) -> None:
        repository = self._repository(kind, name)
        if repository.gated and self._token not in self.hub.accepted:
            raise Refused(403 if self._token else 401, "GatedRepo", f"Access to {kind} {name} is restricted")
        number, tree = self._tree(repository, revision)
        if path not in tree:
            raise Refused(404, "EntryNotFound", f"{path} does not exist")
        if path.endswith(LARGE):
            oid = hashlib.sha256(tree[path]).hexdigest()
            self.hub.blobs[oid] = tree[path]
            target = f"{self.hub.second}/{oid}?signature=s3cret&age={self.hub.age}"
            self._answer(b"", 302, Location=target)
        elif not cached:
            self._answer(b"", 307, Location=f"/api/resolve-cache/{kind}/{name}/{number}/{quote(path)}")
        else:
            self._send(tree[path])

    def _posted(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._upload_of(one) for one in json.loads(body)["objects"]]
            self._json({"transfer": "basic", "objects": objects})
            return
        if self._token != TOKEN:
            raise Refused(401, "", "Invalid username or password.")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := _REPOSITORY.fullmatch(path):
            repository = self.hub.repositories[f"{match[1]}/{match[2]}"]
            if match[3] == "preupload":
                files = [self._mode_of(file) for file in json.loads(body)["files"]]
                self._json({"files": files})
            elif match[3] == "branch":
                repository.branches[unquote(match[4])] = repository.branches["main"]
                self._json({})
            elif match[3] == "commit":
                self._commit(repository, unquote(match[4]), [json.loads(line) for line in body.splitlines()])
        else:
            raise Refused(404, "", f"this hub knows nothing of POST {path}")

    def _create(self, asked: dict[str, Any]) -> None:
        kind = f"{asked.get('type', 'model')}s"
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        if name.startswith("forbidden/"):
            raise Refused(403, "", 'You don\'t have the rights to create a model under the namespace "forbidden".')
        if f"{kind}/{name}" in self.hub.repositories:
            self._json({"error": "You already created this repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.make(name, kind=kind, private=private)
        self._json({"url": f"{self.hub.url}/{name}"})

    def _mode_of(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(LARGE) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _upload_of(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.hub.blobs:
            return {"oid": one["oid"], "size": one["size"]}
        href = {"href": f"{self.hub.second}/{one['oid']}", "header": {}}
        return {"oid": one["oid"], "size": one["size"], "actions": {"upload": href}}

    def _commit(self, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.branches.get(branch)):
            raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
        files: dict[str, bytes | None] = {}
        for line in lines:
            value = cast("dict[str, Any]", line["value"])
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files[value["path"]] = None
        number = repository.push(files, branch, header["summary"])
        self._json({"commitUrl": f"{self.hub.url}/{repository.name}/commit/{number}", "commitOid": number})


def _row(path: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if path.endswith(LARGE):
        row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return row
