"""A server does what it was asked and its answer is lost: asked again, it says that the name is taken, or is gone.

So a network file system may fail a call that it has done. The save may fail then; nothing is lost or mixed, and the
next one succeeds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.storage.local import disk
from tests.crash.record import recorded
from tests.crash.runs import folder, load_at, quiet, restore_run, save_at, train_on, whole_state

ASKED_AGAIN = {
    "link": errno.EEXIST, "make folder": errno.EEXIST, "replace": errno.ENOENT, "delete": errno.ENOENT,
    "remove folder": errno.ENOENT,
}  # fmt: skip


def over_one(root: Path) -> None:
    holdfast.save(whole_state(2), root / "latest", overwrite=True)


def a_step(root: Path) -> None:
    train_on(root, 2)


CASES: list[tuple[Callable[[Path], None], Callable[[Path], int | None], Callable[[Path, int], None]]] = [
    (over_one, load_at("latest"), save_at("latest")),
    (a_step, restore_run, train_on),
]


@pytest.mark.parametrize("work, restore, save_on", CASES, ids=["over one", "a step"])
@pytest.mark.fast_cases("over one")
def test_a_lost_reply_loses_nothing(work: Any, restore: Any, save_on: Any) -> None:
    number, last, lost = -1, 0, 0
    while number <= last:
        hit = ""

        def rule(at: int, call: disk.Call, do: Callable[[], Any]) -> Any:
            nonlocal hit
            result = do()
            if at == number and call.verb in ASKED_AGAIN:
                hit = call.verb
                raise OSError(ASKED_AGAIN[call.verb], os.strerror(ASKED_AGAIN[call.verb]), call.path)
            return result

        with folder() as root, quiet():
            (save_at("latest") if work is over_one else train_on)(root, 1)
            saved = False
            with recorded(root, rule) as seen, suppress(holdfast.HoldfastError, OSError):
                work(root)
                saved = True
            assert restore(root) in ((2,) if saved else (1, 2)), f"call {number}, {hit}"
            save_on(root, 3)
            assert restore(root) == 3
        lost += bool(hit)
        last = max(last, len(seen.trace.ops))
        number += 1
    assert lost >= 4
