"""The writer: images of data files are copied into windows of a slot and handed to a worker, summed on the way.

`save` and the Saver make a `Writing`. Sees names, bytes and offsets: no ranks, no plans. Host memory is the slot,
whatever the size of the state.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from holdfast.engine.arena import Slot, Window
from holdfast.engine.device import Copier, Moments
from holdfast.engine.stage import contiguous_parts, copy_bytes, is_plain_memory
from holdfast.engine.storage import open_to_write
from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.datafile import Piece

STRIDE = 1 << 20
"""Bytes copied and then summed at a time, so that the sum reads them from the processor's cache."""


@dataclass(frozen=True)
class Image:
    """A data file before it is written: where it goes, its pieces in file order, and each piece's tensor."""

    path: str
    section: str
    pieces: list[Piece]
    sources: list[torch.Tensor]
    shapes: dict[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Its tensor bytes."""
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True)
class Written:
    """A durable data file: path relative to the checkpoint, size, and its header's size and digest."""

    path: str
    bytes: int
    header_bytes: int
    header_digest: str


@dataclass
class OpenFiles:
    """Descriptors of the files of a save, kept open (and so locked) until its outcome is known."""

    paths: list[Path] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Writing:
    """The data files of one save on one rank, on their way to disk.

    Made by opening them all, so that a full disk is found before any copying. Then `stage` each image once, in any
    order, then `finish`, which waits until all is durable. The folders exist already; ``files`` collects what was
    opened, for the caller to close or delete. A failure of the worker is raised by whichever call meets it: a
    StorageError naming the file.
    """

    def __init__(
        self, images: Sequence[Image], folder: Path, *, save: str, rank: int, slot: Slot, files: OpenFiles,
        progress: Callable[[int], None], after: Moments,
    ) -> None:  # fmt: skip
        self.images, self.folder, self.slot = list(images), folder, slot
        self.copier = Copier(after)
        self._written: dict[str, Written] = {}
        self._done: list[Future[None]] = []
        self._streams: dict[str, _Stream] = {}
        self._coming: deque[_Coming] = deque()
        self._save, self._rank = save, rank
        slot.begin()
        try:
            for image in self.images:
                self._open(image, files, progress)
        except BaseException:
            self.close()  # a writer process that kept the first files open would keep their space on a full disk
            raise

    def _open(self, image: Image, files: OpenFiles, progress: Callable[[int], None]) -> None:
        header = _header(image, self._save, self._rank, "0" * datafile.sums_length(image.pieces))
        path, size = self.folder / image.path, len(header) + image.nbytes
        fd, direct = open_to_write(path, size)
        files.paths.append(path)
        files.descriptors.append(fd)
        number = self.slot.worker.open(path, fd, direct=direct)
        stream = _Stream(image, number, len(header), self.slot, self.copier, self._coming, progress)
        self._streams[image.path] = stream

    def stage(self, image: Image) -> None:
        """Copy an image into windows and hand each to the worker, with its header at the end.

        From devices the copies are only queued, and `land` hands over what has arrived.
        """
        stream = self._streams[image.path]
        stream.fill()
        if not stream.queued:
            self._seal(stream)

    def land(self) -> None:
        """Wait for what devices are still copying, and hand it over as it arrives."""
        while self._coming:
            self._coming[0].stream.land_first()
        for path, stream in self._streams.items():
            if path not in self._written:
                self._seal(stream)

    def _seal(self, stream: _Stream) -> None:
        image = stream.image
        header = _header(image, self._save, self._rank, stream.sums.text())
        size = len(header) + image.nbytes
        self._done.append(self.slot.worker.finish(stream.file, header, size))
        self._written[image.path] = Written(image.path, size, len(header), blocks.digest(header))
        stream.progress(len(header))

    def parts(self) -> list[Written]:
        """What will stand on disk once all is done; known when every image is staged and landed."""
        return [self._written[image.path] for image in self.images]

    def leave(self, small: Sequence[tuple[Path, bytes]]) -> None:
        """After the data files: their folders durable, then small files (a part, attachments) in this order."""
        folders = list(dict.fromkeys((self.folder / image.path).parent for image in self.images))
        files = [stream.file for stream in self._streams.values()]
        self._done.append(self.slot.worker.leave(files, folders, small))

    def wait_written(self) -> None:
        """Wait until every window is written, so that the slot is free for the next save."""
        for stream in self._streams.values():
            stream.wait()

    def finish(self) -> None:
        """Wait until all is durable."""
        for future in self._done:
            future.result()

    def close(self) -> None:
        """Wait for all that is still on its way, then let the worker forget the files; never raises.

        After this their descriptors may be closed: no thread writes by a number that another file may have by then.
        """
        while self._coming:
            lost = self._coming.popleft()
            with suppress(RuntimeError):  # of a device that failed, and copies no more
                lost.moment.wait()
            self.slot.give(lost.window)
        for stream in self._streams.values():
            stream.settle()
        for future in self._done:
            future.exception()
        self.slot.worker.drop([stream.file for stream in self._streams.values()])


def _header(image: Image, save: str, rank: int, sums: str) -> bytes:
    header = datafile.build_header(
        image.pieces, save=save, rank=rank, section=image.section, shapes=image.shapes, sums=sums
    )
    if len(header) > datafile.MAX_HEADER:
        raise HoldfastError(f"{image.path} would have a header of {len(header)} bytes, which no reader accepts")
    return header


class _Sums:
    """The sums of all blocks of a file, from its bytes in file order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._sizes = [p.nbytes for p in pieces]
        self._texts = [""] * len(pieces)
        self._piece = -1
        self._in_piece = self._in_block = 0  # bytes left
        self._state = xxhash.xxh3_64()
        self._fresh = True  # no byte of the block came yet
        self._next_piece()

    def feed(self, view: memoryview) -> None:
        """The next bytes of the file."""
        at, end = 0, len(view)
        while at < end:
            n = min(end - at, self._in_block)
            if n == self._in_piece <= blocks.BLOCK and self._fresh:  # the short way for many small tensors
                self._texts[self._piece] += xxhash.xxh3_64_hexdigest(view[at : at + n])
                self._in_piece = 0
            else:
                self._state.update(view[at : at + n])
                self._fresh = False
                self._in_piece -= n
                self._in_block -= n
                if not self._in_block:
                    self._texts[self._piece] += self._state.hexdigest()
                    self._begin_block()
            at += n
            if not self._in_piece:
                self._next_piece()

    def text(self) -> str:
        """All sums, once all bytes came."""
        return ",".join(self._texts)

    def _next_piece(self) -> None:
        while not self._in_piece and self._piece < len(self._sizes) - 1:
            self._piece += 1
            self._in_piece = self._sizes[self._piece]
        self._begin_block()

    def _begin_block(self) -> None:
        self._in_block, self._fresh = min(blocks.BLOCK, self._in_piece), True
        self._state.reset()


@dataclass(frozen=True)
class _Coming:
    """A window of ``stream`` that devices still copy into, until ``moment``."""

    stream: _Stream
    window: Window
    used: int
    moment: Moments


class _Stream:
    """One file under way: fills window after window in file order and hands each to the worker."""

    def __init__(
        self, image: Image, file: int, start: int, slot: Slot, copier: Copier, coming: deque[_Coming],
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.image, self.file, self.slot, self.copier, self.progress = image, file, slot, copier, progress
        self.sums = _Sums(image.pieces)
        # Bytes that a device copies arrive later: then whole windows are summed and handed over as they land.
        self.queued = any(source.device.type != "cpu" for source in image.sources)
        self.offset = start  # in the file, of the window being filled
        self.window: Window | None = None
        self.used = 0
        self._coming = coming
        self._going: list[Future[None]] = []  # done once the window is back

    def fill(self) -> None:
        """Copy every piece into windows."""
        for piece, source in zip(self.image.pieces, self.image.sources, strict=True):
            if self.window is not None and piece.nbytes <= min(STRIDE, self.slot.window - self.used):
                self._copy_small(source, piece.nbytes)
            else:
                self._copy(source)
        self._window_is_full()

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
                    n = min(part.nbytes - at, self.slot.window - self.used)
                    if not self.queued:
                        n = min(n, STRIDE)
                    self._move(part, at, n, window)
                    at += n

    def _move(self, part: torch.Tensor, at: int, n: int, window: Window) -> None:
        if part.device.type == "cpu":
            copy_bytes(part, at, n, window.address + self.used)
        else:
            self.copier.copy(part, at, n, window.address + self.used)
        if not self.queued:
            self.sums.feed(window.view[self.used : self.used + n])
        self.used += n

    def _room(self) -> Window:
        if self.used == self.slot.window:
            self._window_is_full()
        while self.window is None:
            self._raise_failures()
            self.window = self.slot.take(timeout=0.0 if self._coming else 0.5)
            if self.window is None and self._coming:
                self.land_first()  # nothing comes back before something is handed over
        return self.window

    def _window_is_full(self) -> None:
        if self.window is None:
            return
        window, used = self.window, self.used
        self.window, self.used = None, 0
        if self.queued:
            self._coming.append(_Coming(self, window, used, self.copier.moment()))
        else:
            self.hand_over(window, used)

    def land_first(self) -> None:
        """Wait for the window that devices were told first, of whichever file it is, and hand it over."""
        first = self._coming.popleft()
        try:
            first.moment.wait()
            first.stream.sums.feed(first.window.view[: first.used])
        except BaseException:
            self.slot.give(first.window)
            raise
        first.stream.hand_over(first.window, first.used)

    def hand_over(self, window: Window, used: int) -> None:
        """Let the worker write the first ``used`` bytes of a window, and take it back then."""
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
        for future in self._going:
            future.exception()
        self._going.clear()
