"""A checkpoint's files from one home to another: summed block by block as they pass, in bounded memory, not committed.

`copy` calls `copy_files`, and so does what carries checkpoints between tiers. Never writes a manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from holdfast.commit.folder import taken
from holdfast.events import log
from holdfast.ondisk import blocks, manifest
from holdfast.ondisk.manifest import FileRecord, Manifest, is_reused, own_path, sibling_of
from holdfast.read.proved import PART, Parts, ProvedFile, damaged
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store import Buffer
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.retrying import is_transient

MEMORY, LARGE = 240 << 20, 120 << 20
"""Bytes in flight in all; and of one large file: what is read ahead, and what a store's client is sending (64 MiB)."""

WORKERS, READERS, ATTEMPTS = 16, 16, 3


@dataclass
class CopyStats:
    """Files and bytes that were copied, files and bytes that were at the target, and bytes that have no sum."""

    files: int = 0
    nbytes: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    unverified: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, other: CopyStats) -> None:
        with self._lock:
            self.files += other.files
            self.nbytes += other.nbytes
            self.skipped += other.skipped
            self.skipped_bytes += other.skipped_bytes
            self.unverified += other.unverified


def self_contained(record: Manifest) -> Manifest:
    """The manifest with what it has reused from siblings as its own files: names hold save ids, so none collide."""
    files = [FileRecord(own_path(f.path), f.bytes, f.header_bytes, f.header_digest) for f in record.data_files]
    return msgspec.structs.replace(record, files=[manifest.file_row(file) for file in files])


def sharing(record: Manifest, name: str, lender: Manifest, at: str, absent: Container[int] = ()) -> Manifest:
    """A self-contained manifest, to be committed as ``name``, with what its sibling ``at`` has too reused from there.

    Names hold save ids, so the same name, size and header are the same file. ``absent``: numbers of files that the
    ``lender`` names and does not have.
    """
    held = {own_path(file.path): file for index, file in enumerate(lender.data_files) if index not in absent}
    files = []
    for file in record.data_files:
        theirs = held.get(file.path)
        if theirs is not None and theirs[1:4] == file[1:4]:
            path = theirs.path if is_reused(theirs.path) else f"../{at}/{theirs.path}"
            if sibling_of(path)[0] != name:  # else an older save of this name has left it, and it is there already
                file = file._replace(path=path, save=theirs.save or lender.save)
        files.append(file)
    return msgspec.structs.replace(record, files=[manifest.file_row(file) for file in files])


def home(path: Place) -> StorePlace:
    """A location as a place in a store; of a local path with its siblings, from which it may have reused."""
    if path.is_remote:
        return as_store(path)
    real = path.real()
    return as_store(real.parent) / real.name


def copy_files(
    source: Place, target: Place, record: Manifest, *, into: Manifest | None = None,
    only: Callable[[str], bool] = lambda path: True, progress: Callable[[int], None] = lambda nbytes: None,
    landed: Callable[[str], None] = lambda path: None,
) -> CopyStats:  # fmt: skip
    """Bring the data files and attachments of ``record``, which lies at ``source``, to ``target``; commit nothing.

    ``into`` is what will be committed there: the same files in the same order under other paths if need be
    (`self_contained` by default). ``only``: which of its paths to copy; then ``landed`` is called with each that is
    there. ``progress`` is called with bytes, also those that need no copying; a negative number takes some back.

    What is at the target is passed over: a data file of the same name and size, an attachment of the same content.
    Everything else is whole, durable and proved on return. Raises Damaged if something at the source is missing or
    altered, StorageError; then files that were finished stay.
    """
    into = into or self_contained(record)
    work = _Work(home(source), home(target), CopyStats(), progress, landed)
    there = work.target.sizes_below()
    for (path, nbytes, digest), (own, _, _) in zip(record.attachments, into.attachments, strict=True):
        if only(own):
            work.attach(path, own, nbytes, digest, there=own in there)
    files = []
    for file, at in zip(record.data_files, into.data_files, strict=True):
        if is_reused(at.path) or not only(at.path):
            continue
        if there.get(at.path) == file.bytes:
            work.stats.add(CopyStats(skipped=1, skipped_bytes=file.bytes))
            progress(file.bytes)
            landed(at.path)
        else:
            files.append((file, at.path))
    work.copy(files)
    return work.stats


class _Work:
    """One run of `copy_files`."""

    def __init__(
        self, source: StorePlace, target: StorePlace, stats: CopyStats, progress: Callable[[int], None],
        landed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.source, self.target, self.stats, self.progress, self.landed = source, target, stats, progress, landed
        self._free = threading.Condition()
        self._taken = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()

    def copy(self, files: Sequence[tuple[FileRecord, str]]) -> None:
        """Copy files, as many at once as memory allows. The first failure stops them all, and is raised."""
        with (
            ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-copy-read") as readers,
            ThreadPoolExecutor(WORKERS, thread_name_prefix="holdfast-copy") as workers,
        ):
            try:
                for file, path in files:
                    weight = min(2 * file.bytes, LARGE)
                    with self._free:
                        # It ends with the files under way: with the patience of the storage or store.
                        self._free.wait_for(lambda: self._stop.is_set() or self._taken + weight <= MEMORY)
                        self._taken += weight
                    if self._stop.is_set():
                        break
                    workers.submit(self._one, file, path, weight, readers)
                workers.shutdown()
            finally:
                self._stop.set()
        if self._failure is not None:
            raise self._failure

    def _one(self, file: FileRecord, path: str, weight: int, readers: ThreadPoolExecutor) -> None:
        try:
            self._carry(file, path, readers)
            self.stats.add(CopyStats(files=1, nbytes=file.bytes))
            self.landed(path)
        except BaseException as error:  # noqa: BLE001 - raised by `copy` once all have stopped
            with self._free:
                self._failure = self._failure or error
            self._stop.set()
        finally:
            with self._free:
                self._taken -= weight
                self._free.notify_all()

    def _carry(self, file: FileRecord, path: str, readers: ThreadPoolExecutor) -> None:
        place = self.target / path
        for attempt in range(1, ATTEMPTS + 1):
            source = ProvedFile(self.source, file, self._stop)
            done = _Count(self.progress)
            try:
                if file.bytes <= PART:
                    chunks: Sequence[Buffer] | Parts = [source.whole()]
                    done(file.bytes)
                else:
                    chunks = Parts(source, readers, done)
                with naming(place, "write"):
                    place.store.put(place.key, chunks, file.bytes)
            except OSError as error:
                # A store repeats an upload itself only while it has taken nothing of what comes in parts.
                cause = error if is_transient(error) else error.__cause__
                if attempt == ATTEMPTS or not is_transient(cause) or self._stop.is_set():
                    raise
                log.info("copying %s failed, again: %s", place, error)
                self.progress(-done.nbytes)
            else:
                self.stats.add(CopyStats(unverified=source.unverified))
                return

    def attach(self, path: str, own: str, nbytes: int, digest: str, *, there: bool) -> None:
        """Create an attachment; one that is there must be the same, as it may belong to what is committed."""
        place = self.target / own
        if there or not self._create(place, self._attachment(path, nbytes, digest)):
            data = place.read_small()
            if len(data) != nbytes or blocks.digest(data) != digest:
                raise taken(f"{self.target} holds other files ({own})")
            self.stats.add(CopyStats(skipped=1, skipped_bytes=nbytes))
        else:
            self.stats.add(CopyStats(files=1, nbytes=nbytes))
        self.progress(nbytes)
        self.landed(own)

    def _create(self, place: StorePlace, data: bytes) -> bool:
        with naming(place, "create"):
            return place.store.create(place.key, data)

    def _attachment(self, path: str, nbytes: int, digest: str) -> bytes:
        place = self.source / path
        data = b""
        for _ in range(2):  # on the way a bit may have flipped
            try:
                data = place.read_small()
            except FileNotFoundError:
                raise damaged(place, "is missing") from None
            if len(data) == nbytes and blocks.digest(data) == digest:
                return data
        raise damaged(place, "is altered: its digest is not the manifest's")


class _Count:
    """Bytes reported as done, to be taken back if they were not."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.nbytes, self._progress = 0, progress

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._progress(nbytes)
