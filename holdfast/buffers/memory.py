"""Memory for moving bytes: aligned buffers in huge pages, and quiet from Python's garbage collector.

Called by the writer, the reader and the two stories. Never holds more than its caller asks for.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """Page-aligned host memory of this process, as bytes and by address."""

    memory: mmap.mmap
    view: memoryview
    address: int


def buffer(nbytes: int) -> Buffer:
    """New zeroed memory of ``nbytes``.

    In huge pages where the kernel has them: direct I/O pins pages one by one, which with 4 KiB pages costs part of a
    disk's rate (`make bench` prints both as its raw rows).
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel or a Python without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return Buffer(memory, memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))


_of_thread = threading.local()


def thread_buffer(name: str, nbytes: int) -> Buffer:
    """The memory of this thread by that name, ``nbytes`` or more: grown as needed, and used again until it ends."""
    memory: Buffer | None = getattr(_of_thread, name, None)
    if memory is None or len(memory.view) < nbytes:
        memory = buffer(-(-nbytes // (2 << 20)) * (2 << 20))
        setattr(_of_thread, name, memory)
    return memory


_POPULATE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in the mmap module
_STRETCH = 64 << 20
_libc = ctypes.CDLL(None)


def populate(address: int, nbytes: int) -> None:
    """Let the kernel provide all pages of new memory now, so that the first copy into it does not wait for them.

    What the memory holds may be lost. Several threads share the work: one clears 2 to 5 GB/s. We rejected
    `mmap.madvise`: it holds the interpreter lock, so that this rank sends no heartbeat for ten seconds per 20 GB.
    """

    def touch(at: int) -> None:
        n = min(_STRETCH, nbytes - at)
        if _libc.madvise(ctypes.c_void_p(address + at), ctypes.c_size_t(n), _POPULATE):
            ctypes.memset(address + at, 0, n)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="holdfast-touch") as pool:
        list(pool.map(touch, range(0, nbytes, _STRETCH)))


_LARGE = 64 << 10
_move_and_yield = ctypes.memmove  # lets other threads run meanwhile
_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def move(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` between two addresses. Small copies keep the interpreter lock: passing it on costs more."""
    (_move if nbytes < _LARGE else _move_and_yield)(target, source, nbytes)


class _View(ctypes.Structure):
    """Py_buffer, as the stable part of Python's C interface has it."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def address_of(data: object) -> int:
    """Where the bytes of a buffer lie that may be read-only; they lie there as long as ``data`` lives unchanged."""
    view = _View()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(view), 0)
    try:
        return view.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def lend(memory: memoryview, back: Callable[[], object]) -> memoryview:
    """A view of writable ``memory``; once nothing refers to it any more, ``back`` is called, from any thread.

    So memory is known to be free although its reader does not say when it is done.
    """
    array = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    weakref.finalize(array, back)
    return memoryview(array).cast("B")


_lock = threading.Lock()
_pauses = 0
_resume = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector while thousands of small objects are made that all stay alive.

    It would look at each of them again and again: half the time of a state of 20,000 tensors. Nests, and serves
    several threads.
    """
    global _pauses, _resume
    paused = False
    try:
        with _lock:
            first = _pauses == 0
            if first:
                _resume = gc.isenabled()
            _pauses, paused = _pauses + 1, True  # in one step: an interrupt here must not leave it off for good
            if first:
                gc.disable()
        yield
    finally:
        if paused:
            with _lock:
                _pauses -= 1
                if _pauses == 0 and _resume:
                    gc.enable()
