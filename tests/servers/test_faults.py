"""The proxy before a plain web server: what passes, what is counted, and that each fault is what its name says."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.servers.faults import Fault, Proxy
from tests.servers.faults_process import ProxyProcess

pytestmark = pytest.mark.slow  # the tests' own servers: `make test-all`

BLOB = bytes(range(256)) * 8192  # 2 MiB
ROOT = Path(__file__).parents[2]
# What a reset looks like from a client that may still be sending.
RESET = (ConnectionResetError, BrokenPipeError)


class Shelf(BaseHTTPRequestHandler):
    """Keeps what is put; /chunked/… is answered in chunks, /close/… without a length."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, bytes]
    seen: list[tuple[str, str, dict[str, str], bytes]]

    def log_message(self, *_: object) -> None: ...

    def _note(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        return body

    def do_PUT(self) -> None:
        body = self._note()
        if len(body) < int(self.headers.get("Content-Length", 0)):
            return
        if self.headers.get("If-None-Match") == "*" and self.path in self.kept:
            self.send_response(412)
        else:
            self.kept[self.path] = body
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self._note()
        path = self.path.split("?")[0]
        body = self.kept.get(path.removeprefix("/chunked").removeprefix("/close"), b"")
        self.send_response(200)
        if path.startswith("/chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), 100_000):
                piece = body[start : start + 100_000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        elif path.startswith("/close"):
            self.close_connection = True
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def shelf() -> Iterator[tuple[str, type[Shelf]]]:
    class Fresh(Shelf):
        kept = {"/blob": BLOB}
        seen = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    server.daemon_threads = True
    # Connections that are reset are what these tests are about: not told.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Fresh
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(shelf: tuple[str, type[Shelf]]) -> Iterator[Proxy]:
    with Proxy(shelf[0]) as proxy:
        yield proxy


def connect(proxy: Proxy | ProxyProcess, timeout: float = 20.0) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=timeout)


def ask(proxy: Proxy | ProxyProcess, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = connect(proxy)
    try:
        connection.request(method, path, body or None, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/blob", "/chunked/blob", "/close/blob"])
def test_bodies_of_all_three_lengths_pass(proxy: Proxy, path: str) -> None:
    assert ask(proxy, "GET", path) == (200, BLOB)
    assert [(e.path, e.down, e.status, e.fault) for e in proxy.requests()] == [(path, len(BLOB), 200, "")]


def test_uploads_pass_with_a_length_and_in_chunks(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    assert ask(proxy, "PUT", "/whole", BLOB)[0] == 200
    connection = connect(proxy)
    connection.request("PUT", "/chunks", iter([BLOB[:1], BLOB[1:77777], BLOB[77777:]]), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    assert shelf[1].kept["/whole"] == shelf[1].kept["/chunks"] == BLOB
    assert [e.up for e in proxy.requests()] == [len(BLOB)] * 2


def test_one_connection_carries_many_requests_and_all_is_counted(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    connection = connect(proxy)
    connection.connect()
    local = connection.sock.getsockname()
    for number in range(5):
        connection.request("PUT", f"/n/{number}?part={number}&x=%2F", b"x" * number)
        connection.getresponse().read()
    connection.request("HEAD", "/blob", headers={"Range": "bytes=1-2"})
    answer = connection.getresponse()
    assert (answer.headers["Content-Length"], answer.read()) == (str(len(BLOB)), b"")
    connection.request("GET", "/blob")
    assert connection.getresponse().read() == BLOB
    assert connection.sock.getsockname() == local
    connection.close()
    seen = [(e.method, e.path, e.query, e.range, e.up, e.down) for e in proxy.requests()]
    assert seen[:5] == [("PUT", f"/n/{n}", f"part={n}&x=%2F", "", n, 0) for n in range(5)]
    assert seen[5:] == [("HEAD", "/blob", "", "bytes=1-2", 0, 0), ("GET", "/blob", "", "", 0, len(BLOB))]
    # The name that the client used, and signed, is the one that the server sees.
    assert shelf[1].seen[0][2]["host"] == proxy.endpoint.removeprefix("http://")
    proxy.clear()
    assert proxy.requests() == []


def test_expect_continue_is_waited_for(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    connection = connect(proxy)
    connection.putrequest("PUT", "/later")
    connection.putheader("Content-Length", "4")
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    assert connection.sock.recv(1000).startswith(b"HTTP/1.1 100 ")
    connection.sock.sendall(b"body")
    assert connection.getresponse().status == 200
    connection.close()
    assert shelf[1].kept["/later"] == b"body"


def test_reset_comes_before_the_server_hears_of_it(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    proxy.add(Fault("reset", method="PUT"))
    with pytest.raises(RESET):
        ask(proxy, "PUT", "/a", b"a")
    assert shelf[1].seen == []
    assert [(e.fault, e.status) for e in proxy.requests()] == [("reset", 0)]
    assert ask(proxy, "PUT", "/a", b"a")[0] == 200


def test_reset_after_loses_the_answer_but_not_the_deed(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    proxy.add(Fault("reset_after", path="^/a$"))
    with pytest.raises(ConnectionResetError):
        ask(proxy, "PUT", "/a", BLOB)
    assert shelf[1].kept["/a"] == BLOB


def test_reset_upload_cuts_the_body_for_both(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    proxy.add(Fault("reset_upload", at=1000))
    with pytest.raises(RESET):
        ask(proxy, "PUT", "/a", BLOB)
    assert "/a" not in shelf[1].kept
    assert proxy.requests()[0].up == 1000


@pytest.mark.parametrize("path", ["/blob", "/chunked/blob"])
@pytest.mark.parametrize("kind", ["reset_body", "truncate"])
def test_a_body_that_ends_early(proxy: Proxy, kind: str, path: str) -> None:
    proxy.add(Fault(kind))  # type: ignore[arg-type]
    connection = connect(proxy)
    connection.request("GET", path)
    answer = connection.getresponse()
    with pytest.raises(ConnectionResetError if kind == "reset_body" else http.client.IncompleteRead):
        answer.read()
    connection.close()
    (exchange,) = proxy.requests()
    assert exchange.fault == kind
    assert 0 < exchange.down < len(BLOB)
    assert path != "/blob" or exchange.down == len(BLOB) // 2
    assert ask(proxy, "GET", path) == (200, BLOB)


def test_stalls_hold_the_connection_until_the_client_goes(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    proxy.add(Fault("stall", path="never"), Fault("stall_body", path="blob", at=7))
    silent = connect(proxy, timeout=0.3)
    silent.request("PUT", "/never", b"x")
    with pytest.raises(TimeoutError):
        silent.getresponse()
    assert shelf[1].seen == []
    half = connect(proxy)
    half.request("GET", "/blob")
    answer = half.getresponse()
    assert answer.read(7) == BLOB[:7]
    half.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        answer.read(1)
    assert [(e.fault, e.ended) for e in proxy.requests()] == [("stall", 0.0), ("stall_body", 0.0)]
    answer.close()
    half.close()
    silent.close()
    wait_until(lambda: all(e.ended for e in proxy.requests()))


def test_a_slow_body_comes_whole_in_many_pieces(proxy: Proxy) -> None:
    ask(proxy, "PUT", "/small", b"0123456789")
    proxy.add(Fault("slow_body", rate=20))
    connection = connect(proxy)
    connection.request("GET", "/small")
    answer = connection.getresponse()
    pieces = list(iter(lambda: answer.read1(100), b""))
    connection.close()
    assert b"".join(pieces) == b"0123456789"
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("status", status=503), "SlowDown"),
        (Fault("status", status=500), "InternalError"),
        (Fault("status", status=429, retry_after=7), "TooManyRequests"),
        (Fault("status", status=403, code="ExpiredToken"), "ExpiredToken"),
        (Fault("status", status=409), "ConditionalRequestConflict"),
    ],
)
def test_a_status_is_answered_as_s3_would_and_the_connection_goes_on(
    proxy: Proxy, shelf: tuple[str, type[Shelf]], fault: Fault, code: str
) -> None:
    proxy.add(fault)
    connection = connect(proxy)
    connection.request("PUT", "/a", BLOB)
    answer = connection.getresponse()
    assert answer.status == fault.status
    assert answer.headers["Retry-After"] == (str(fault.retry_after) if fault.retry_after else None)
    assert f"<Code>{code}</Code>".encode() in answer.read()
    assert shelf[1].seen == []
    connection.request("PUT", "/a", BLOB)
    assert connection.getresponse().status == 200
    connection.close()
    assert [(e.status, e.up) for e in proxy.requests()] == [(fault.status, len(BLOB)), (200, len(BLOB))]


@pytest.mark.parametrize("path", ["/blob", "/chunked/blob", "/close/blob"])
def test_a_flip_is_one_bit(proxy: Proxy, path: str) -> None:
    proxy.add(Fault("flip"))
    body = ask(proxy, "GET", path)[1]
    different = [(a, b) for a, b in zip(body, BLOB, strict=True) if a != b]
    assert len(different) == 1
    assert (different[0][0] ^ different[0][1]).bit_count() == 1
    assert ask(proxy, "GET", path)[1] == BLOB


def test_a_flipped_upload_is_stored_so(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    proxy.add(Fault("flip_upload", at=5))
    ask(proxy, "PUT", "/a", BLOB)
    assert shelf[1].kept["/a"] == BLOB[:5] + bytes([BLOB[5] ^ 1]) + BLOB[6:]


def test_ignored_conditions_let_a_second_create_through(proxy: Proxy, shelf: tuple[str, type[Shelf]]) -> None:
    assert ask(proxy, "PUT", "/a", b"1", If_None_Match="*", X_Other="kept")[0] == 200
    assert ask(proxy, "PUT", "/a", b"2", If_None_Match="*", X_Other="kept")[0] == 412
    proxy.add(Fault("ignore_conditions", times=None), Fault("flip_upload", nth=2))
    assert ask(proxy, "PUT", "/a", b"2", If_None_Match="*", X_Other="kept")[0] == 200
    assert shelf[1].kept["/a"] == b"2"
    assert shelf[1].seen[-1][2]["x-other"] == "kept"
    # It leaves the request to the rules behind it.
    ask(proxy, "PUT", "/a", b"2", If_None_Match="*")
    assert shelf[1].kept["/a"] == b"3"


def test_down_refuses_connections_for_a_while(proxy: Proxy) -> None:
    idle = connect(proxy)
    idle.request("GET", "/blob")
    idle.getresponse().read()
    proxy.add(Fault("down", seconds=3600))
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        ask(proxy, "GET", "/blob")
    with pytest.raises(ConnectionRefusedError):
        ask(proxy, "GET", "/blob")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        idle.request("GET", "/blob")
        idle.getresponse()

    def answers() -> bool:
        try:
            return ask(proxy, "GET", "/blob") == (200, BLOB)
        except ConnectionRefusedError:
            return False

    proxy.up()
    assert answers()
    proxy.add(Fault("down", seconds=0.2))
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        ask(proxy, "GET", "/blob")
    wait_until(answers)


def test_rules_count_only_what_matches_and_the_first_takes_it(proxy: Proxy) -> None:
    proxy.add(
        Fault("status", status=500, nth=2, method="GET", path=r"\?key=b"),
        Fault("status", status=503, times=2, method="GET|HEAD", path="^/x"),
    )
    asked = ["/x?key=a", "/x?key=b", "/x?key=b", "/x?key=b", "/y?key=c", "/x"]
    assert [ask(proxy, "GET", path)[0] for path in asked] == [503, 503, 500, 200, 200, 200]
    assert proxy.fired() == 3
    proxy.clear()
    assert proxy.fired() == 0
    with pytest.raises(ValueError, match="no fault is called 'rest'"):
        Fault("rest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counted from 1"):
        Fault("reset", nth=0)


def test_latency_is_of_each_request_and_bandwidth_of_all_together(proxy: Proxy) -> None:
    # Lower bounds only: nothing here can be too slow.
    proxy.latency = 0.05
    began = time.monotonic()
    for _ in range(3):
        ask(proxy, "HEAD", "/blob")
    assert time.monotonic() - began >= 0.15
    wait_until(lambda: all(e.ended for e in proxy.requests()))
    assert all(e.ended - e.began >= 0.05 for e in proxy.requests())
    proxy.latency, proxy.bandwidth = 0.0, 8 * len(BLOB)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        assert all(body == BLOB for _, body in threads.map(lambda _: ask(proxy, "GET", "/blob"), range(4)))
    assert time.monotonic() - began >= 0.45


def test_requests_at_once_do_not_wait_for_each_other(proxy: Proxy) -> None:
    proxy.add(Fault("stall", path="never"))
    stalled = connect(proxy)
    stalled.request("GET", "/never")
    with ThreadPoolExecutor(16) as threads:
        bodies = list(threads.map(lambda n: ask(proxy, "GET", f"/blob?{n}")[1], range(64)))
    assert all(body == BLOB for body in bodies)
    assert sorted(e.query for e in proxy.requests()) == sorted(["", *map(str, range(64))])
    stalled.close()


def test_a_server_that_is_not_there_is_a_reset() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with (
            Proxy(f"http://127.0.0.1:{nobody.getsockname()[1]}") as proxy,
            pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)),
        ):
            ask(proxy, "GET", "/")


def test_a_server_that_answers_before_the_body_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with Proxy(f"http://127.0.0.1:{server.getsockname()[1]}") as proxy:
            assert ask(proxy, "PUT", "/a", BLOB * 16) == (403, b"no")
        thread.join()


def test_the_same_from_a_process_of_its_own(shelf: tuple[str, type[Shelf]]) -> None:
    with ProxyProcess(shelf[0]) as proxy:
        assert ask(proxy, "PUT", "/a", BLOB)[0] == 200
        proxy.add(Fault("status", status=429, retry_after=1), Fault("flip"))
        assert ask(proxy, "GET", "/a")[0] == 429
        assert ask(proxy, "GET", "/a")[1] != BLOB
        assert ask(proxy, "GET", "/a")[1] == BLOB
        assert proxy.fired() == 2
        assert [(e.method, e.status, e.fault) for e in proxy.requests()] == [
            ("PUT", 200, ""),
            ("GET", 429, "status"),
            ("GET", 200, "flip"),
            ("GET", 200, ""),
        ]
        proxy.down()
        with pytest.raises(ConnectionRefusedError):
            ask(proxy, "GET", "/a")
        proxy.up()
        proxy.clear()
        proxy.set_pace(latency=0.05, bandwidth=None)
        assert ask(proxy, "GET", "/a")[1] == BLOB
        wait_until(lambda: proxy.requests()[0].ended)
        (exchange,) = proxy.requests()
        assert exchange.ended - exchange.began >= 0.05
        assert proxy.cpu_seconds() > 0


def test_by_hand_it_says_its_address_and_ends_with_its_input(shelf: tuple[str, type[Shelf]]) -> None:
    command = [sys.executable, "-m", "tests.servers.faults", shelf[0], "--latency", "0.001"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        out, _ = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "")
