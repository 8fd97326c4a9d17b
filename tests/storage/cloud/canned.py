"""A server that answers every request with what it is told, as the clouds do when they refuse.

Called by tests of refusals and credentials. Never leaves this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Canned:
    """What is answered (may be changed at any time), and the headers of the requests so far."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.headers: Mapping[str, str] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.endpoint = ""
        # Of the answers; empty: now.
        self.date = ""


@contextmanager
def canned() -> Iterator[Canned]:
    told = Canned()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            told.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(told.status)
            for name, value in told.headers.items():
                self.send_header(name, value)
            body = b"" if self.command == "HEAD" else told.body
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def date_time_string(self, timestamp: int | None = None) -> str:
            return told.date or super().date_time_string(timestamp)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield told
        finally:
            server.shutdown()
