"""The contract on a server's store inside all the wrappers: chunks go through them all to the client, uncopied."""

from __future__ import annotations

import pytest

from holdfast.engine.stores.deadline import Deadline
from holdfast.engine.stores.hedged import Hedged
from holdfast.engine.stores.retrying import Retrying
from holdfast.engine.stores.store import Store
from holdfast.engine.stores.throttled import Throttled
from holdfast.testing import StoreContract
from tests.engine.clouds import cloud
from tests.servers import Server


@pytest.mark.slow
class TestWrapped(StoreContract):
    @pytest.fixture
    def store(self, moto: Server) -> Store:
        return Deadline(Throttled(Hedged(Retrying(cloud(moto))), 10e9), 60.0)
