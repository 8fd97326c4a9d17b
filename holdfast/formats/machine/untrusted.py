"""Small files of other libraries, read up to a limit, and Damaged for contents that no library wrote."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast.errors import Damaged, HoldfastError, Unsupported
from holdfast.formats.sources import all_of, file
from holdfast.storage.place import Place

MAX_JSON = 1 << 30

_MALFORMED = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error,
    msgspec.MsgspecError,
)  # fmt: skip


@contextmanager
def damaged_as(text: str, *, unexpected: bool = False) -> Iterator[None]:
    """Turn what malformed contents lead to, a missing key for example, into Damaged that begins with ``text``.

    ``unexpected``: the reader should have checked the contents before; then the error keeps its cause.
    """
    try:
        yield
    except HoldfastError:
        raise
    except _MALFORMED as error:
        kind = "" if isinstance(error, msgspec.MsgspecError) else f"{type(error).__name__}: "
        raise Damaged(f"{text}: {kind}{str(error)[:300]}") from (error if unexpected else None)


@contextmanager
def named_in_errors(name: str, what: str) -> Iterator[None]:
    """Put ``name`` before errors about contents; ``what`` is said of malformed ones."""
    try:
        with damaged_as(what):
            yield
    except (Damaged, Unsupported) as error:
        raise type(error)(f"{name}: {error}") from None


def read_whole(path: Place, limit: int) -> bytes:
    """All bytes of a file. Raises Damaged if there are more than ``limit``, StorageError."""
    source = file(path)
    if source.nbytes > limit:
        raise Damaged(f"{path} has {source.nbytes} bytes, more than any file of this kind")
    return all_of(source).read()


def read_json(path: Place, limit: int = MAX_JSON) -> Any:
    """The value in a JSON file. Unlike msgspec this reads NaN, which trainers write for a loss."""
    with damaged_as(f"{path} is no valid JSON; it was truncated or altered"):
        return json.loads(read_whole(path, limit))
