"""A thread that files may refuse: root is asked for no rights, so tests of refusals take its power away for a while.

Used by tests of what is said of folders and files that may not be read.
"""

from __future__ import annotations

import ctypes
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

OPEN = tempfile.gettempdir()
"""Where other users may enter, as they may not below pytest's folder."""

_GET, _SET = 125, 126  # capget(2), capset(2) on x86-64
_ARM = (90, 91)
_VERSION = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2  # read, write and enter whatever modes say


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def refused() -> Iterator[None]:
    """Modes of files count for this thread, and for those that it starts, root's or not."""
    libc = ctypes.CDLL(None, use_errno=True)
    get, set_ = _ARM if platform.machine() == "aarch64" else (_GET, _SET)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    assert libc.syscall(get, ctypes.byref(header), ctypes.byref(sets)) == 0
    before = sets[0].effective
    sets[0].effective = before & ~_OVERRIDE
    assert libc.syscall(set_, ctypes.byref(header), ctypes.byref(sets)) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.syscall(set_, ctypes.byref(header), ctypes.byref(sets)) == 0
