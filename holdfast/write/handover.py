"""What the worker gets of one data file, in file order: chunks of the staging buffer, or memory of tensors themselves.

A `FilledFile` has one. Holds chunks back until the worker knows the file; brings each back to the buffer once written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.errors import HoldfastError
from holdfast.write.buffer import Chunk, StagingBuffer

COPIES = 64 << 20
"""Bytes that are made contiguous for an upload and not yet on their way for good."""


class Handover:
    """One file on its way to the worker.

    ``create`` makes the file and returns the worker's number for it; None in a store, where the file begins later.
    ``start`` is the offset in the file of the first chunk. ``progress`` is called with the bytes that are written.
    """

    def __init__(
        self, create: Callable[[], int | None], start: int, buffer: StagingBuffer, progress: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._create: Callable[[], int | None] | None = create  # None once it was called
        self._number: int | None = None
        self._offset = start
        self._buffer, self._progress = buffer, progress
        self._held: list[tuple[Chunk, int]] = []
        self._under_way: list[Future[None]] = []  # done once the chunk is back
        self._copies: deque[tuple[Future[None], int]] = deque()

    @property
    def has_begun(self) -> bool:
        """Whether the worker knows the file."""
        return self._number is not None

    @property
    def number(self) -> int:
        """The worker's number of the file. Raises HoldfastError if it has none yet."""
        if self._number is None:
            raise HoldfastError("a file was to be written before it was begun; this is a fault of holdfast")
        return self._number

    def open(self) -> None:
        """Create the file. The first call counts. Raises StorageError, as for a full disk."""
        create, self._create = self._create, None
        number = create() if create is not None else None
        if number is not None:
            self.begin(number)

    def begin(self, number: int) -> None:
        """The worker knows the file: hand over what was held back."""
        self._number, held, self._held = number, self._held, []
        while held:
            self.give_chunk(*held.pop(0))

    def give_chunk(self, chunk: Chunk, used: int) -> None:
        """Let the worker write the first ``used`` bytes of a chunk, which then goes back to the buffer."""
        if self._number is None:
            self._held.append((chunk, used))
            return
        try:
            written = self._buffer.worker.write(self._number, self._buffer.number, chunk.start, used, self._offset)
        except BaseException:
            self._buffer.give(chunk)
            raise
        back: Future[None] = Future()  # `written` itself wakes who waits for it before its callback is called
        self._under_way.append(back)
        self._offset += used

        def bring_back(done: Future[None]) -> None:
            error = done.exception()
            try:
                self._buffer.give(chunk)
                if error is None:
                    self._progress(used)
            finally:
                back.set_result(None) if error is None else back.set_exception(error)

        written.add_done_callback(bring_back)

    def give_memory(self, memory: memoryview, keep: object, *, is_copy: bool) -> None:
        """Let the worker upload memory that ``keep`` keeps alive; of copies at most `COPIES` bytes wait at a time."""
        self.raise_failures()
        nbytes = len(memory)
        sent = self._buffer.worker.send(self.number, memory, keep)
        sent.add_done_callback(lambda done: self._progress(nbytes) if done.exception() is None else None)
        self._under_way.append(sent)
        if is_copy:
            self._copies.append((sent, nbytes))
            while sum(n for _, n in self._copies) > COPIES:
                self._copies.popleft()[0].result()

    def raise_failures(self) -> None:
        """Raise what the worker has met by now."""
        for future in [future for future in self._under_way if future.done()]:
            future.result()
            self._under_way.remove(future)

    def wait(self) -> None:
        """Wait until every chunk is written and back. Raises what the worker met."""
        for future in self._under_way:
            future.result()
        self._under_way.clear()

    def give_up(self) -> None:
        """Bring every chunk back, whatever became of it; never raises."""
        while self._held:
            self._buffer.give(self._held.pop()[0])
        for future in self._under_way:
            future.exception()
        self._under_way.clear()
