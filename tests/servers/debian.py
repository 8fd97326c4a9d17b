"""Programs from Debian packages, with all the libraries they need, unpacked and not installed.

Called by `tests.servers.ceph` and `tests.servers.nginx`. Never uses a library of the host, not even the C library:
it needs apt, the keys of Debian, and a Linux kernel.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.servers import Unavailable, process
from tests.servers.home import once

SCRIPTS = Path(__file__).with_name("debian")


def unpacked(name: str, suite: str, packages: Sequence[str]) -> Path:
    """The root of a tree with these packages of a suite; run what is in it with debian/world.sh."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Unavailable(f"Debian packages of {packages[0]} are of no use on {sys.platform} {platform.machine()}")

    def make(folder: Path) -> None:
        process.fetch(["bash", SCRIPTS / "unpack.sh", suite, folder, *packages], seconds=240)

    return once(name, make) / "root"
