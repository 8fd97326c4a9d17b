"""What the trainer and the writer process tell each other: messages over a socket, whole or not at all."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.write import writer_process
from tests.marks import examples

heads = st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=3)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(heads, st.lists(st.binary(max_size=3000), max_size=3), st.integers(0, 2)), max_size=8))
def test_messages_come_out_as_they_went_in(messages: list[tuple[dict[str, Any], list[bytes], int]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = writer_process._Inbox(theirs)
        for head, data, fds in messages:
            writer_process.send(ours, head, data, [0] * fds)
            got = inbox.next()
            assert got[:2] == ({k: v for k, v in head.items() if k != "data"}, data) and len(got[2]) == fds
            for fd in got[2]:
                os.close(fd)


def test_a_large_message_and_then_the_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        data = os.urandom(5 << 20)
        sender = threading.Thread(target=lambda: (writer_process.send(ours, {"a": 1}, [data, b""]), ours.close()))
        sender.start()
        inbox = writer_process._Inbox(theirs)
        assert inbox.next() == ({"a": 1}, [data, b""], [])
        with pytest.raises(writer_process._Gone):
            inbox.next()
        sender.join()


def test_an_end_in_the_middle_of_a_message() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall((1000).to_bytes(8, "little") + b'{"verb":')
        ours.close()
        with pytest.raises(writer_process._Gone):
            writer_process._Inbox(theirs).next()
