"""accelerate's tests of `save_state` and `load_state` with `holdfast.trainers.accelerate.attach`.

A pytest plugin: every Accelerator is attached when it is made. `count` of what went through holdfast is looked at when
the tests are over, so that a shim that does nothing does not pass.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from holdfast.trainers import accelerate
from holdfast.trainers.accelerate import attach

AS_IT_IS = Accelerator.__init__
SAVE = accelerate.save
count = 0


def make(self: Accelerator, *args: Any, **kwargs: Any) -> None:
    AS_IT_IS(self, *args, **kwargs)
    attach(self)


def counted(*args: Any, **kwargs: Any) -> Any:
    global count
    count += 1
    return SAVE(*args, **kwargs)


def pytest_sessionfinish(session: Any) -> None:
    if not count:
        raise RuntimeError("no test has saved anything with holdfast")


Accelerator.__init__ = make
accelerate.save = counted
