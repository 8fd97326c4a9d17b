"""What a cell of the zoo may say, and the small questions that the judge asks of runs and of errors.

Called by `zoo.judge` and `zoo.loading`. Never calls holdfast.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zoo import trees
from zoo.case import Run, steps

WARM, MORE, DEADLINE = 3, 10, 30.0
HERE, AGAIN, BACKGROUND, RANKS, GATHERED, SPREAD = (
    "one process", "into a trained one", "background", "2 ranks", "2 ranks to 1", "2 ranks to 4",
)  # fmt: skip
LOCAL, SHARDED = (HERE, AGAIN, BACKGROUND), (RANKS, GATHERED, SPREAD)


@dataclass(frozen=True)
class Cell:
    """How a case did in one column: "right", "refused", "wrong" or "torch", and why."""

    verdict: str
    text: str = ""


Tell = Callable[[str, str, str], None]
"""Says how a column ended: its name, verdict and text. With the name "" the text says what is being done."""


class Unable(Exception):
    """torch itself, or the case, does not do what the judge asks of it."""


@dataclass
class Facts:
    """What one column was judged against."""

    saved: Any
    """The state at the save, by the objects' own ``state_dict()``."""
    uninterrupted: list[Any] | None
    """What the steps after it gave where nothing was saved or loaded; None if that cannot be compared."""
    after: int = WARM
    """How many steps the fresh run takes before it loads."""


def state_or_none(run: Run) -> Any:
    """The state of a run; None if an object of it cannot give one at the moment, as where it is to be gathered."""
    try:
        return trees.own_state(run.state)
    except Exception:
        return None


def steps_of(run: Run, first: int, count: int) -> list[Any]:
    with asking_torch("does not train"):
        return steps(run, first, count)


@contextlib.contextmanager
def asking_torch(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Unable(f"{what}: {named(error)}") from error


def attempt(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        traceback.print_exc()
        return error
    return None


def told_by_any(text: str) -> str:
    """Whether it failed on any rank; the same on all."""
    if not dist.is_initialized():
        return text
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return next(filter(None, everyone), "")


def first_difference(one: list[Any], other: list[Any]) -> str:
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        found = list(trees.differences(a, b))
        if found:
            return f"step {number + 1} after it gives {found[0].text}"
    return ""


def slight(found: list[trees.Difference]) -> str:
    slight = [d for d in found if d.slight]
    return listed(slight) if slight else ""


def listed(found: list[trees.Difference]) -> str:
    return "; ".join(str(d) for d in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {short(str(error))}"


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "…"
