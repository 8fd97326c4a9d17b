"""A few windows that go round: the staging memory of one save that is waited for, and the threads that write it.

`save` makes one; parts of torch's saves, and of lost ranks' shares, are written through one at once. Never grows with
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine import storage
from holdfast.engine.arena import WINDOW, Slot, windows_for
from holdfast.engine.courier import SECTOR
from holdfast.engine.device import Moments, devices_of
from holdfast.engine.image import Image, OpenFiles
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.worker import ThreadWorker
from holdfast.engine.write import Writing
from holdfast.ondisk.manifest import FileRecord

WINDOWS = 4

PART, PARTS = 8 << 20, 12
"""Windows for a store: as large as a part of an upload, and so many that latency is hidden; 96 MiB."""


class Ring:
    """A few windows that go round, and threads that write them, for one save."""

    def __init__(self, *, remote: bool = False) -> None:
        self._worker = ThreadWorker()
        self._slots: list[Slot] = []
        self._window, self._most = (PART, PARTS) if remote else (WINDOW, WINDOWS)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        for slot in self._slots:
            slot.close()

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """Windows as large as the largest file needs; for a store, as all files need together; no more than a few."""
        largest = max([1, *sizes])
        window = min(self._window, -(-largest // SECTOR) * SECTOR)
        slot = Slot(0, self._worker, window=window)
        count = windows_for(sizes if self._window == PART else [largest], window) or 1
        slot.reserve(min(self._most, count), pinned=pinned)
        self._slots.append(slot)
        return slot

    def give(self) -> None:
        """The memory goes when the ring does."""


def write_at_once(
    images: Sequence[Image], folder: Location, *, save: str, rank: int, files: OpenFiles,
    progress: Callable[[int], None], small: Sequence[tuple[str, bytes]] = (),
) -> list[FileRecord]:  # fmt: skip
    """Write data files and then ``small`` ones, by relative path, and wait until all are durable.

    ``files`` collects what was opened, for the caller to close, or delete if this raises: StorageError.
    """
    files.paths += [folder / path for path, _ in small]
    for image in images:
        storage.make_folder(folder / image.section)
    sources = [tensor for image in images for tensor in image.sources]
    pinned = any(tensor.device.type != "cpu" for tensor in sources)
    with Ring(remote=isinstance(folder, Place)) as ring:
        writing = Writing(
            images, folder, save=save, rank=rank, files=files, progress=progress,
            slot=ring.take([image.nbytes for image in images], pinned=pinned), after=Moments.now(devices_of(sources)),
        )  # fmt: skip
        try:
            for image in images:
                writing.stage(image)
            writing.land()
            written = writing.parts()
            writing.leave([(folder / path, data) for path, data in small])
            writing.wait_written()
            writing.finish()
        finally:
            writing.close()
    return [FileRecord(w.path, w.bytes, w.header_bytes, w.header_digest) for w in written]
