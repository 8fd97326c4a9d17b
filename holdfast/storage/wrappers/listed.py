"""A store for the readers of other formats: few listings answer their questions, and small reads are read ahead.

`formats.detect` puts it around a store while a checkpoint is open. Never writes, and never sees later changes.
"""

from __future__ import annotations

import errno
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from holdfast.storage.store import Buffer, Entry, Got, Listing, Store

MAX_ENTRIES = 1_000_000
"""More files than any checkpoint has; a folder of more is not one checkpoint."""

FOLDERS = 3
"""How many folders below the prefix are listed one by one; after that all are listed at once."""

CHUNK = 128 << 10
"""A smaller read fetches so many bytes, aligned, for the reads that follow; larger ones go to the store."""

SMALL = 512 << 10
"""A file of no more than this is fetched whole, whatever is read of it."""

WHOLE, KEPT = 16 << 20, 64 << 20
"""How large a file is kept that is read whole, and how much is kept in all."""

_NAMES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json", "adapter_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", ".metadata", ".snapshot_metadata", "metadata.pkl", "metadata.json", "common.pt",
)  # fmt: skip
"""Files that are looked for in a store that cannot list (a web server); some of them name the others."""

_ASKERS = 8
_NOTHING = Listing([], [])


class Listed:
    """What lies at ``prefix``, a folder or a file, and beside it. A store for reading alone."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._lists = True
        self._folders: dict[str, Listing] = {}
        self._whole: set[str] = set()  # folders of which all that is below is known
        self._sizes: dict[str, int | None] = {}
        self._entries = 0
        self._listing = threading.RLock()
        self._chunks: OrderedDict[tuple[str, int, int], Future[bytes]] = OrderedDict()
        self._kept = 0
        self._keeping = threading.Lock()

    @property
    def url(self) -> str:
        return self.store.url

    # What there is

    def list(self, prefix: str, *, deep: bool) -> Listing:
        with self._listing:
            listing = self._folder(prefix)
            if not deep or not listing.folders:
                return listing
            if not any(_below(prefix, above) for above in self._whole):
                self._list_all(prefix)
            inner = (self.list(folder, deep=True).files for folder in listing.folders)
            return Listing(sorted([*listing.files, *(entry for files in inner for entry in files)]), [])

    def size(self, key: str) -> int | None:
        with self._listing:
            parent = key.rpartition("/")[0]
            if self._lists and _below(key, self.prefix):
                self._folder(key if key == self.prefix else parent)
            known = self._lists and (self._known(parent) is not None or self._known(key) not in (None, _NOTHING))
            if known or key in self._sizes:
                return self._sizes.get(key)
        nbytes = self._sizes[key] = self.store.size(key)
        return nbytes

    def _folder(self, folder: str) -> Listing:
        """What lies one level below a folder."""
        listing = self._known(folder)
        if listing is not None:
            return listing
        if not self._lists:
            return self._probed(folder)
        if folder != self.prefix and _below(folder, self.prefix):
            self._folder(self.prefix)
            return self._inner(folder)
        try:
            listing = self.store.list(folder, deep=False)
        except OSError as error:
            if not getattr(error, "unlisted", False):
                raise
            self._lists = False
            return self._probed(folder)
        self._learn(folder, listing)
        return listing

    def _inner(self, folder: str) -> Listing:
        """The same for a folder below the prefix, of which one level is known."""
        if not self._lists:
            return self._probed(folder)
        listing = self._known(folder)
        if listing is None:
            self._list_all(self.prefix if len(self._whole) >= FOLDERS else _first_below(folder, self.prefix))
            listing = self._folders.get(folder, _NOTHING)
        return listing

    def _known(self, folder: str) -> Listing | None:
        """What is known of a folder, also by what is known above it."""
        below = folder
        while below not in self._folders:
            if not below:
                return None
            below = below.rpartition("/")[0]
        if below == folder:
            return self._folders[folder]
        there = _first_below(folder, below) in self._folders[below].folders
        return None if there and below not in self._whole else _NOTHING

    def _list_all(self, folder: str) -> None:
        """Learn all that lies below a folder, at any depth."""
        folders: dict[str, tuple[list[Entry], set[str]]] = {folder: ([], set())}
        files_below = self.store.list(folder, deep=True).files
        for entry in (entry for entry in files_below if _below(entry.key, folder) and entry.key != folder):
            parent = at = entry.key.rpartition("/")[0]
            new: list[str] = []
            while at not in folders:
                new.append(at)
                at = at.rpartition("/")[0]
            for at in reversed(new):
                folders[at] = ([], set())
                folders[at.rpartition("/")[0]][1].add(at)
            folders[parent][0].append(entry)
        for key, (files, inner) in folders.items():
            self._learn(key, Listing(files, sorted(inner)))
        self._whole.add(folder)

    def _learn(self, folder: str, listing: Listing) -> None:
        self._entries += len(listing.files) + len(listing.folders)
        if self._entries > MAX_ENTRIES:
            text = f"more than {MAX_ENTRIES} files lie below {self.url}/{folder}: name the folder of one checkpoint"
            raise OSError(errno.E2BIG, text)
        # Some programs leave an empty file where a disk has a folder.
        folders = {*listing.folders}
        files = [entry for entry in listing.files if entry.nbytes or entry.key not in folders]
        self._folders[folder] = Listing(files, listing.folders)
        self._sizes.update((entry.key, entry.nbytes) for entry in files)

    # Stores that do not list

    def _probed(self, folder: str) -> Listing:
        """For the checkpoint's folder the usual files that exist; for others the files that were asked for by name."""
        if folder not in (self.prefix, self.prefix.rpartition("/")[0]):
            return Listing(sorted(self._known_files(folder)), [])
        fault: OSError | None = None
        if folder == self.prefix and folder:
            try:
                if self.size(folder) is not None:
                    return _NOTHING  # a file
            except OSError as error:  # servers answer for folders in many ways
                fault = error
        self._probe(_joined(folder, name) for name in _NAMES)
        for entry in self._known_files(folder):
            if entry.key.endswith(".index.json"):
                self._probe(_joined(folder, name) for name in self._named_by(entry.key))
        listing = Listing(sorted(self._known_files(folder)), [])
        if fault is not None:
            if not listing.files:
                raise fault
            self._sizes[folder] = None
        return listing

    def _probe(self, keys: Iterable[str]) -> None:
        lacking = [key for key in keys if key not in self._sizes]
        with ThreadPoolExecutor(_ASKERS, thread_name_prefix="holdfast-ask") as pool:
            self._sizes.update(zip(lacking, pool.map(self.store.size, lacking), strict=True))

    def _known_files(self, folder: str) -> Sequence[Entry]:
        sizes = [(key, n) for key, n in list(self._sizes.items()) if n is not None and key.rpartition("/")[0] == folder]
        return [Entry(key, n, 0.0) for key, n in sizes]

    def _named_by(self, index: str) -> set[str]:
        try:
            names = json.loads(bytes(self.get(index).data))["weight_map"].values()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return set()  # the reader of the format says what is wrong with it
        return {name for name in names if isinstance(name, str) and "/" not in name}

    # Bytes

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        nbytes = self.size(key)
        if nbytes is None:
            raise FileNotFoundError(f"there is nothing at {self.url}/{key}")
        end = nbytes if end is None else min(end, nbytes)
        if end - begin >= CHUNK and nbytes > SMALL and (end - begin < nbytes or nbytes > WHOLE):
            return self.store.get(key, begin, end)
        parts: list[Buffer] = []
        while begin < end:
            first, last = self._span(key, nbytes, begin) if end - begin < nbytes else (0, nbytes)
            data = self._chunk(key, first, last)
            part = memoryview(data)[begin - first : end - first]
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return Got(parts[0] if len(parts) == 1 else b"".join(parts), nbytes)

    def _span(self, key: str, nbytes: int, at: int) -> tuple[int, int]:
        """The chunk that a byte is read with. The last one has the rest, too: formats begin to read at the end."""
        if nbytes <= SMALL or (key, 0, nbytes) in self._chunks:
            return 0, nbytes
        number, last = at // CHUNK, nbytes // CHUNK - 1
        return (last * CHUNK, nbytes) if number >= last else (number * CHUNK, (number + 1) * CHUNK)

    def _chunk(self, key: str, begin: int, end: int) -> bytes:
        at, own = (key, begin, end), Future[bytes]()
        with self._keeping:
            future = self._chunks.setdefault(at, own)
            self._chunks.move_to_end(at)
            if future is own:
                self._kept += end - begin
                self._drop()
        if future is not own:
            return future.result()
        try:
            data = bytes(self.store.get(key, begin, end).data)
        except BaseException as error:
            with self._keeping:
                if self._chunks.get(at) is own:
                    del self._chunks[at]
                    self._kept -= end - begin
            own.set_exception(error)
            raise
        own.set_result(data)
        return data

    def _drop(self) -> None:
        """Forget what was read longest ago, but for the latest."""
        while self._kept > KEPT and len(self._chunks) > 1:
            (_, begin, end), _ = self._chunks.popitem(last=False)
            self._kept -= end - begin

    # Writing

    def create(self, key: str, data: bytes) -> bool:
        self._refuse(key)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self._refuse(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._refuse(", ".join(keys))

    def _refuse(self, key: str) -> NoReturn:
        raise OSError(errno.EROFS, f"{self.url}/{key} is of a checkpoint that was opened for reading")


def _below(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _first_below(key: str, folder: str) -> str:
    """The first step from a folder to a key below it."""
    skip = len(folder) + 1 if folder else 0
    return key[: skip + len(key[skip:].partition("/")[0])]
