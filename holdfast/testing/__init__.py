"""For tests of what is built on holdfast: a store in memory, one that fails, and the tests that every store passes.

Users import it in their tests; it needs pytest. Never imported by the rest of the library.
"""

import pytest

# Before their import: failures then show values.
pytest.register_assert_rewrite("holdfast.testing.contract", "holdfast.testing.reading")

from holdfast.engine.stores.memory import Memory  # noqa: E402
from holdfast.engine.stores.retrying import transient  # noqa: E402
from holdfast.testing.contract import StoreContract  # noqa: E402
from holdfast.testing.failing import Failing  # noqa: E402
from holdfast.testing.reading import ReadOnlyContract  # noqa: E402

__all__ = ["Failing", "Memory", "ReadOnlyContract", "StoreContract", "transient"]
