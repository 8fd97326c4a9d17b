"""A file on its way to a store: its header, then chunks of memory in the order in which they come.

A file writer makes one for each data file of a save to a store, in this process or in the writer process, so it
imports no torch. Never holds bytes of its own: a chunk is free once the store lets go of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from holdfast.buffers.memory import lend
from holdfast.storage.store import Store

Back = Callable[[BaseException | None], None]
"""Called once the store no longer reads a chunk, with what has gone wrong until then."""


class GivenUp(Exception):
    """The save that these bytes belong to has failed."""


class Upload:
    """``size`` bytes of ``key``, ``header`` included; `add` the rest in order, then `wait`."""

    def __init__(self, store: Store, key: str, header: bytes, size: int) -> None:
        self._store, self._key, self._header, self._size = store, key, header, size
        self._chunks_to_come: queue.SimpleQueue[tuple[memoryview, Back] | None] = queue.SimpleQueue()
        self._added = len(header)
        self._left = size - len(header)  # that the store has not asked for
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.began = time.monotonic()
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-upload", daemon=True)
        self._thread.start()

    @property
    def key(self) -> str:
        """What errors call it."""
        return f"{self._store.url}/{self._key}"

    @property
    def thread(self) -> int:
        """The system's number of the thread that uploads."""
        return self._thread.native_id or 0

    def add(self, chunk: memoryview, back: Back) -> None:
        """The next bytes of the file; they must not change before they are back."""
        self._added += len(chunk)
        with self._lock:
            if self.ended is None:
                self._chunks_to_come.put((chunk, back))
                return
        back(self._error)

    def give_up(self) -> None:
        """Leave nothing behind in the store, unless all bytes were added already."""
        if self._added < self._size:
            self._chunks_to_come.put(None)

    def wait(self) -> BaseException | None:
        """Until the file is durable, or why it is not."""
        self._thread.join()  # it ends: operations of a store have a deadline, and `give_up` ends what is to be added
        return self._error

    def _run(self) -> None:
        try:
            self._store.put(self._key, self._chunks(), self._size)
        except BaseException as error:  # noqa: BLE001 - kept for `wait`
            self._error = None if self._is_there() else _without_frames(error)
        with self._lock:
            self.ended = time.monotonic()
        while not self._chunks_to_come.empty():  # what a failed upload has not asked for
            item = self._chunks_to_come.get()
            if item is not None:
                item[1](self._error)

    def _is_there(self) -> bool:
        """Whether the answer alone was lost. Nobody else writes a file of this name: it holds the save's id."""
        if self._left:
            return False
        try:
            return self._store.size(self._key) == self._size
        except OSError:
            return False

    def _chunks(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        while self._left:
            item = self._chunks_to_come.get()
            if item is None:
                raise GivenUp(f"the upload of {self._key} was given up")
            chunk, back = item
            self._left -= len(chunk)
            yield lend(chunk, partial(back, None))


def _without_frames(error: BaseException) -> BaseException:
    """The error as it is kept: frames of a failed upload would keep its chunks from coming back."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:  # a chain may lead back into itself
        seen.add(id(at))
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error
