"""The writer: images of data files are copied into windows of a slot and handed to a worker, summed on the way.

`save` and the Saver make a `Writing`. Sees names, bytes and offsets: no ranks, no plans. Host memory is the slot,
whatever the size of the state.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from holdfast.buffers.device import Copier, Moments
from holdfast.ondisk import blocks, datafile
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.write.arena import Slot, room_for
from holdfast.write.image import KEPT, Image, OpenFiles, Written, header_of
from holdfast.write.stream import Coming, Stream
from holdfast.write.sums import Sums, sums_of


class Writing:
    """The data files of one save on one rank, on their way to disk or to a store.

    A store takes a file from its first byte to its last, and the first are the header, which holds the sums of all
    others. So a file is handed over once it is all staged, or, if the slot cannot hold all files at once, its tensors
    are summed before they are staged. If nothing changes before the save has ended (``still``), tensors in host memory
    are not staged at all: a store takes them from where they lie. ``strong``: headers hold SHA-256 sums too.

    Made by making them all, so that a full disk is found before any copying. Then `stage` each image once, in any
    order, then `finish`, which waits until all is durable. The folders exist already; ``files`` collects what was
    opened, for the caller to close or delete. A failure of the worker is raised by whichever call meets it: a
    StorageError naming the file.
    """

    def __init__(
        self, images: Sequence[Image], folder: Place, *, save: str, rank: int, slot: Slot, files: OpenFiles,
        progress: Callable[[int], None], after: Moments, still: bool = False, strong: bool = False,
    ) -> None:  # fmt: skip
        self.images, self.folder, self.slot = list(images), folder, slot
        self.copier = Copier(after)
        self._written: dict[str, Written] = {}
        self._headers: dict[str, bytes] = {}
        self._done: list[Future[None]] = []
        self._streams: dict[str, Stream] = {}
        self._coming: deque[Coming] = deque()
        self._landed = False
        self._save, self._rank, self._still, self._strong = save, rank, still, strong
        self._sums_first = room_for([image.nbytes for image in self.images], slot.window) > slot.nbytes
        slot.begin()
        try:
            for image in self.images:
                self._open(image, files, progress)
        except BaseException:
            self.close()  # a writer process that kept the first files open would keep their space on a full disk
            raise

    def _open(self, image: Image, files: OpenFiles, progress: Callable[[int], None]) -> None:
        header = header_of(image, self._save, self._rank, strong=self._strong)
        self._headers[image.path] = header
        path, size = self.folder / image.path, len(header) + image.nbytes
        number = None
        if path.has_descriptors:
            fd, direct = path.open_to_write(size)
            files.paths.append(path)
            if len(self._streams) < KEPT:
                files.descriptors.append(fd)
                number = self.slot.worker.open(path, fd, direct=direct)
            else:
                os.close(fd)
                number = self.slot.worker.open(path, None, direct=direct)
        else:
            files.paths.append(path)
        stream = Stream(
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
            self._begin(stream, sums_of(image, self.slot, self.copier, strong=self._strong))
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
        self._landed = True

    def _begin(self, stream: Stream, sums: Sums) -> None:
        """The header of a file is known: from now on it goes to the store."""
        image = stream.image
        header = self._headers[image.path] = datafile.with_sums(self._headers[image.path], *sums.texts())
        path = self.folder / image.path
        if stream.file is None and not path.has_descriptors:
            stream.begin(self.slot.worker.begin(as_store(path), header, len(header) + image.nbytes))
        self._written[image.path] = Written(
            image.path, len(header) + image.nbytes, len(header), blocks.digest(header),
            blocks.strong_sum(header) if self._strong else "",
        )  # fmt: skip

    def _seal(self, stream: Stream) -> None:
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

    def leave(self, small: Sequence[tuple[Place, bytes]]) -> None:
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
        if not self._landed:
            # Into windows that are handed over next to another save, and out of tensors that may be freed.
            self.copier.give_up()
        while self._coming:
            self.slot.give(self._coming.popleft().window)
        begun = [stream for stream in self._streams.values() if stream.file is not None]
        self.slot.worker.give_up([stream.number for stream in begun if not stream.sealed])
        for stream in self._streams.values():
            stream.settle()
        for future in self._done:
            future.exception()
        self.slot.worker.drop([stream.number for stream in begun])
