"""A web server for reading over http: the nginx of this machine, or Debian's, unpacked.

Called by the fixtures `nginx` and `nginx_without_ranges`. Serves a given folder and never writes to it.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from tests.servers import Server, process
from tests.servers.debian import SCRIPTS, unpacked

CONFIGURATION = """
daemon off;
# One process, of the user who runs it: a worker of another user could not read what tests write.
master_process off;
pid {folder}/pid;
error_log {folder}/output notice;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    default_type application/octet-stream;
    client_body_temp_path {folder}/temporary;
    proxy_temp_path {folder}/temporary;
    fastcgi_temp_path {folder}/temporary;
    uwsgi_temp_path {folder}/temporary;
    scgi_temp_path {folder}/temporary;
    server {{
        listen 127.0.0.1:{port};
        root {served};
        {ranges}
    }}
}}
"""


def command() -> list[str]:
    """What runs nginx here."""
    # It is an administrator's program, which an ordinary user's PATH may lack.
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
    if found:
        return [found]
    root = unpacked("nginx-trixie", "trixie", ["nginx"])
    return [
        "bash",
        "-c",
        'root=$1; . "$2"; shift 2; run usr/sbin/nginx "$@"',
        "nginx",
        str(root),
        f"{SCRIPTS}/world.sh",
    ]


def start(served: Path, *, ranges: bool = True) -> Server:
    """A server of the folder ``served``; without ``ranges`` it answers a range with the whole file, and 200."""
    nginx = command()
    folder = process.folder_for("nginx")
    held = process.hold_port()
    port = process.port_of(held)
    limit = "" if ranges else "max_ranges 0;"
    text = CONFIGURATION.format(folder=folder, port=port, served=served.resolve(), ranges=limit)
    (folder / "nginx.conf").write_text(text)
    running = process.launch([*nginx, "-e", f"{folder}/output", "-c", f"{folder}/nginx.conf"], folder)

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            return False
        return True

    process.wait_until_it_answers(running, "nginx", answers)

    def make_folder(name: str) -> None:
        (served / name).mkdir()

    def end() -> None:
        running.stop()
        held.close()

    endpoint = f"http://127.0.0.1:{port}"
    return Server("nginx", endpoint, "http", {}, {"allow_http": True}, make_folder, end, served)
