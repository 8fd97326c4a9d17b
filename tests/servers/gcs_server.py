"""A small Google Cloud Storage in memory: the part of its XML API that object_store, and so obstore, uses.

Run by `tests.servers.gcs`: `python gcs_server.py PORT TOKEN [ignore-conditions]`. Proves that requests are put together
as they should be, never how the real one behaves under load or when things go wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

SMALLEST_PART = 5 << 20
XML = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass(frozen=True)
class Stored:
    """An object as it was put."""

    body: bytes
    generation: int
    at: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body).hexdigest()}"'


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class Storage:
    """Buckets, objects and unfinished uploads; its callers hold the lock."""

    def __init__(self, *, ignores_conditions: bool) -> None:
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self._ignores_conditions = ignores_conditions
        self._generations = itertools.count(1)

    def bucket(self, name: str) -> dict[str, Stored]:
        if name not in self.buckets:
            raise Refused(404, "NoSuchBucket")
        return self.buckets[name]

    def get(self, bucket: str, key: str) -> Stored:
        stored = self.bucket(bucket).get(key)
        if stored is None:
            raise Refused(404, "NoSuchKey")
        return stored

    def put(self, bucket: str, key: str, body: bytes, generation: str | None) -> Stored:
        """``generation`` is that of x-goog-if-generation-match; 0: only if there is none."""
        old = self.bucket(bucket).get(key)
        if (
            generation is not None
            and not self._ignores_conditions
            and int(generation) != (old.generation if old else 0)
        ):
            raise Refused(412, "PreconditionFailed")
        self.bucket(bucket)[key] = stored = Stored(body, next(self._generations))
        return stored

    def parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise Refused(404, "NoSuchUpload")
        return self.uploads[upload]

    def join(self, upload: str, told: list[tuple[int, str]]) -> bytes:
        """The parts that the client tells, which have to be those that came."""
        parts = self.parts(upload)
        for number, etag in told:
            if number not in parts or f'"{hashlib.md5(parts[number]).hexdigest()}"' != etag:
                raise Refused(400, "InvalidPart")
        if any(len(parts[number]) < SMALLEST_PART for number, _ in told[:-1]):
            raise Refused(400, "EntityTooSmall")
        return b"".join(parts[number] for number, _ in told)

    def page(self, bucket: str, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], str]:
        """Keys and common prefixes (which end in the delimiter) behind ``after``, and where the next page goes on."""
        page: list[str] = []
        for key in sorted(self.bucket(bucket)):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + len(delimiter)]
            if not key.startswith(prefix) or name <= after or (page and page[-1] == name):
                continue
            if len(page) == most:
                return page, page[-1]
            page.append(name)
        return page, ""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    storage: Storage
    token: str

    def log_message(self, *_: object) -> None: ...

    def do(self) -> None:
        path, _, query = self.path.partition("?")
        self.query = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        bucket, _, key = path[1:].partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "AuthenticationRequired")
            with self.storage.lock:
                status, headers, body = self.answer(unquote(bucket), unquote(key))
        except Refused as refused:
            xml = f"{XML}<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>"
            status, headers, body = refused.status, {"Content-Type": "application/xml"}, xml.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def answer(self, bucket: str, key: str) -> tuple[int, dict[str, str], bytes]:
        query, storage = self.query, self.storage
        if not key:
            if self.command == "PUT":
                storage.buckets.setdefault(bucket, {})
                return 200, {}, b""
            return self.list(bucket)
        if self.command in ("GET", "HEAD"):
            return self.get(storage.get(bucket, key))
        if self.command == "DELETE":
            if "uploadId" in query:
                storage.parts(query["uploadId"])
                del storage.uploads[query["uploadId"]]
            else:
                storage.get(bucket, key)
                del storage.bucket(bucket)[key]
            return 204, {}, b""
        if self.command == "POST":
            return self.upload(bucket, key)
        if "uploadId" in query:
            storage.parts(query["uploadId"])[int(query["partNumber"])] = self.body
            return 200, self.named(Stored(self.body, 0)), b""
        body = self.body
        if source := self.headers.get("x-goog-copy-source"):
            body = storage.get(*unquote(source).lstrip("/").split("/", 1)).body
        return 200, self.named(storage.put(bucket, key, body, self.headers.get("x-goog-if-generation-match"))), b""

    def named(self, stored: Stored) -> dict[str, str]:
        return {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.at, usegmt=True),
            "x-goog-generation": str(stored.generation),
        }

    def get(self, stored: Stored) -> tuple[int, dict[str, str], bytes]:
        headers = {**self.named(stored), "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        size = len(stored.body)
        asked = self.headers.get("Range", "")
        if not asked:
            return 200, headers, stored.body
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            raise Refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, headers, stored.body[start:stop]

    def upload(self, bucket: str, key: str) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in self.query:
            self.storage.bucket(bucket)
            upload = uuid.uuid4().hex
            self.storage.uploads[upload] = {}
            result = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, {"Content-Type": "application/xml"}, f"{XML}{result}".encode()
        upload = self.query["uploadId"]
        parts = ElementTree.fromstring(self.body).iter("Part")
        told = [(int(part.findtext("PartNumber", "0")), part.findtext("ETag", "")) for part in parts]
        condition = self.headers.get("x-goog-if-generation-match")
        stored = self.storage.put(bucket, key, self.storage.join(upload, told), condition)
        del self.storage.uploads[upload]
        result = f"<CompleteMultipartUploadResult><ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
        return 200, {**self.named(stored), "Content-Type": "application/xml"}, f"{XML}{result}".encode()

    def list(self, bucket: str) -> tuple[int, dict[str, str], bytes]:
        query = self.query
        delimiter = query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(1000, int(query.get("max-keys", "1000")))
        page, following = self.storage.page(bucket, query.get("prefix", ""), delimiter, after, most)
        lines = [XML, "<ListBucketResult>", f"<IsTruncated>{str(bool(following)).lower()}</IsTruncated>"]
        if following:
            lines.append(f"<NextContinuationToken>{escape(following)}</NextContinuationToken>")
        for name in page:
            stored = self.storage.bucket(bucket).get(name)
            if stored is None or (delimiter and name.endswith(delimiter)):
                lines.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.at))
            lines.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.body)}</Size>"
                f"<LastModified>{at}</LastModified><ETag>{escape(stored.etag)}</ETag></Contents>"
            )
        lines.append("</ListBucketResult>")
        return 200, {"Content-Type": "application/xml"}, "".join(lines).encode()


def main(port: int, token: str, *, ignores_conditions: bool) -> None:
    Handler.storage = Storage(ignores_conditions=ignores_conditions)
    Handler.token = token
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], ignores_conditions="ignore-conditions" in sys.argv[3:])
