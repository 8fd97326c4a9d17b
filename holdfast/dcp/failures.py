"""holdfast's errors as torch's programs catch them: each is a CheckpointException as well."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from holdfast.commit.folder import TAKEN
from holdfast.errors import HoldfastError


@contextmanager
def as_torch_raises() -> Iterator[None]:
    """What holdfast raises in here is also torch's CheckpointException, with the failure of the rank that it names."""
    try:
        yield
    except HoldfastError as error:
        as_torch_has_it(error)
        raise


def as_torch_has_it(error: BaseException) -> BaseException:
    """The error itself. One of holdfast's is a CheckpointException as well from now on."""
    if isinstance(error, CheckpointException) or not isinstance(error, HoldfastError):
        return error
    rank = 0 if error.rank is None else error.rank
    failures = {rank: (error, traceback.extract_tb(error.__traceback__))}
    error.__class__ = _also_torchs(type(error))
    vars(error)["_failures"] = failures
    return error


_KINDS: dict[type[HoldfastError], type[HoldfastError]] = {}


def _also_torchs(kind: type[HoldfastError]) -> type[HoldfastError]:
    if kind not in _KINDS:
        _KINDS[kind] = _made(kind)
    return _KINDS[kind]


def _made(kind: type[HoldfastError]) -> type[HoldfastError]:
    # Not torch's text, which shows tracebacks.
    text: Callable[[BaseException], str] = next(vars(b)["__str__"] for b in kind.__mro__ if "__str__" in vars(b))

    def shown(error: BaseException) -> str:
        return in_torchs_words(text(error))

    return type(kind.__name__, (kind, CheckpointException), {"__module__": kind.__module__, "__str__": shown})


def in_torchs_words(text: str) -> str:
    """The text of an error, after the words that torch has for it where programs look for them."""
    return f"Checkpoint already exists: {text}" if TAKEN in text else text
