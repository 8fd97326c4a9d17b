"""A place in a store: its key, with the part of pathlib's words that a store can answer.

`location` and `at` make one of a URL. Never keeps what it has seen of the store.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import total_ordering
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from holdfast.storage.cloud.conditions import create_once
from holdfast.storage.naming import naming, naming_unless_missing
from holdfast.storage.place import LIVING, Place
from holdfast.storage.store import Store
from holdfast.storage.wrappers.wrapper import nested


@total_ordering
@dataclass(frozen=True, eq=False)
class StorePlace(Place):
    """A file or folder of a ``store``, by its ``key`` (without ``/`` at either end; empty for all of the store)."""

    is_remote = True
    has_locks = has_folders = has_links = has_descriptors = False

    store: Store
    key: str

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePlace) and str(self) == str(other)

    def __lt__(self, other: StorePlace) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    # What follows from the key alone

    def __truediv__(self, below: str | PurePosixPath) -> StorePlace:
        parts: list[str] = []
        for part in [*self.key.split("/"), *str(below).split("/")]:
            if part == "..":
                del parts[-1:]
            elif part not in ("", "."):
                parts.append(part)
        return StorePlace(self.store, "/".join(parts))

    joinpath = __truediv__

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.key)

    @property
    def name(self) -> str:
        return self._pure.name

    @property
    def stem(self) -> str:
        return self._pure.stem

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._pure.suffixes

    @property
    def parts(self) -> tuple[str, ...]:
        return self._pure.parts

    @property
    def parent(self) -> StorePlace:
        return StorePlace(self.store, self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[StorePlace]:
        return [StorePlace(self.store, "" if key == "." else key) for key in map(str, self._pure.parents)]

    def with_name(self, name: str) -> StorePlace:
        return self.parent / name

    def with_suffix(self, suffix: str) -> StorePlace:
        return StorePlace(self.store, str(self._pure.with_suffix(suffix)))

    def relative_to(self, above: StorePlace) -> PurePosixPath:
        """The way from ``above`` to here. Raises ValueError if this does not lie below it."""
        if self.store.url != above.store.url:
            raise ValueError(f"{self} does not lie below {above}: it is in another store")
        return PurePosixPath(self.key).relative_to(above.key)

    # What the store knows

    @property
    def no_saves(self) -> str:
        return str(getattr(self._innermost, "no_saves", ""))

    @property
    def takes_pushes(self) -> bool:
        return bool(getattr(self._innermost, "takes_pushes", False))

    @property
    def commit(self) -> str:
        with naming(self, "open"):
            return str(getattr(self._innermost, "commit", ""))

    @property
    def _innermost(self) -> object:
        return [*nested(self.store)][-1]

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        with naming(self, "look for"):
            return bool(self.key) and self.store.size(self.key) is not None

    def is_dir(self) -> bool:
        """Whether anything lies below; a store has no empty folders."""
        listing = self.store.list(self.key, deep=False)
        return bool(listing.files or listing.folders)

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        """Kind and size as of a file on disk; no time, which not every store tells. Raises FileNotFoundError."""
        nbytes = self.store.size(self.key) if self.key else None
        if nbytes is not None:
            return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, nbytes, 0, 0, 0))
        if self.is_dir():
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        raise FileNotFoundError(f"there is nothing at {self}")

    def iterdir(self) -> Iterator[StorePlace]:
        listing = self.store.list(self.key, deep=False)
        for key in [*listing.folders, *(entry.key for entry in listing.files)]:
            yield StorePlace(self.store, key)

    def rglob(self, pattern: str) -> Iterator[StorePlace]:
        """Files below, at any depth, whose name fits ``pattern``."""
        for entry in self.store.list(self.key, deep=True).files:
            if fnmatchcase(entry.key.rpartition("/")[2], pattern):
                yield StorePlace(self.store, entry.key)

    def glob(self, pattern: str) -> Iterator[StorePlace]:
        """Files and folders below that fit ``pattern``, component by component (no ``**``)."""
        first, _, rest = pattern.partition("/")
        for place in self.iterdir():
            if fnmatchcase(place.name, first):
                if rest:
                    yield from place.glob(rest)
                else:
                    yield place

    def read_bytes(self) -> bytes:
        return bytes(self.store.get(self.key).data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb", buffering: int = 1 << 20) -> BinaryIO:
        """The file for reading in any order. Raises FileNotFoundError; ValueError for a mode that writes."""
        if mode != "rb":
            raise ValueError(f"{self} can be opened with mode 'rb' only, not {mode!r}")
        raw = _Reader(self, self.stat().st_size)
        return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, max(buffering, 1 << 16)))

    def real(self) -> StorePlace:
        return self

    def modified(self) -> float:
        beside = self.store.list(self.parent.key, deep=False).files
        return next((entry.modified for entry in beside if entry.key == self.key), 0.0)

    # Small files

    def read_small(self) -> bytes:
        with naming_unless_missing(self, "read"):
            return self.read_bytes()

    def read_start(self, nbytes: int) -> tuple[bytes, int]:
        with naming_unless_missing(self, "read"):
            start = self.store.get(self.key, 0, nbytes)
            return bytes(start.data), start.nbytes

    def write_small(self, data: bytes) -> None:
        with naming(self, "write"):
            self.store.put(self.key, [data], len(data))

    def create_small(self, data: bytes, temporary: str) -> bool:
        with naming(self, "create"):
            return create_once(self.store, self.key, data, temporary)

    def replace_small(self, data: bytes, temporary: str) -> None:
        self.write_small(data)

    def size(self) -> int | None:
        try:
            with naming_unless_missing(self, "look for"):
                return self.stat().st_size
        except FileNotFoundError:
            return None

    def delete(self) -> None:
        with naming(self, "delete"):
            self.store.delete([self.key])

    # What lies below

    def file_names(self) -> list[str]:
        with naming(self, "list"):
            return [entry.key.rpartition("/")[2] for entry in self.store.list(self.key, deep=False).files]

    def folder_names(self) -> list[str]:
        """In a store one request for a thousand of them."""
        with naming(self, "list"):
            return [key.rpartition("/")[2] for key in self.store.list(self.key, deep=False).folders]

    def sizes_below(self) -> dict[str, int]:
        return {path: nbytes for path, nbytes, _ in self._entries()}

    def modified_below(self) -> dict[str, float]:
        return {path: modified for path, _, modified in self._entries()}

    def files_below(self) -> list[str]:
        return list(self.sizes_below())

    def files_near(self, *, levels: int) -> list[str]:
        return self.files_below()

    def _entries(self) -> list[tuple[str, int, float]]:
        skip = len(self.key) + 1 if self.key else 0
        with naming(self, "list"):
            entries = self.store.list(self.key, deep=True).files
        return [(entry.key[skip:], entry.nbytes, entry.modified) for entry in entries]

    def living(self, paths: list[str]) -> list[str]:
        if not paths:
            return []
        since = time.time() - LIVING
        young = {path for path, _, modified in self._entries() if modified > since}
        return [path for path in paths if path in young]

    def may_live(self, paths: list[str]) -> bool:
        return bool(self.living(paths))

    def make_folder(self, *_: object) -> None:
        """A store has no folders: there is nothing to do."""

    make_folders = make_home = sync_folder = delete_if_empty = delete_empty_folders = make_folder


class _Reader(io.RawIOBase):
    """A file of a store as a stream."""

    def __init__(self, place: StorePlace, nbytes: int) -> None:
        super().__init__()
        self._place, self._nbytes, self._at = place, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._nbytes)
        if end <= self._at:
            return 0
        data = memoryview(self._place.store.get(self._place.key, self._at, end).data)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
