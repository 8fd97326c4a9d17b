"""The contract on a server's store inside all the wrappers: chunks go through them all to the client, uncopied."""

from __future__ import annotations

import pytest

from holdfast.storage.store import Store
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.hedged import Hedged
from holdfast.storage.wrappers.retrying import Retrying
from holdfast.storage.wrappers.throttled import Throttled
from holdfast.testing import StoreContract
from tests.servers import Server
from tests.storage.cloud.clouds import cloud


@pytest.mark.slow
class TestWrapped(StoreContract):
    @pytest.fixture
    def store(self, moto: Server) -> Store:
        return Deadline(Throttled(Hedged(Retrying(cloud(moto))), 10e9), 60.0)
