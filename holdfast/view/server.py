"""Serves the page of a checkpoint to a browser on this machine, with statistics computed on request.

It listens on loopback alone, and answers only requests with the token of its address. It never serves files.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.errors import HoldfastError
from holdfast.events import log
from holdfast.view.page import as_json

Answer = Callable[[str], object]
"""From the ``name`` in a request to what can be written as JSON. Raises KeyError if there is no such thing."""

_OURS = ("127.0.0.1", "localhost", "[::1]")
"""Hosts that a browser may name. A request for any other name is an attack by DNS rebinding."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

PATIENCE = 30
"""Seconds that a client may take to send its request, and to take each `PIECE` of the answer."""

PIECE = 1 << 16
"""Bytes of an answer that are sent at once."""

MOST = 64
"""Connections at a time; a browser makes six. Further ones are closed."""


class Served(ThreadingHTTPServer):
    """The server, before and while it runs. ``url`` is what to open; it holds the token."""

    daemon_threads = True
    request_queue_size = MOST  # or connections that come at once wait a second and more to be tried again

    def __init__(self, page: Callable[[], str], routes: dict[str, Answer], *, port: int = 0) -> None:
        """``page``: makes the document, once. ``routes``: words below the page, and who answers. 0 is any free port.

        Raises OSError if the port is taken.
        """
        self.page, self.routes = page(), routes
        self.token = secrets.token_urlsafe(24)
        self.one_at_a_time = threading.Lock()  # an answer may take a tensor's memory, and browsers ask for several
        self._room = threading.BoundedSemaphore(MOST)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be begun: else it gives its room back, even if Ctrl-C arrives here
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """All requests of one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours."""
        log.debug("a request was not answered", exc_info=True)


@contextmanager
def running(served: Served) -> Iterator[str]:
    """Serve in a thread for as long as the block lasts; its address."""
    thread = threading.Thread(target=served.serve_forever, args=(0.1,), name="holdfast-view", daemon=True)
    thread.start()
    try:
        yield served.url
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Served
    server_version, sys_version = "holdfast", ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._json(400, {"error": str(error)})
            return
        token, _, route = url.path.removeprefix("/").partition("/")
        if not self._is_for_us():
            self._json(403, {"error": "this server answers to 127.0.0.1 and localhost alone"})
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._json(404, {"error": "open the address that holdfast view printed, with all of its letters"})
        elif not route:
            self._send(200, "text/html; charset=utf-8", self.server.page.encode())
        elif route in self.server.routes:
            self._ask(self.server.routes[route], parse_qs(url.query).get("name", [""])[0])
        else:
            self._json(404, {"error": f"there is no {route[:80]!r} here"})

    def _is_for_us(self) -> bool:
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return name.lower() in _OURS and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")

    def _ask(self, answer: Answer, name: str) -> None:
        try:
            with self.server.one_at_a_time:
                result = answer(name)
        except KeyError as error:
            self._json(404, {"error": str(error.args[0]) if error.args else name})
        except (HoldfastError, OSError, MemoryError) as error:
            self._json(500, {"error": str(error) or type(error).__name__})
        except Exception as error:  # noqa: BLE001 - a fault of holdfast: the page shows it, and others are served
            log.warning("%r was not answered", name, exc_info=True)
            self._json(500, {"error": f"a fault of holdfast: {type(error).__name__}: {error}"})
        else:
            self._json(200, result)

    def _json(self, status: int, answer: object) -> None:
        self._send(status, "application/json", as_json(answer).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(data), PIECE):  # the patience of a socket is for all that it is given at once
            self.wfile.write(data[at : at + PIECE])

    def _refuse(self) -> None:
        self.close_connection = True
        self._json(405, {"error": "this server is only looked at: GET"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _refuse

    def log_message(self, format: str, *args: Any) -> None:
        # The address in it would be the token.
        return
