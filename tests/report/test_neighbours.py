"""Words between the ranks of a node: what is no word costs nobody anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.report.neighbours import Hearing, Share, Telling, _address, _socket


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other tests of this user, and their bars, may be at work beside this one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", tmp_path_factory.mktemp("run").name + str(threading.get_native_id()))


@pytest.fixture
def heard() -> Iterator[list[tuple[int, str, Share]]]:
    found: list[tuple[int, str, Share]] = []
    came = threading.Event()

    def hear(rank: int, name: str, share: Share) -> None:
        found.append((rank, name, share))
        came.set()

    hearing = Hearing(hear)
    yield found
    assert came.wait(240), "it still listens"
    hearing.close()
    assert found == [(1, "save /ckpt", Share(1, 2))]


@pytest.mark.parametrize("word", [b"", b"\xc1", b"\x91\x01", b"\x94\x01\xa2\xff\xfe\x01\x02", b"\xff" * 9000])
def test_what_is_no_word_is_passed_over(word: bytes, heard: list[object]) -> None:
    with _socket() as anybody:
        anybody.sendto(word, _address())
    Telling(1).tell("save /ckpt", Share(1, 2))


def test_a_path_that_is_no_text_is_not_told(heard: list[object]) -> None:
    telling = Telling(1)
    telling.tell("save /\udcff", Share(1, 2))
    telling.tell("save /ckpt", Share(1, 2))
