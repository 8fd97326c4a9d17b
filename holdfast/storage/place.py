"""A place: where a file or folder lies, on local disk or in a store, and all that can be done there.

`location` makes one of what a user writes. Never keeps what it has seen of a disk or store.

We rejected an interface with only what both kinds of place can do, because a local disk would lose its locks, direct
I/O, and descriptors that outlive a process.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

LIVING = 6 * 3600.0
"""Seconds for which a file that no manifest names may belong to a save under way, where there are no locks."""


class Place(ABC):
    """A file or folder on local disk (`LocalPlace`) or in a store (`StorePlace`).

    It has pathlib's words, and methods that name the file in what they raise (StorageError). What only one of the two
    kinds can do is asked by a capability.
    """

    is_remote: ClassVar[bool]
    """Whether each question is a request over a network: ask once, and many at the same time."""
    has_locks: ClassVar[bool]
    """Whether the files of a save under way are locked; elsewhere only their age tells."""
    has_folders: ClassVar[bool]
    """Whether folders are made and deleted, and may be empty."""
    has_links: ClassVar[bool]
    """Whether a file can have several names, and a name can lead elsewhere."""
    has_descriptors: ClassVar[bool]
    """Whether files are opened to be written and read at any offset; elsewhere they are sent whole."""

    @property
    def no_saves(self) -> str:
        """Why nothing can be saved here, and what to do instead; empty where saves may go."""
        return ""

    @property
    def takes_pushes(self) -> bool:
        """Whether all files of a target are pushed here in one commit, and none by itself."""
        return False

    @property
    def commit(self) -> str:
        """The commit that is read; empty where there are none. Raises StorageError."""
        return ""

    # pathlib's words

    if TYPE_CHECKING:

        def __fspath__(self) -> str:
            """For system calls, where there are descriptors; `os.fspath` raises TypeError for every other place."""

    @property
    @abstractmethod
    def name(self) -> str: ...
    @property
    @abstractmethod
    def stem(self) -> str: ...
    @property
    @abstractmethod
    def suffix(self) -> str: ...
    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]: ...
    @property
    @abstractmethod
    def parent(self) -> Self: ...
    @property
    @abstractmethod
    def parents(self) -> Sequence[Self]: ...
    @abstractmethod
    def __truediv__(self, below: str | PurePosixPath) -> Self: ...
    @abstractmethod
    def with_name(self, name: str) -> Self: ...
    @abstractmethod
    def relative_to(self, above: Any, /) -> PurePosixPath: ...
    @abstractmethod
    def __lt__(self, other: Any) -> bool: ...
    @abstractmethod
    def exists(self) -> bool: ...
    @abstractmethod
    def is_file(self) -> bool:
        """Whether there is a file of this name. Raises StorageError if that cannot be known."""

    @abstractmethod
    def is_dir(self) -> bool: ...
    @abstractmethod
    def is_symlink(self) -> bool: ...
    @abstractmethod
    def stat(self) -> os.stat_result: ...
    @abstractmethod
    def iterdir(self) -> Iterator[Self]: ...
    @abstractmethod
    def glob(self, pattern: str) -> Iterator[Self]: ...
    @abstractmethod
    def open(self, mode: Any = "rb", buffering: int = 1 << 20) -> Any:
        """The file for reading in any order."""

    @abstractmethod
    def read_bytes(self) -> bytes: ...

    @abstractmethod
    def real(self) -> Self:
        """Where links lead; in a store there are none."""

    @abstractmethod
    def modified(self) -> float:
        """When a file was last written, in seconds since the epoch; 0.0 if a store does not tell."""

    # Small files

    @abstractmethod
    def read_small(self) -> bytes:
        """All bytes of a small file. Raises FileNotFoundError as it is, anything else as StorageError."""

    @abstractmethod
    def read_start(self, nbytes: int) -> tuple[bytes, int]:
        """The first bytes of a file, and how long all of it is. Raises FileNotFoundError, StorageError."""

    @abstractmethod
    def write_small(self, data: bytes) -> None:
        """Write a small file whole and durably under its final name. An older one is replaced in one step."""

    @abstractmethod
    def create_small(self, data: bytes, temporary: str) -> bool:
        """Create a small file whole and durably, only if there is none: False if the name is taken.

        ``temporary`` is a name in the same folder for the moments before, which nobody else uses. A crash leaves
        either nothing, the temporary file, or the whole file.
        """

    @abstractmethod
    def replace_small(self, data: bytes, temporary: str) -> None:
        """Replace a small file in one durable step: at any moment either the old or the new one is there."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes of a file; None if there is none. Raises StorageError."""

    @abstractmethod
    def delete(self) -> None:
        """Delete a file, if it is there."""

    # What lies below

    @abstractmethod
    def file_names(self) -> list[str]:
        """Names of the files in this folder; links count. Raises StorageError, also if there is no folder on disk."""

    @abstractmethod
    def folder_names(self) -> list[str]:
        """Names of the folders in this folder; empty if there is none."""

    @abstractmethod
    def files_below(self) -> list[str]:
        """Relative paths (with ``/``) of all files in this folder, sorted; empty if there is no folder."""

    @abstractmethod
    def sizes_below(self) -> dict[str, int]:
        """Relative paths of all files in this folder with their bytes."""

    @abstractmethod
    def modified_below(self) -> dict[str, float]:
        """When each file below was last modified, in Unix seconds, by its path."""

    @abstractmethod
    def files_near(self, *, levels: int) -> list[str]:
        """The files that lie at most so many folders deep, the upper ones first, of a folder with however many.

        Of each folder no more than 1,000 entries are looked at, of all no more than 5,000. A folder that is not looked
        into, for it is too deep or cannot be listed, is returned too, with a ``/`` at its end. Raises StorageError if
        the folder itself cannot be listed.
        """

    @abstractmethod
    def living(self, paths: list[str]) -> list[str]:
        """Which of these files of this folder belong to a save under way: locked, or else too young to tell."""

    @abstractmethod
    def may_live(self, paths: list[str]) -> bool:
        """Whether a save under way may need these files of this folder: for a caller that would delete them.

        Where a disk has no locks, only what is old is known to be dead, as in a store.
        """

    # Where there are folders (`has_folders`); elsewhere there is nothing to do

    @abstractmethod
    def make_folder(self) -> None:
        """Create this folder and its parents, durably: each new entry is synced into its own parent."""

    @abstractmethod
    def make_folders(self, names: Iterable[str], /) -> None:
        """`make_folder` for many folders below this one, which is synced once."""

    @abstractmethod
    def make_home(self) -> None:
        """`make_folder` for a checkpoint. One that is there may be of a process that died before it was durable."""

    @abstractmethod
    def sync_folder(self) -> None:
        """Make the entries of this folder durable."""

    @abstractmethod
    def delete_if_empty(self) -> None:
        """Delete this folder if it holds nothing."""

    @abstractmethod
    def delete_empty_folders(self) -> None:
        """Delete every folder at or below this one that holds nothing."""

    # Where there are descriptors (`has_descriptors`) and locks (`has_locks`)

    def open_to_write(self, nbytes: int) -> tuple[int, bool]:
        """Create a new file of ``nbytes`` for large aligned writes: (descriptor, whether it writes directly).

        The file carries a shared lock until it is closed, which tells a save under way from the orphans of a dead one.
        """
        raise io.UnsupportedOperation(f"{self} has no descriptors")

    def open_to_read(self) -> tuple[int, int | None]:
        """Descriptors of an existing file: through the page cache, and directly (None where that cannot be had)."""
        raise io.UnsupportedOperation(f"{self} has no descriptors")

    def open_locked(self) -> int:
        """A descriptor of an existing file that, as a rule, marks it as part of a save under way until it is closed."""
        raise io.UnsupportedOperation(f"{self} has no descriptors")

    def in_use(self) -> bool:
        """Whether a living process has this file open as part of a save under way."""
        raise io.UnsupportedOperation(f"{self} has no locks")
