"""One data file on its way: window after window filled in file order, summed, and handed to the worker.

`Writing` owns one for each file. Knows no other file, but for whose window of a slot is to come back first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.memory import move
from holdfast.buffers.stage import address_of, contiguous_parts, copy_bytes, host_view, is_plain_memory
from holdfast.errors import HoldfastError
from holdfast.write.arena import Slot, Window
from holdfast.write.image import Image
from holdfast.write.sums import Sums

STRIDE = 1 << 20
"""Bytes copied and then summed at a time, so that the sum reads them from the processor's cache."""

SMALL = 64 << 10
"""A tensor below this is not worth a hand-over of its own."""

MADE = 64 << 20
"""Bytes that are made contiguous for an upload and not yet on their way for good."""


@dataclass(frozen=True)
class Coming:
    """A window of ``stream`` that devices still copy into, until ``moment``."""

    stream: Stream
    window: Window
    used: int
    moment: Moments


class Stream:
    """One file under way: fills window after window in file order and hands each to the worker.

    ``file`` is its number, None until `begin`: what is filled before waits, in ``_held``.
    """

    def __init__(
        self, image: Image, file: int | None, start: int, slot: Slot, copier: Copier, coming: deque[Coming],
        progress: Callable[[int], None], *, strong: bool = False,
    ) -> None:  # fmt: skip
        self.image, self.file, self.slot, self.copier, self.progress = image, file, slot, copier, progress
        self.sums: Sums | None = Sums(image.pieces, strong=strong)  # None if they are known already
        self.sealed = False
        self._held: list[tuple[Window, int]] = []
        self._made: deque[tuple[Future[None], int]] = deque()
        # Bytes that a device copies arrive later: then whole windows are summed and handed over as they land.
        self.queued = any(source.device.type != "cpu" for source in image.sources)
        self.offset = start  # in the file, of the window being filled
        self.window: Window | None = None
        self.used = 0
        self._left = image.nbytes  # bytes that no window was taken for yet
        self._coming = coming
        self._going: list[Future[None]] = []  # done once the window is back

    def fill(self) -> None:
        """Copy every piece into windows."""
        pieces, sources = self.image.pieces, self.image.sources
        at = 0
        while at < len(pieces):
            done = at if self.queued else self._copy_run(at)
            if done == at:
                piece, source = pieces[at], sources[at]
                address_of(source, piece.key)
                if self.window is not None and piece.nbytes <= min(STRIDE, self.window.nbytes - self.used):
                    self._copy_small(source, piece.nbytes)
                else:
                    self._copy(source)
                done = at + 1
            at = done
        self._window_is_full()

    def _copy_run(self, at: int) -> int:
        """Copy the plain small pieces of host memory from the ``at``-th on while there is room, up to a stride.

        Returns the number of the first that is not copied. They are summed together: for each by itself a sum costs
        less than to be asked for it.
        """
        if self.window is None:
            return at
        pieces, sources = self.image.pieces, self.image.sources
        begin, window = self.used, self.window
        used, end = begin, min(begin + STRIDE, window.nbytes)
        while at < len(pieces):
            source, nbytes = sources[at], pieces[at].nbytes
            if used + nbytes > end or not is_plain_memory(source):
                break
            if nbytes:
                move(window.address + used, address_of(source, pieces[at].key), nbytes)
            used += nbytes
            at += 1
        if self.sums is not None and used > begin:
            self.sums.feed(window.view[begin:used])
        self.used = used
        return at

    def send(self) -> None:
        """Hand over every piece from where it lies; small and scattered ones in other memory, not much at a time."""
        small = bytearray()
        for piece, source in zip(self.image.pieces, self.image.sources, strict=True):
            for part in contiguous_parts(source):
                memory = host_view(address_of(part, piece.key), part.nbytes)
                if part.nbytes < SMALL:
                    small += memory
                    if len(small) < STRIDE:
                        continue
                if small:
                    self._send(memoryview(small), small, made=True)
                    small = bytearray()
                if part.nbytes >= SMALL:
                    self._send(memory, part, made=part is not source)
        if small:
            self._send(memoryview(small), small, made=True)

    def _send(self, memory: memoryview, keep: object, *, made: bool) -> None:
        self._raise_failures()
        nbytes = len(memory)
        sent = self.slot.worker.send(self.number, memory, keep)
        sent.add_done_callback(lambda done: self.progress(nbytes) if done.exception() is None else None)
        self._going.append(sent)
        if made:
            self._made.append((sent, nbytes))
            while sum(n for _, n in self._made) > MADE:
                self._made.popleft()[0].result()

    def _copy_small(self, source: torch.Tensor, nbytes: int) -> None:
        if nbytes and self.window is not None:
            if is_plain_memory(source):
                self._move(source, 0, nbytes, self.window)
                return
            with self.copier.on(source.device):  # what is made contiguous is made on the stream that copies it
                for part in contiguous_parts(source):
                    self._move(part, 0, part.nbytes, self.window)

    def _copy(self, source: torch.Tensor) -> None:
        with self.copier.on(source.device):  # a part that is made contiguous on the way is made on the side stream
            for part in contiguous_parts(source):
                at = 0
                while at < part.nbytes:
                    window = self._room()
                    n = min(part.nbytes - at, window.nbytes - self.used)
                    if not self.queued:
                        n = min(n, STRIDE)
                    self._move(part, at, n, window)
                    at += n

    def _move(self, part: torch.Tensor, at: int, n: int, window: Window) -> None:
        if part.device.type == "cpu":
            copy_bytes(part, at, n, window.address + self.used)
        else:
            self.copier.copy(part, at, n, window.address + self.used)
        if not self.queued and self.sums is not None:
            self.sums.feed(window.view[self.used : self.used + n])
        self.used += n

    def _room(self) -> Window:
        if self.window is not None and self.used == self.window.nbytes:
            self._window_is_full()
        while self.window is None:
            self._raise_failures()
            self.window = self.slot.take(self._left, timeout=0.0 if self._coming else 0.5)
            if self.window is not None:
                self._left -= min(self.window.nbytes, self._left)
            elif self._coming:
                self.land_first()  # nothing comes back before something is handed over
        return self.window

    def _window_is_full(self) -> None:
        if self.window is None:
            return
        # A device may fail here, or have no memory left: then the window is still this stream's, to be given back.
        moment = self.copier.moment() if self.queued else None
        window, used = self.window, self.used
        self.window, self.used = None, 0
        if moment is not None:
            self._coming.append(Coming(self, window, used, moment))
        else:
            self.hand_over(window, used)

    def land_first(self) -> None:
        """Wait for the window that devices were told first, of whichever file it is, and hand it over."""
        first = self._coming.popleft()
        try:
            first.moment.wait()
            if first.stream.sums is not None:
                first.stream.sums.feed(first.window.view[: first.used])
        except BaseException:
            self.slot.give(first.window)
            raise
        first.stream.hand_over(first.window, first.used)

    @property
    def number(self) -> int:
        """Of a file that the worker knows."""
        if self.file is None:
            raise HoldfastError(f"{self.image.path} was to be written before it was begun; a fault of holdfast")
        return self.file

    def begin(self, file: int) -> None:
        """The worker knows the file: hand over what waits."""
        self.file, held, self._held = file, self._held, []
        while held:
            self.hand_over(*held.pop(0))

    def hand_over(self, window: Window, used: int) -> None:
        """Let the worker write the first ``used`` bytes of a window, and take it back then."""
        if self.file is None:
            self._held.append((window, used))
            return
        try:
            written = self.slot.worker.write(self.file, self.slot.number, window.start, used, self.offset)
        except BaseException:
            self.slot.give(window)
            raise
        back: Future[None] = Future()  # `written` itself wakes who waits for it before its callback is called
        self._going.append(back)
        self.offset += used

        def bring_back(done: Future[None]) -> None:
            error = done.exception()
            try:
                self.slot.give(window)
                if error is None:
                    self.progress(used)
            finally:
                back.set_result(None) if error is None else back.set_exception(error)

        written.add_done_callback(bring_back)

    def _raise_failures(self) -> None:
        for future in [future for future in self._going if future.done()]:
            future.result()
            self._going.remove(future)

    def wait(self) -> None:
        """Until every window handed over is written and back. Raises what the worker met."""
        for future in self._going:
            future.result()
        self._going.clear()

    def settle(self) -> None:
        """Bring every window back, whatever became of it."""
        if self.window is not None:
            self.slot.give(self.window)
            self.window = None
        while self._held:
            self.slot.give(self._held.pop()[0])
        for future in self._going:
            future.exception()
        self._going.clear()
