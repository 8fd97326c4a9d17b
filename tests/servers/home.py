"""Where fetched servers are kept between runs: $HOLDFAST_TEST_SERVERS or ~/.cache/holdfast-test-servers.

Called by the modules of the single servers. Never leaves half of a thing, whoever is killed while it is fetched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.servers.unavailable import Unavailable

# So long a failure is believed: every test session without a network would else try again, and wait again.
BELIEVED = 600.0


def home() -> Path:
    return Path(os.environ.get("HOLDFAST_TEST_SERVERS") or Path.home() / ".cache" / "holdfast-test-servers")


def once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name``, which ``make(folder)`` fills the first time; others who ask meanwhile wait.

    It is made beside its place and renamed, so ``make`` must not write its own path into anything that is read later.
    """
    place = home() / name
    if place.is_dir():
        return place
    try:
        home().mkdir(parents=True, exist_ok=True)
        lock = (home() / f"{name}.lock").open("w")
    except OSError as error:
        raise Unavailable(f"{home()} cannot be written: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return place
        failure = home() / f"{name}.failed"
        if failure.exists() and time.time() - failure.stat().st_mtime < BELIEVED:
            raise Unavailable(f"{failure.read_text()} (some minutes ago; remove {failure} to try again)")
        making = home() / f"{name}.making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            make(making)
        except Unavailable as reason:
            failure.write_text(str(reason))
            shutil.rmtree(making, ignore_errors=True)
            raise
        making.rename(place)
        failure.unlink(missing_ok=True)
    return place
