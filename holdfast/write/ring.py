"""A few windows that go round: the staging memory of one save that is waited for, and the threads that write it.

`save` makes one; parts of torch's saves, and of lost ranks' shares, are written through one at once. Never grows with
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.buffers.device import Moments, devices_of
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.place import Place
from holdfast.write.arena import WINDOW, Slot, room_for
from holdfast.write.image import Image, OpenFiles
from holdfast.write.worker import ThreadWorker
from holdfast.write.write import Writing

WINDOWS = 4

PART, PARTS = 8 << 20, 12
"""Windows for a store: as large as a part of an upload, and so many that latency is hidden; 96 MiB."""


class Ring:
    """A few windows that go round, and threads that write them, for one save."""

    def __init__(self, *, remote: bool = False) -> None:
        self._worker: ThreadWorker | None = None
        self._slots: list[Slot] = []
        self._window, self._most = (PART, PARTS) if remote else (WINDOW, WINDOWS)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()
        for slot in self._slots:
            slot.close()

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """As much as all files need together, but no more than a few windows."""
        self._worker = self._worker or ThreadWorker()
        slot = Slot(0, self._worker, window=self._window)
        slot.reserve(min(self._most * self._window, max(room_for(sizes, self._window), SECTOR)), pinned=pinned)
        self._slots.append(slot)
        return slot

    def give(self) -> None:
        """The memory goes when the ring does."""


def write_at_once(
    images: Sequence[Image], folder: Place, *, save: str, rank: int, files: OpenFiles,
    progress: Callable[[int], None], small: Sequence[tuple[str, bytes]] = (),
) -> list[FileRecord]:  # fmt: skip
    """Write data files and then ``small`` ones, by relative path, and wait until all are durable.

    ``files`` collects what was opened, for the caller to close, or delete if this raises: StorageError.
    """
    files.paths += [folder / path for path, _ in small]
    folder.make_folders(image.section for image in images)
    sources = [tensor for image in images for tensor in image.sources]
    pinned = any(tensor.device.type != "cpu" for tensor in sources)
    with Ring(remote=folder.is_remote) as ring:
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
