"""For the whole test session: examples are never timed, torch keeps to one thread, a small real disk, and servers."""

from __future__ import annotations

import gc
import multiprocessing.util
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.marks import mark_slow_cases
from tests.servers.fixtures import (
    azurite,
    ceph,
    ceph_ssl,
    gcs,
    lying_ceph,
    lying_gcs,
    moto,
    nginx,
    nginx_without_ranges,
)

__all__ = [
    "azurite",
    "ceph",
    "ceph_ssl",
    "gcs",
    "lying_ceph",
    "lying_gcs",
    "moto",
    "nginx",
    "nginx_without_ranges",
    "small_disk",
    "tmp_path",
]

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make test` draws the same examples each time, so that it never fails for a draw; `make test-all` draws others.
settings.register_profile("quick", settings.get_profile("holdfast"), max_examples=15, derandomize=True)
settings.load_profile("holdfast")
torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

FETCHED = {"ceph", "ceph_ssl", "lying_ceph", "azurite", "nginx", "nginx_without_ranges"}
"""Servers that are fetched from elsewhere than Python's package registry: hundreds of megabytes the first time."""


def pytest_collection_finish() -> None:
    """Modules and tests stay until the run ends, so the garbage collector need not look through them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs such a server is left to `make test-all`, and so are the slow cases of a test."""
    mark_slow_cases(items)
    for item in items:
        told = getattr(item, "callspec", None)
        named = {value for value in told.params.values() if isinstance(value, str)} if told else set()
        if FETCHED & {*getattr(item, "fixturenames", ()), *named}:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))  # minutes on a quiet machine


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_go_with_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this process, and of all that it starts, lie in pytest's folder, which is deleted."""
    multiprocessing.util.get_temp_dir()  # made before: multiprocessing deletes its own when the process ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _fresh_ranks() -> Iterator[None]:
    yield
    pool.close_crowded()


@pytest.fixture
def tmp_path(tmp_path: Path) -> LocalPlace:
    """A folder for the test, as the package has it inside: what a user passes becomes this at the first call."""
    return LocalPlace(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 6 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
