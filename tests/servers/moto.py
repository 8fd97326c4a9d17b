"""The quick S3 server: moto, in a virtual environment of its own. It checks no signatures and keeps all in memory.

Called by the fixture `moto`. Never touches the environment that the tests run in.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.servers import Server, process, sigv4
from tests.servers.home import once

VERSION = "5.2.5"
# moto[server] would also bring what the other services of AWS need, which is more than half of its 300 MB.
PACKAGES = (f"moto[s3]=={VERSION}", "flask", "flask-cors")
KEY = "moto"

# moto looks whether an object is there and then puts it: of two creates at once both may win. S3 lets one win.
SERVE = """
import threading
from moto.s3.responses import S3Response
from moto.server import main

lock, put_object = threading.Lock(), S3Response.put_object

def put_alone(self):
    with lock:
        return put_object(self)

S3Response.put_object = put_alone
main()
"""


def fetch() -> Path:
    """The Python of an environment with moto's server in it."""

    def make(folder: Path) -> None:
        process.fetch([sys.executable, "-m", "venv", folder / "venv"], seconds=60)
        pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        patience = ["--timeout", "15", "--retries", "1"]
        process.fetch([*pip, *patience, *PACKAGES], seconds=200)

    return once(f"moto-s3-{VERSION}", make) / "venv/bin/python"


def answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def forget(server: Server) -> None:
    """Delete every bucket: it keeps all in memory, and trials by the hundred would fill that of the machine."""
    with urllib.request.urlopen(f"{server.endpoint}/moto-api/reset", data=b"", timeout=60):
        pass


def start() -> Server:
    """A moto server of its own, empty."""
    python = fetch()
    held = process.hold_port()
    endpoint = f"http://127.0.0.1:{process.port_of(held)}"
    command = [str(python), "-c", SERVE, "-H", "127.0.0.1", "-p", str(process.port_of(held))]
    running = process.launch(command, process.folder_for("moto"))
    process.wait_until_it_answers(running, "moto", lambda: answers(endpoint))

    def make_bucket(name: str) -> None:
        sigv4.make_bucket(endpoint, name, key=KEY, secret=KEY)

    def end() -> None:
        running.stop()
        held.close()

    return Server("moto", endpoint, "s3", s3_options(endpoint), {"allow_http": True}, make_bucket, end)


def s3_options(endpoint: str, key: str = KEY, secret: str = KEY) -> dict[str, str]:
    """What obstore needs to reach an S3 server of one's own."""
    return {
        "endpoint": endpoint,
        "access_key_id": key,
        "secret_access_key": secret,
        "region": sigv4.REGION,
        "virtual_hosted_style_request": "false",
    }
