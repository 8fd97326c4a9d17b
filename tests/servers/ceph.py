"""A real S3 server: Ceph's gateway, monitor and object store, unpacked from Debian packages and run in memory.

Called by the fixtures `ceph` and `lying_ceph`. It checks signatures, keeps 4 GiB at most, and installs nothing.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from tests.servers import Server, Unavailable, process, sigv4
from tests.servers.debian import unpacked
from tests.servers.moto import s3_options

# forky: Ceph 20, which honours conditions. bookworm: Ceph 16, which answers some with a success that it did not check.
Suite = Literal["forky", "bookworm"]

SCRIPTS = Path(__file__).with_name("ceph")
KEY = "HOLDFASTKEY"
SECRET = "holdfast-secret"


def fetch(suite: Suite = "forky") -> Path:
    """The unpacked programs and libraries: 150 MB to fetch, 500 MB on disk."""
    return unpacked(f"ceph-{suite}", suite, ["radosgw", "ceph-mon", "ceph-osd"])


def start(*, ssl: bool = False, suite: Suite = "forky") -> Server:
    """A cluster of its own, empty; with ``ssl`` its endpoint is https, and `client_options` trust its certificate."""
    root = fetch(suite)
    folder = process.folder_for(f"ceph-{suite}")
    held = [process.hold_port() for _ in range(3)]
    port, monitor, secure = map(process.port_of, held)
    if ssl:
        make_certificate(folder)
    command = ["bash", SCRIPTS / "start.sh", root, folder, port, monitor, KEY, SECRET, secure if ssl else ""]
    running = process.launch(list(map(str, command)), folder)

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return (folder / "ready").exists()
        except (urllib.error.URLError, OSError):
            return False

    process.wait_until_it_answers(running, f"ceph {suite}", answers)
    endpoint = f"https://127.0.0.1:{secure}" if ssl else f"http://127.0.0.1:{port}"
    client = {"root_certificate": (folder / "cert.pem").read_text()} if ssl else {"allow_http": True}

    def make_bucket(name: str) -> None:
        sigv4.make_bucket(endpoint, name, key=KEY, secret=SECRET)

    def end() -> None:
        running.stop()
        for one in held:
            one.close()

    return Server("ceph", endpoint, "s3", s3_options(endpoint, KEY, SECRET), client, make_bucket, end, folder)


def make_certificate(folder: Path) -> None:
    """cert.pem and key.pem for 127.0.0.1, for a day."""
    if not shutil.which("openssl"):
        raise Unavailable("there is no openssl here, to make a certificate with")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-addext", "basicConstraints=critical,CA:FALSE", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    files = ["-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"]
    process.fetch(["openssl", "req", "-x509", "-nodes", "-days", "1", *names, *kind, *files], seconds=30)
