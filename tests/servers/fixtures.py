"""The servers as pytest fixtures, each started when the first test of a session asks, and stopped at its end.

Imported by conftest.py files. A server that cannot be had skips its tests, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.servers import Server, Unavailable


def lend(start: Callable[[], Server]) -> Iterator[Server]:
    try:
        server = start()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """S3; checks no signatures."""
    from tests.servers.moto import start

    yield from lend(start)


@pytest.fixture(scope="session")
def ceph() -> Iterator[Server]:
    """S3, a real one; honours conditions."""
    from tests.servers.ceph import start

    yield from lend(start)


@pytest.fixture(scope="session")
def ceph_ssl() -> Iterator[Server]:
    """S3, a real one, over https."""
    from tests.servers.ceph import start

    yield from lend(partial(start, ssl=True))


@pytest.fixture(scope="session")
def lying_ceph() -> Iterator[Server]:
    """S3, a real one that ignores some conditions without a word."""
    from tests.servers.ceph import start

    yield from lend(partial(start, suite="bookworm"))


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    """Azure's blob storage."""
    from tests.servers.azurite import start

    yield from lend(start)


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """Google Cloud Storage, our own small one."""
    from tests.servers.gcs import start

    yield from lend(start)


@pytest.fixture(scope="session")
def lying_gcs() -> Iterator[Server]:
    """The same, but every create is an overwrite."""
    from tests.servers.gcs import start

    yield from lend(partial(start, ignores_conditions=True))


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A web server of what is in its `folder`."""
    from tests.servers.nginx import start

    yield from lend(partial(start, tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="session")
def nginx_without_ranges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A web server that answers with the whole file whatever range it is asked for."""
    from tests.servers.nginx import start

    yield from lend(partial(start, tmp_path_factory.mktemp("served"), ranges=False))
