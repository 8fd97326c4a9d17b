"""Google Cloud Storage as far as obstore needs it: our own small server, in a process of its own.

Called by the fixtures `gcs` and `lying_gcs`. It proves the wiring only: the emulators that there are do not speak what
obstore speaks, and nothing but the real one behaves like the real one.
"""

from __future__ import annotations

import socket
import sys
import urllib.request
from pathlib import Path

from tests.servers import Server, process

TOKEN = "holdfast-token"


def start(*, ignores_conditions: bool = False) -> Server:
    """An empty store; with ``ignores_conditions`` one in which every create is an overwrite."""
    held = process.hold_port()
    port = process.port_of(held)
    endpoint = f"http://127.0.0.1:{port}"
    script = Path(__file__).with_name("gcs_server.py")
    command = [sys.executable, "-I", "-S", str(script), str(port), TOKEN]
    running = process.launch([*command, *["ignore-conditions"] * ignores_conditions], process.folder_for("gcs"))

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            return False
        return True

    process.wait_until_it_answers(running, "our GCS", answers)

    def make_bucket(name: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=30).close()

    def end() -> None:
        running.stop()
        held.close()

    options = {"base_url": endpoint, "bearer_token": TOKEN}
    return Server("gcs", endpoint, "gs", options, {"allow_http": True}, make_bucket, end)
