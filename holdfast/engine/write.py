"""The writer: images of data files are copied into windows of a slot and handed to a worker, summed on the way.

`save` and the Saver make a `Writing`. Sees names, bytes and offsets: no ranks, no plans. Host memory is the slot,
whatever the size of the state.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import xxhash

from holdfast.engine.arena import Slot, Window, windows_for
from holdfast.engine.device import Copier, Moments
from holdfast.engine.memory import move
from holdfast.engine.stage import contiguous_parts, copy_bytes, host_view, is_plain_memory
from holdfast.engine.storage import open_to_write
from holdfast.engine.stores.place import Location, Place
from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.datafile import Piece

STRIDE = 1 << 20
"""Bytes copied and then summed at a time, so that the sum reads them from the processor's cache."""


SMALL = 64 << 10
"""A tensor below this is not worth a hand-over of its own."""


MADE = 64 << 20
"""Bytes that are made contiguous for an upload and not yet on their way for good."""


@dataclass(frozen=True)
class Image:
    """A data file before it is written: where it goes, its pieces in file order, and each piece's tensor."""

    path: str
    section: str
    pieces: list[Piece]
    sources: list[torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    volume: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Its tensor bytes."""
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True)
class Written:
    """A durable data file: path relative to the checkpoint, size, its header's size, digest, and SHA-256 if signed."""

    path: str
    bytes: int
    header_bytes: int
    header_digest: str
    header_sha256: str = ""


@dataclass
class OpenFiles:
    """Descriptors of the files of a save, kept open (and so locked) until its outcome is known."""

    paths: list[Location] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Writing:
    """The data files of one save on one rank, on their way to disk or to a store.

    A store takes a file from its first byte to its last, and the first are the header, which holds the sums of all
    others. So a file is handed over once it is all staged, or, if the slot cannot hold all files at once, its tensors
    are summed before they are staged. If nothing changes before the save has ended (``still``), tensors in host memory
    are not staged at all: a store takes them from where they lie. ``strong``: headers hold SHA-256 sums too.

    Made by opening them all, so that a full disk is found before any copying. Then `stage` each image once, in any
    order, then `finish`, which waits until all is durable. The folders exist already; ``files`` collects what was
    opened, for the caller to close or delete. A failure of the worker is raised by whichever call meets it: a
    StorageError naming the file.
    """

    def __init__(
        self, images: Sequence[Image], folder: Location, *, save: str, rank: int, slot: Slot, files: OpenFiles,
        progress: Callable[[int], None], after: Moments, still: bool = False, strong: bool = False,
    ) -> None:  # fmt: skip
        self.images, self.folder, self.slot = list(images), folder, slot
        self.copier = Copier(after)
        self._written: dict[str, Written] = {}
        self._headers: dict[str, bytes] = {}
        self._done: list[Future[None]] = []
        self._streams: dict[str, _Stream] = {}
        self._coming: deque[_Coming] = deque()
        self._save, self._rank, self._still, self._strong = save, rank, still, strong
        self._sums_first = windows_for([image.nbytes for image in self.images], slot.window) > slot.count
        slot.begin()
        try:
            for image in self.images:
                self._open(image, files, progress)
        except BaseException:
            self.close()  # a writer process that kept the first files open would keep their space on a full disk
            raise

    def _open(self, image: Image, files: OpenFiles, progress: Callable[[int], None]) -> None:
        header = _header(image, self._save, self._rank, strong=self._strong)
        self._headers[image.path] = header
        path, size = self.folder / image.path, len(header) + image.nbytes
        number = None
        if isinstance(path, Path):
            fd, direct = open_to_write(path, size)
            files.paths.append(path)
            files.descriptors.append(fd)
            number = self.slot.worker.open(path, fd, direct=direct)
        else:
            files.paths.append(path)
        stream = _Stream(
            image, number, len(header), self.slot, self.copier, self._coming, progress, strong=self._strong
        )  # fmt: skip
        self._streams[image.path] = stream

    def stage(self, image: Image) -> None:
        """Copy an image into windows and hand each to the worker, with its header at the end.

        From devices the copies are only queued, and `land` hands over what has arrived.
        """
        stream = self._streams[image.path]
        straight = self._still and stream.file is None and not stream.queued
        if stream.file is None and (self._sums_first or straight):
            self._begin(stream, _sums_of(image, self.slot, self.copier, strong=self._strong))
            stream.sums = None
        if straight:
            stream.send()
        else:
            stream.fill()
        if not stream.queued:
            self._seal(stream)

    def land(self) -> None:
        """Wait for what devices are still copying, and hand it over as it arrives."""
        while self._coming:
            self._coming[0].stream.land_first()
        for stream in self._streams.values():
            if not stream.sealed:
                self._seal(stream)

    def _begin(self, stream: _Stream, sums: _Sums) -> None:
        """The header of a file is known: from now on it goes to the store."""
        image = stream.image
        header = self._headers[image.path] = datafile.with_sums(self._headers[image.path], *sums.texts())
        path = self.folder / image.path
        if stream.file is None and isinstance(path, Place):
            stream.begin(self.slot.worker.begin(path, header, len(header) + image.nbytes))
        self._written[image.path] = Written(
            image.path, len(header) + image.nbytes, len(header), blocks.digest(header),
            blocks.strong_sum(header) if self._strong else "",
        )  # fmt: skip

    def _seal(self, stream: _Stream) -> None:
        image = stream.image
        if stream.sums is not None:
            self._begin(stream, stream.sums)
        header = self._headers.pop(image.path)
        self._done.append(self.slot.worker.finish(stream.number, header, len(header) + image.nbytes))
        stream.sealed = True
        stream.progress(len(header))

    def parts(self) -> list[Written]:
        """What will stand on disk once all is done; known when every image is staged and landed."""
        return [self._written[image.path] for image in self.images]

    def leave(self, small: Sequence[tuple[Location, bytes]]) -> None:
        """After the data files: their folders durable, then small files (a part, attachments) in this order."""
        folders = list(dict.fromkeys((self.folder / image.path).parent for image in self.images))
        files = [stream.number for stream in self._streams.values()]
        self._done.append(self.slot.worker.leave(files, folders, small))

    def wait_written(self) -> None:
        """Wait until every window is written, so that the slot is free for the next save."""
        for stream in self._streams.values():
            stream.wait()

    def finish(self) -> None:
        """Wait until all is durable: as long as the storage takes, or until the worker dies.

        A rank whose storage hangs stays here; the others see that it makes no progress, and name it.
        """
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
        begun = [stream for stream in self._streams.values() if stream.file is not None]
        self.slot.worker.give_up([stream.number for stream in begun if not stream.sealed])
        for stream in self._streams.values():
            stream.settle()
        for future in self._done:
            future.exception()
        self.slot.worker.drop([stream.number for stream in begun])


def _header(image: Image, save: str, rank: int, *, strong: bool) -> bytes:
    """The header, as long as it will be, before any sum is known."""
    header = datafile.build_header(
        image.pieces, save=save, rank=rank, section=image.section, shapes=image.shapes,
        sums="0" * datafile.sums_length(image.pieces),
        strong="0" * datafile.sums_length(image.pieces, blocks.STRONG) if strong else None,
    )  # fmt: skip
    if len(header) > datafile.MAX_HEADER:
        raise HoldfastError(
            f"{image.path} would have a header of {len(header)} bytes for {len(image.pieces)} pieces, more than the "
            f"{datafile.MAX_HEADER} that readers of safetensors accept: put the tensors under more than one first key "
            "of the state, or under shorter names"
        )
    return header


class _Sums:
    """The sums of all blocks of a file, from its bytes in file order; ``strong``: SHA-256 too."""

    def __init__(self, pieces: Sequence[Piece], *, strong: bool) -> None:
        self._strong = [""] * len(pieces) if strong else None
        self._sha256 = hashlib.sha256()
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
            if self._fresh and self._in_block == self._sizes[self._piece] <= end - at:
                at = self._feed_whole(view, at)
                continue
            n = min(end - at, self._in_block)
            self._state.update(view[at : at + n])
            if self._strong is not None:
                self._sha256.update(view[at : at + n])
            self._fresh = False
            self._in_piece -= n
            self._in_block -= n
            if not self._in_block:
                self._texts[self._piece] += self._state.hexdigest()
                if self._strong is not None:
                    self._strong[self._piece] += self._sha256.hexdigest()
                self._begin_block()
            at += n
            if not self._in_piece:
                self._next_piece()

    def _feed_whole(self, view: memoryview, at: int) -> int:
        """As many pieces of one block as are there whole, from the present one on: the short way for small tensors."""
        sizes, texts, piece, left = self._sizes, self._texts, self._piece, len(view) - at
        while piece < len(sizes) and sizes[piece] <= left and sizes[piece] <= blocks.BLOCK:
            n = sizes[piece]
            if n:  # an empty piece has no sum
                texts[piece] = xxhash.xxh3_64_hexdigest(view[at : at + n])
                if self._strong is not None:
                    self._strong[piece] = blocks.strong_sum(view[at : at + n])
            at += n
            left -= n
            piece += 1
        self._piece, self._in_piece = piece - 1, 0
        self._next_piece()
        return at

    def texts(self) -> tuple[str, str | None]:
        """All sums, once all bytes came, and the strong ones."""
        return ",".join(self._texts), None if self._strong is None else ",".join(self._strong)

    def _next_piece(self) -> None:
        while not self._in_piece and self._piece < len(self._sizes) - 1:
            self._piece += 1
            self._in_piece = self._sizes[self._piece]
        self._begin_block()

    def _begin_block(self) -> None:
        self._in_block, self._fresh = min(blocks.BLOCK, self._in_piece), True
        self._state.reset()
        if self._strong is not None:
            self._sha256 = hashlib.sha256()


def _sums_of(image: Image, slot: Slot, copier: Copier, *, strong: bool) -> _Sums:
    """The sums of a file before anything of it is staged."""
    sums = _Sums(image.pieces, strong=strong)
    for source in image.sources:
        with copier.on(source.device):
            for part in contiguous_parts(source):
                if part.device.type == "cpu":
                    sums.feed(host_view(part.data_ptr(), part.nbytes))
                else:
                    _feed_from_device(sums, part, slot, copier)
    return sums


def _feed_from_device(sums: _Sums, part: torch.Tensor, slot: Slot, copier: Copier) -> None:
    window = None
    while window is None:  # an earlier file of the same save may be on its way out of all of them
        window = slot.take(timeout=0.5)
    try:
        for at in range(0, part.nbytes, slot.window):
            n = min(slot.window, part.nbytes - at)
            copier.copy(part, at, n, window.address)
            copier.moment().wait()
            sums.feed(window.view[:n])
    finally:
        slot.give(window)


@dataclass(frozen=True)
class _Coming:
    """A window of ``stream`` that devices still copy into, until ``moment``."""

    stream: _Stream
    window: Window
    used: int
    moment: Moments


class _Stream:
    """One file under way: fills window after window in file order and hands each to the worker.

    ``file`` is its number, None until `begin`: what is filled before waits, in ``_held``.
    """

    def __init__(
        self, image: Image, file: int | None, start: int, slot: Slot, copier: Copier, coming: deque[_Coming],
        progress: Callable[[int], None], *, strong: bool = False,
    ) -> None:  # fmt: skip
        self.image, self.file, self.slot, self.copier, self.progress = image, file, slot, copier, progress
        self.sums: _Sums | None = _Sums(image.pieces, strong=strong)  # None if they are known already
        self.sealed = False
        self._held: list[tuple[Window, int]] = []
        self._made: deque[tuple[Future[None], int]] = deque()
        # Bytes that a device copies arrive later: then whole windows are summed and handed over as they land.
        self.queued = any(source.device.type != "cpu" for source in image.sources)
        self.offset = start  # in the file, of the window being filled
        self.window: Window | None = None
        self.used = 0
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
                if self.window is not None and piece.nbytes <= min(STRIDE, self.slot.window - self.used):
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
        used, end = begin, min(begin + STRIDE, self.slot.window)
        while at < len(pieces):
            source, nbytes = sources[at], pieces[at].nbytes
            if used + nbytes > end or not is_plain_memory(source):
                break
            if nbytes:
                move(window.address + used, source.data_ptr(), nbytes)
            used += nbytes
            at += 1
        if self.sums is not None and used > begin:
            self.sums.feed(window.view[begin:used])
        self.used = used
        return at

    def send(self) -> None:
        """Hand over every piece from where it lies; small and scattered ones in other memory, not much at a time."""
        small = bytearray()
        for source in self.image.sources:
            for part in contiguous_parts(source):
                memory = host_view(part.data_ptr(), part.nbytes)
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
        if not self.queued and self.sums is not None:
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
