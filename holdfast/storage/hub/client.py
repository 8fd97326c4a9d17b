"""Requests to a hub and to the hosts that it sends readers to: kept connections, redirects, proxies, silence.

`hub.py` asks with it. Never sends the token to another host than the hub, and never shows it or the query of a URL.

We rejected obstore here: it shows no headers, where the next page of a listing stands, and follows the redirect of
each range anew, which hubs count and soon refuse.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from holdfast.ondisk.version import __version__
from holdfast.storage.hub.address import endpoint_of, token_of
from holdfast.storage.wrappers.retrying import transient

REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)

KEPT, IDLE = 32, 20.0
"""Connections to a host that are kept for the next request, and seconds after which the server may have closed one."""

_LEFT = 1 << 16
"""Bytes of an answer that are read to its end, to keep the connection; more, and it is closed."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Reply:
    """An answer whose body is still to be read; ``url`` is where it came from in the end."""

    def __init__(self, client: Client, url: str, connection: HTTPConnection, response: HTTPResponse) -> None:
        self.url, self.status, self.headers = url, response.status, response.headers
        self._client, self._connection, self._response = client, connection, response

    def readinto(self, view: memoryview) -> int:
        """Fill some of ``view``; 0 at the end of the body, or where it was cut. Raises OSError."""
        try:
            return self._response.readinto(view)
        except (HTTPException, OSError) as error:
            raise self._client.lost(error, self.url) from None

    def read(self, most: int) -> bytes:
        """Up to so many bytes of the body. Raises OSError."""
        try:
            return self._response.read(most)
        except (HTTPException, OSError) as error:
            raise self._client.lost(error, self.url) from None

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        response = self._response
        try:
            if not response.isclosed() and response.length is not None and response.length < _LEFT:
                response.read()
        except (HTTPException, OSError):
            response.close()
        if response.isclosed() and not response.will_close and not response.length:
            self._client.keep(origin_of(self.url), self._connection)
        else:
            self._connection.close()


class Client:
    """One hub with one token. ``connect_timeout`` and ``read_timeout`` as in docs/stores.md."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.endpoint = endpoint_of(options)
        self.token, self.token_source = token_of(options)
        self._origin = origin_of(self.endpoint)
        self._patience = float(options.get("connect_timeout", 5.0)), float(options.get("read_timeout", 20.0))
        self._tls_options = options.get("ca_file"), options.get("verify_tls", True)
        self._tls: ssl.SSLContext | None = None
        self.forget_connections()

    def forget_connections(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[tuple[float, HTTPConnection]]] = {}

    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Reply:
        """The answer, of whatever status, of where redirects lead. Raises OSError where there is none."""
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
            raise OSError(errno.ENETDOWN, "HF_HUB_OFFLINE is set, so nothing is asked of the hub: unset it")
        for _ in range(REDIRECTS):
            reply = self._ask(url, headers or {})
            target = reply.headers.get("Location")
            if reply.status not in _MOVED or not target:
                return reply
            with reply:
                url = _redirected(url, target)
        raise OSError(errno.ELOOP, f"{shown(url)} redirects again and again")

    def _ask(self, url: str, headers: Mapping[str, str]) -> Reply:
        parts, origin = urlsplit(url), origin_of(url)
        sent = {"User-Agent": f"holdfast/{__version__}", "Accept-Encoding": "identity", **headers}
        if self.token and origin == self._origin:
            sent["Authorization"] = f"Bearer {self.token}"
        while True:
            connection, is_new = self._kept(origin), False
            try:
                if connection is None:
                    connection, is_new = self._connected(parts, origin), True
                connection.request("GET", _target(connection, parts), headers=sent)
                return Reply(self, url, connection, connection.getresponse())
            except (HTTPException, OSError) as error:
                if connection is not None:
                    connection.close()
                if is_new or connection is None or isinstance(error, TimeoutError):
                    raise self.lost(error, url) from None
                # A kept connection may have been closed by the server meanwhile.

    def _kept(self, origin: Origin) -> HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(origin, [])
            while idle:
                since, connection = idle.pop()
                if time.monotonic() - since < IDLE:
                    return connection
                connection.close()
        return None

    def keep(self, origin: Origin, connection: HTTPConnection) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            idle = self._idle.setdefault(origin, [])
            if len(idle) < KEPT:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _connected(self, parts: SplitResult, origin: Origin) -> HTTPConnection:
        connect, silence = self._patience
        proxy = None if urllib.request.proxy_bypass(origin.host) else urllib.request.getproxies().get(origin.scheme)
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
        host, port = (via.hostname or "", via.port or 80) if via else (origin.host, origin.port)
        if origin.scheme == "https":
            connection: HTTPConnection = HTTPSConnection(host, port, timeout=connect, context=self._context())
        else:
            connection = HTTPConnection(host, port, timeout=connect)
        if via is not None and origin.scheme == "https":
            connection.set_tunnel(origin.host, origin.port, _proxy_headers(via))
        connection.connect()
        connection.sock.settimeout(silence)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            file, checks = self._tls_options
            try:
                self._tls = ssl.create_default_context()
                if file:
                    self._tls.load_verify_locations(os.path.expanduser(file))
            except OSError as error:
                raise ValueError(f"ca_file {file} cannot be read: {error.strerror or error}") from None
            if not checks:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        return self._tls

    def lost(self, error: Exception, url: str) -> OSError:
        """The OSError that says what became of the connection, without a secret."""
        host = "{0.scheme}://{0.host}:{0.port}".format(origin_of(url))
        if isinstance(error, socket.gaierror):
            text = f"{host} was not found. Check HF_ENDPOINT (or endpoint_url), the network and its proxy"
            return transient(OSError(errno.EHOSTUNREACH, text))
        if isinstance(error, ssl.SSLCertVerificationError):
            text = f"the TLS certificate of {host} is not trusted: {error.verify_message}. Give its authority in the"
            return OSError(errno.EPROTO, f"{text} option ca_file")
        if isinstance(error, TimeoutError):
            text = f"{host} is silent. If it is slow and not stuck, raise the option read_timeout"
            return transient(OSError(errno.ETIMEDOUT, text))
        if isinstance(error, ConnectionRefusedError):
            text = f"nobody listens at {host}. Check HF_ENDPOINT (or endpoint_url), the network and its proxy"
            return transient(OSError(errno.ECONNREFUSED, text))
        return transient(OSError(errno.ECONNRESET, f"the connection to {host} failed: {type(error).__name__}"))


def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    return Origin(parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def shown(url: str) -> str:
    """A URL without its query and its user: there are signatures and passwords."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _redirected(url: str, target: str) -> str:
    """Where a redirect leads. Raises OSError for an address that is none, and for one without TLS that ``url`` has."""
    try:
        target = quote(urljoin(url, target), safe="%/:=&?~#+!$,;'@()*[]")
        there = origin_of(target)
    except ValueError:
        raise OSError(errno.EPROTO, f"{shown(url)} redirects to what is no address") from None
    if there.scheme not in ("https", origin_of(url).scheme):
        raise OSError(errno.EPROTO, f"{shown(url)} redirects to {shown(target)}, without TLS; nothing is read")
    return target


def _target(connection: HTTPConnection, parts: SplitResult) -> str:
    """What is asked of the server; a proxy for plain http is given the whole URL."""
    path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    is_proxy = parts.scheme == "http" and (connection.host, connection.port) != (parts.hostname, parts.port or 80)
    return f"http://{parts.netloc}{path}" if is_proxy else path


def _proxy_headers(via: SplitResult) -> dict[str, str]:
    if via.username is None:
        return {}
    user = f"{unquote(via.username)}:{unquote(via.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}


_clients: dict[tuple[object, ...], Client] = {}
_lock = threading.Lock()
_OPTIONS = ("ca_file", "connect_timeout", "read_timeout", "verify_tls")


def client_of(options: Mapping[str, Any]) -> Client:
    """The client for a hub, which all places with the same token share. Raises ValueError."""
    key = (endpoint_of(options), *token_of(options), *(options.get(name) for name in _OPTIONS))
    with _lock:
        if key not in _clients:
            _clients[key] = Client(options)
        return _clients[key]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for client in _clients.values():  # two processes cannot talk on one connection
        client.forget_connections()


os.register_at_fork(after_in_child=_after_fork)
