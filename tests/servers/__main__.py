"""Servers by hand: `python -m tests.servers fetch` fetches all, `python -m tests.servers ceph` runs one until Ctrl-C.

Called by people, and where a test run must not wait for a network. Never leaves a server running.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.servers import Server, Unavailable, azurite, ceph, gcs, moto, nginx

START: dict[str, Callable[[], Server]] = {
    "moto": moto.start,
    "ceph": ceph.start,
    "ceph-ssl": partial(ceph.start, ssl=True),
    "lying-ceph": partial(ceph.start, suite="bookworm"),
    "azurite": azurite.start,
    "gcs": gcs.start,
    "lying-gcs": partial(gcs.start, ignores_conditions=True),
}


FETCH: dict[str, Callable[[], object]] = {
    "moto": moto.fetch,
    "ceph": ceph.fetch,
    "lying-ceph": partial(ceph.fetch, "bookworm"),
    "azurite": azurite.fetch,
    "nginx": nginx.command,
}


def fetch() -> None:
    for name, one in FETCH.items():
        try:
            one()
            print(f"{name}: here", flush=True)
        except Unavailable as reason:
            print(f"{name}: {reason}", flush=True)


def run(start: Callable[[], Server]) -> None:
    try:
        server = start()
        print(json.dumps({"url": server.url(server.bucket()), "endpoint": server.endpoint}))
        print(json.dumps({"options": dict(server.options), "client_options": dict(server.client_options)}), flush=True)
        threading.Event().wait()
    except Unavailable as reason:
        raise SystemExit(str(reason)) from None
    except KeyboardInterrupt:
        # The server ends with this process.
        return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description="Object stores on 127.0.0.1.")
    parser.add_argument("what", choices=["fetch", *START, "nginx"])
    parser.add_argument("folder", nargs="?", type=Path, help="what nginx serves; an empty one if it is not given")
    given = parser.parse_args()
    if given.what == "fetch":
        fetch()
    elif given.what == "nginx":
        with tempfile.TemporaryDirectory() as empty:
            run(partial(nginx.start, given.folder or Path(empty)))
    else:
        run(START[given.what])


if __name__ == "__main__":
    main()
