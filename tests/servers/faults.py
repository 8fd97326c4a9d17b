"""A proxy on the loopback that makes a near, good store slow, far, or bad, by rule.

Called by tests of what a store does wrong and by benchmarks of what a far one costs, in their process (`Proxy`) or in
one of its own (`tests.servers.faults_process`). Never holds a whole body.

The Host field passes unchanged: clients sign for the proxy's address, and the server behind it has to take any name.
Where signatures are checked, `ignore_conditions` and `flip_upload` end in a refusal: they change what was signed.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

from tests.servers.http1 import Stream
from tests.servers.passing import Close, Cut, Exchange, Pace, Passing, Reset, is_next
from tests.servers.process import hold_port, port_of
from tests.servers.rules import CONDITIONS, Fault, Rules

__all__ = ["Exchange", "Fault", "Proxy"]

# What a request to a store in the same region takes, about.
LATENCY = 0.030


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Proxy:
    """Passes requests to ``target`` (http://host:port) from its `endpoint`, each ``latency`` seconds late.

    ``bandwidth`` is bytes a second, each way, for all connections together; None: as fast as it goes. Latency,
    bandwidth and faults may be changed at any time and hold for the requests from then on.
    """

    def __init__(self, target: str, *, latency: float = 0.0, bandwidth: float | None = None) -> None:
        url = urlsplit(target)
        if url.scheme != "http" or url.hostname is None or url.port is None:
            raise ValueError(f"a proxy needs a target like http://127.0.0.1:9000, not {target}")
        self._target = (url.hostname, url.port)
        self.latency = latency
        self._up, self._down = Pace(bandwidth), Pace(bandwidth)
        self._rules = Rules()
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        self._number = 0
        self._open: set[socket.socket] = set()
        self._stopped = threading.Event()
        # Kept while the proxy lives, so that nobody else is given the port while it is down.
        self._held = hold_port()
        self.endpoint = f"http://127.0.0.1:{port_of(self._held)}"
        self._listener: socket.socket | None = None
        self.up()

    @property
    def bandwidth(self) -> float | None:
        return self._down.rate

    @bandwidth.setter
    def bandwidth(self, rate: float | None) -> None:
        self._up.rate = self._down.rate = rate

    def add(self, *faults: Fault) -> None:
        """Faults for the requests from now on, behind those that were added before."""
        self._rules.add(*faults)

    def clear(self) -> None:
        """No faults any more, and no requests remembered."""
        self._rules.clear()
        with self._lock:
            self._exchanges = []

    def fired(self) -> int:
        """How many requests were taken by faults since the last `clear`."""
        return self._rules.fired()

    def requests(self) -> list[Exchange]:
        """All requests since the last `clear`, in the order they came, as they stand now."""
        with self._lock:
            return [replace(exchange) for exchange in self._exchanges]

    def down(self) -> None:
        """Cut all connections and refuse new ones, until `up`."""
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is not None:
                # A close alone would leave the accepting thread in its call, and the port open.
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            for sock in self._open:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # Gone already.
                    continue

    def up(self) -> None:
        """Accept connections (again)."""
        with self._lock:
            if self._listener is not None or self._stopped.is_set():
                return
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port_of(self._held)))
            listener.listen(512)
            self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="faults accept", daemon=True).start()

    def stop(self) -> None:
        """End it for good."""
        self._stopped.set()
        self.down()
        self._held.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # A thread for each connection: it spends its time in calls that let the others run.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="faults", daemon=True).start()

    def _opened(self, sock: socket.socket) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._listener is None:
                raise Reset
            self._open.add(sock)
        return sock

    def _serve(self, client: socket.socket) -> None:
        both = [client]
        is_orderly = False
        try:
            reader = Stream(self._opened(client))
            both.append(socket.create_connection(self._target))
            answers = Stream(self._opened(both[1]))
            while is_next(reader, answers.sock):
                self._exchange(reader, answers)
            is_orderly = True
        except (Close, Cut):
            is_orderly = True
        except (Reset, OSError):
            # An OSError: one side is gone, and the other learns of it.
            is_orderly = False
        finally:
            with self._lock:
                self._open.difference_update(both)
            for sock in both:
                sock.close() if is_orderly else _reset(sock)

    def _exchange(self, reader: Stream, answers: Stream) -> None:
        head = reader.head()
        if head is None:
            raise Close
        method, target, _ = head.first
        path, _, query = target.partition("?")
        with self._lock:
            self._number += 1
            asked = head.fields.get("range", "")
            exchange = Exchange(self._number, method, path, query, asked, began=time.monotonic())
            self._exchanges.append(exchange)
        try:
            ignored, fault = self._rules.take(method, target)
            if self.latency:
                self._stopped.wait(self.latency)
            if ignored:
                exchange.fault = "ignore_conditions"
                head = head.without(CONDITIONS)
            if fault is not None and fault.kind == "down":
                exchange.fault = "down"
                self.down()
                later = threading.Timer(fault.seconds, self.up)
                later.daemon = True
                later.start()
                raise Reset
            Passing(reader, answers, self._up, self._down, exchange, fault).run(head)
        finally:
            exchange.ended = time.monotonic()


if __name__ == "__main__":
    from tests.servers.faults_process import main

    main()
