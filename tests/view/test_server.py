"""The page served: who is answered, what is answered, statistics on demand in a real browser, and a clean end."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

import holdfast
from holdfast.view import server
from holdfast.view.checkpoint import checkpoint_page, figures
from holdfast.view.server import Served, running
from tests.patience import wait_until
from tests.view.browser import Tab
from tests.view.test_page import HOSTILE


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = {"w": torch.arange(100.0).reshape(10, 10), HOSTILE[1]: torch.ones(3), "bad": torch.ones(2000)}
    holdfast.save({"model": model, "step": 1}, tmp_path / "c")
    opened = holdfast.open(tmp_path / "c")
    made = Served(lambda: checkpoint_page(opened, served=True), {"statistics": lambda name: figures(opened, name)})
    with running(made):
        yield made


def ask(served: Served, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    port = served.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_only_who_knows_the_address_is_answered(served: Served) -> None:
    root = f"/{served.token}/"
    status, headers, body = ask(served, root)
    assert status == 200 and b"holdfast" in body and headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"
    assert "Python" not in headers["Server"]
    for path in (
        "/",
        "",
        "/favicon.ico",
        "/wrong/",
        f"/{served.token[:-1]}/",
        f"/{served.token}x/",
    ):
        assert ask(served, path or "/")[0] == 404
    for path in ("manifest.json", "../manifest.json", "..%2f..%2fetc/passwd", "assets/frame.js", "statistics/x"):
        assert ask(served, root + path)[0] == 404
    port = served.server_address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", "localhost:7000", f"[::1]:{port}"):
        assert ask(served, root, Host=host)[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "127.0.0.1@evil.example",
        "0.0.0.0",
    ):
        status, _, body = ask(served, root, Host=host)
        assert status == 403 and b"treemap" not in body
    assert ask(served, f"{root}statistics?name=model/w", Sec_Fetch_Site="cross-site")[0] == 403
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        assert ask(served, root, method)[0] == 405
    assert ask(served, root, "TRACE")[0] == 501


def test_it_listens_on_loopback_alone(served: Served) -> None:
    assert served.server_address[0] == "127.0.0.1" and len(served.token) >= 32


def test_statistics_are_answered_by_name(served: Served, tmp_path: Path) -> None:
    root = f"/{served.token}/statistics?name="
    found = json.loads(ask(served, f"{root}model/w")[2])
    assert found["max"] == 99 and found["min"] == 0 and sum(found["counts"]) == 100
    name = next(n for n in holdfast.open(tmp_path / "c").tensors if "img" in n)
    assert json.loads(ask(served, root + quote(name, safe=""))[2])["count"] == 3
    status, _, body = ask(served, f"{root}model/nothing")
    assert status == 404 and "no tensor" in json.loads(body)["error"]
    assert ask(served, f"/{served.token}/statistics")[0] == 404
    for file in (tmp_path / "c" / "model").iterdir():
        file.write_bytes(file.read_bytes()[:-900])
    status, _, body = ask(served, f"{root}model/bad")
    assert status == 500 and "ends at byte" in json.loads(body)["error"]


def test_statistics_on_demand(tab: Callable[..., Tab], served: Served) -> None:
    one = tab()
    page = one.open(served.url)
    page.fill("#filter", "model/w")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert not any("statistics" in url for url in one.asked)
    page.click("#panel button.primary")
    page.wait_for_selector(".statistics")
    assert "Max99" in page.text_content(".statistics")
    assert {url.split("?")[0] for url in one.network()} == {served.url, f"{served.url}statistics"}
    served.routes["statistics"] = lambda name: (_ for _ in ()).throw(holdfast.errors.Damaged(f"{name} is altered <b>"))
    page.fill("#filter", "bad")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.click("#panel button.primary")
    page.wait_for_selector(".on-demand .note")
    assert page.text_content(".on-demand .note") == "model/bad is altered <b>"
    one.errors.clear()  # the browser tells of the status, too


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(4)}}, tmp_path / "c")
    command = [sys.executable, "-m", "holdfast", "view", str(tmp_path / "c"), "--serve", "--json"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        url = json.loads(started.stdout.readline())["url"]
        told = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32,}/)", url)
        assert told
        connection = http.client.HTTPConnection("127.0.0.1", int(told[1]), timeout=240)
        connection.request("GET", told[2])
        assert connection.getresponse().status == 200
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=240)
    finally:
        started.kill()
        started.wait()
    assert (started.returncode, out, err) == (0, "", "")


def test_room_is_given_back_once_whatever_arrives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives when the thread of a connection has begun: it has the room, and gives it back."""
    begin, before = threading.Thread.start, threading.enumerate()  # a browser may keep connections of earlier tests

    def begin_and_interrupt(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    gone: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", gone.append)
    ours, theirs = socket.socketpair()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            served.process_request(theirs, ("127.0.0.1", 1))
    ours.close()
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name and thread not in before:
            thread.join(240)
    assert gone == []


def test_a_port_that_is_taken_is_an_error(served: Served, run: Any, tmp_path: Path) -> None:
    code, _, err = run("view", tmp_path / "c", "--serve", "--port", served.server_address[1])
    assert code == 2 and "in use" in err and "leave out --port" in err and "Traceback" not in err


def test_any_failure_is_an_answer(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.routes["statistics"] = lambda name: 1 // 0
    status, _, body = ask(served, f"/{served.token}/statistics?name=w")
    assert status == 500 and "ZeroDivisionError" in json.loads(body)["error"]
    assert "was not answered" in caplog.text and served.token not in caplog.text
    with socket.create_connection(("127.0.0.1", served.server_address[1]), timeout=240) as one:
        one.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one.recv(1 << 10).startswith(b"HTTP/1.1 400 ")


def test_connections_are_bounded(served: Served) -> None:
    address = ("127.0.0.1", served.server_address[1])
    idle = [socket.create_connection(address, timeout=240) for _ in range(server.MOST)]
    with socket.create_connection(address, timeout=240) as one:  # connections are accepted in their order
        assert one.recv(1) == b"", "turned away"
    for one in idle:
        one.close()

    def is_answered() -> bool:
        try:
            return ask(served, f"/{served.token}/")[0] == 200
        except (ConnectionError, http.client.HTTPException):  # turned away: not all of the others have ended
            return False

    wait_until(is_answered)


def test_connections_that_come_at_once_wait_in_a_queue() -> None:
    made = Served(lambda: "page", {})  # it listens, and accepts none yet: a queue that is full keeps further ones out
    waiting = [socket.create_connection(("127.0.0.1", made.server_address[1]), timeout=60) for _ in range(server.MOST)]
    for one in waiting:
        one.close()
    made.server_close()


@pytest.mark.timed
def test_who_takes_long_gets_the_page_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a slow tunnel a large page takes longer than one who sends nothing may."""
    monkeypatch.setattr(server._Handler, "timeout", 0.5)
    page = "x" * (3 << 20)
    with running(made := Served(lambda: page, {})), socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        one.settimeout(30)
        one.connect(("127.0.0.1", made.server_address[1]))
        one.sendall(f"GET /{made.token}/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        got = begun = 0.0
        while data := one.recv(1 << 16):
            begun = begun or time.monotonic()
            got += len(data)
            while got / len(page) > (time.monotonic() - begun) / 1.5:
                time.sleep(0.01)
    assert got > len(page)
