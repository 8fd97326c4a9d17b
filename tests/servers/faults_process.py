"""The proxy of `tests.servers.faults` in a process of its own, so that it takes no time from the one that measures.

Called by benchmarks (`start`), or by hand: `python -m tests.servers.faults http://127.0.0.1:9000 --latency 0.03`.
Never outlives its starter: it ends when its input does. It is told, and answers, in lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.servers.faults import Exchange, Fault, Proxy


class ProxyProcess:
    """As `Proxy`, from afar: the same calls, each of which waits until the proxy has done it."""

    def __init__(self, target: str, *, latency: float = 0.0, bandwidth: float | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.faults_process", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.endpoint: str = self._answer()
        self.set_pace(latency=latency, bandwidth=bandwidth)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy's process has ended: {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def _call(self, name: str, *values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def set_pace(self, *, latency: float, bandwidth: float | None) -> None:
        """Seconds a request is late, and bytes a second each way."""
        self._call("set_pace", latency, bandwidth)

    def add(self, *faults: Fault) -> None:
        self._call("add", *map(asdict, faults))

    def clear(self) -> None:
        self._call("clear")

    def fired(self) -> int:
        return int(self._call("fired"))

    def requests(self) -> list[Exchange]:
        return [Exchange(**fields) for fields in self._call("requests")]

    def down(self) -> None:
        self._call("down")

    def up(self) -> None:
        self._call("up")

    def cpu_seconds(self) -> float:
        """Processor time it has used so far."""
        return float(self._call("cpu_seconds"))

    def stop(self) -> None:
        self._process.communicate(timeout=30)

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _do(proxy: Proxy, name: str, values: list[Any]) -> Any:
    if name == "set_pace":
        proxy.latency, proxy.bandwidth = values
    elif name == "add":
        proxy.add(*(Fault(**fields) for fields in values))
    elif name == "requests":
        return [asdict(exchange) for exchange in proxy.requests()]
    elif name == "cpu_seconds":
        return time.process_time()
    elif name in ("clear", "fired", "down", "up"):
        return getattr(proxy, name)()
    else:
        raise ValueError(f"the proxy knows no {name}")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="A proxy that makes a store slow, far, or bad.")
    parser.add_argument("target", help="http://host:port of the store")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that each request is late")
    parser.add_argument("--bandwidth", type=float, help="bytes a second, each way, for all connections together")
    given = parser.parse_args()
    with Proxy(given.target, latency=given.latency, bandwidth=given.bandwidth) as proxy:
        print(json.dumps({"result": proxy.endpoint}), flush=True)
        for line in sys.stdin:
            name, *values = json.loads(line)
            try:
                answer = {"result": _do(proxy, name, values)}
            except (TypeError, ValueError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
