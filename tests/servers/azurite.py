"""Azure's blob storage: Azurite, Microsoft's emulator, installed by npm into a folder of its own. Checks signatures.

Called by the fixture `azurite`. Never installs anything for anyone else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
from email.utils import formatdate
from pathlib import Path

from tests.servers import Server, Unavailable, process
from tests.servers.home import once

VERSION = "3.35.0"
ACCOUNT = "holdfast"
KEY = base64.b64encode(b"holdfast-secret").decode()


def fetch() -> Path:
    """The script that node is to run."""

    def make(folder: Path) -> None:
        npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--omit=dev", "--ignore-scripts"]
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=30000"]
        process.fetch([*npm, *patience, f"azurite@{VERSION}"], seconds=240)

    for tool in ("node", "npm"):
        if not shutil.which(tool):
            raise Unavailable(f"there is no {tool} here")
    return once(f"azurite-{VERSION}", make) / "node_modules/azurite/dist/src/blob/main.js"


def request(port: int, method: str, path: str, query: dict[str, str]) -> int:
    """The status of one request without a body, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    # The account stands twice: as whose resource it is, and in the path, where an emulator has it.
    resource = [f"/{ACCOUNT}/{ACCOUNT}{path}", *(f"{name}:{query[name]}" for name in sorted(query))]
    to_sign = "\n".join([method, *[""] * 11, *lines, *resource])
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), to_sign.encode(), hashlib.sha256).digest()).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, f"/{ACCOUNT}{path}?{asked}", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def start() -> Server:
    """An empty account."""
    script = fetch()
    folder = process.folder_for("azurite")
    held = process.hold_port()
    port = process.port_of(held)
    command = ["env", f"AZURITE_ACCOUNTS={ACCOUNT}:{KEY}", "node", str(script), "--location", str(folder)]
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"]
    running = process.launch([*command, *options, "--silent"], folder)

    def answers() -> bool:
        try:
            return request(port, "GET", "/", {"comp": "list"}) == 200
        except OSError:
            return False

    process.wait_until_it_answers(running, "azurite", answers)
    endpoint = f"http://127.0.0.1:{port}"

    def make_container(name: str) -> None:
        status = request(port, "PUT", f"/{name}", {"restype": "container"})
        if status != 201:
            raise RuntimeError(f"the container {name} was not made: {status}")

    def end() -> None:
        running.stop()
        held.close()

    access = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": f"{endpoint}/{ACCOUNT}"}
    return Server("azurite", endpoint, "az", access, {"allow_http": True}, make_container, end)
