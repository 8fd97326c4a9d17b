"""Servers end with whoever started them, and what is fetched is whole or not there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.servers import Unavailable, process
from tests.servers.home import home, once

pytestmark = pytest.mark.slow  # the tests' own servers: `make test-all`

ROOT = Path(__file__).parents[2]
STARTER = """
import sys, time
from pathlib import Path
from tests.servers import process
folder = process.folder_for("test")
process.launch(["bash", "-c", "sleep 1000 & echo $$ $! > pids; wait"], folder)
while not (folder / "pids").exists() or not (folder / "pids").read_text().strip():
    time.sleep(0.01)
print(folder, flush=True)
time.sleep(1000)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while it was looked at
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_dies_with_a_starter_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        pids = list(map(int, (folder / "pids").read_text().split()))
        assert all(map(is_alive, pids))
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)) and not folder.exists())


def test_a_server_that_is_stopped_is_gone_with_its_folder() -> None:
    folder = process.folder_for("test")
    running = process.launch(["bash", "-c", "sleep 1000 & echo ready; echo $$ > pid; wait"], folder)
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip())
    pid = int((folder / "pid").read_text())
    assert not running.is_over
    assert running.stop() == "ready"
    assert not is_alive(pid)
    assert not folder.exists()


def test_a_server_that_does_not_come_up_says_why() -> None:
    running = process.launch(["bash", "-c", "echo no such thing >&2; exit 3"], process.folder_for("test"))
    with pytest.raises(Unavailable, match="it ended by itself: no such thing"):
        process.wait_until_it_answers(running, "it", lambda: False)
    slow = process.launch(["sleep", "1000"], process.folder_for("test"))
    with pytest.raises(Unavailable, match="it did not answer within 0 s"):
        process.wait_until_it_answers(slow, "it", lambda: False, seconds=0.1)
    assert slow.is_over


def test_a_fetch_that_fails_says_why() -> None:
    with pytest.raises(Unavailable, match="bash failed: first | no network"):
        process.fetch(["bash", "-c", "echo first; echo no network; exit 1"], seconds=30)
    with pytest.raises(Unavailable, match="sleep did not end within 0 s"):
        process.fetch(["sleep", "1000"], seconds=0.1)


def test_a_held_port_is_for_who_asks_for_it() -> None:
    with process.hold_port() as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", process.port_of(held)))
        server.listen()
        socket.create_connection(("127.0.0.1", process.port_of(held)), 10).close()


def _make(folder: Path) -> None:
    with (home() / "made").open("a") as log:
        log.write("x")
    (folder / "half").touch()
    time.sleep(0.2)
    (folder / "whole").touch()


def _ask(folder: str) -> None:
    os.environ["HOLDFAST_TEST_SERVERS"] = folder
    assert (once("thing", _make) / "whole").exists()


def test_many_who_ask_at_once_wait_for_the_one_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "thing.making").mkdir()
    (tmp_path / "thing.making" / "left by one that was killed").touch()
    context = multiprocessing.get_context("spawn")
    asking = [context.Process(target=_ask, args=(str(tmp_path),)) for _ in range(3)]
    for one in asking:
        one.start()
    for one in asking:
        one.join(240)
    assert [one.exitcode for one in asking] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "x"
    assert sorted(path.name for path in (tmp_path / "thing").iterdir()) == ["half", "whole"]


def test_a_failure_leaves_no_half_and_is_believed_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_SERVERS", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise Unavailable("no network")

    with pytest.raises(Unavailable, match="^no network$"):
        once("thing", fail)
    with pytest.raises(Unavailable, match="no network .some minutes ago; remove .*thing.failed to try again"):
        once("thing", lambda folder: None)
    assert not (tmp_path / "thing").exists()
    os.utime(tmp_path / "thing.failed", (0, 0))
    assert once("thing", lambda folder: None) == tmp_path / "thing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_a_home_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_TEST_SERVERS", str(tmp_path / "file" / "home"))
    with pytest.raises(Unavailable, match="cannot be written"):
        once("thing", lambda folder: None)
