"""A file system in small: folders of names, files of bytes, and the operations that change either, one after the other.

`record` makes a `Trace` of what the library did, `profiles` says which part of one may outlive a power cut, `Disk` is
what is there then. Never touches a real file but in `snapshot` and `materialise`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

ROOT = 0
"""The number of the topmost folder. Folders and files have a number each, as inodes have."""


@dataclass(frozen=True)
class Enter:
    """Names of folders change, all at once or not at all: (folder, name, what it leads to from now on or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Size:
    """A file is cut to, or (``grows``) reserves, so many bytes: what is new reads as zeros."""

    file: int
    nbytes: int
    grows: bool = False


@dataclass(frozen=True)
class Write:
    """Bytes at an offset of a file."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """fsync of a file."""

    file: int


@dataclass(frozen=True)
class SyncFolder:
    """fsync of a folder."""

    folder: int


@dataclass(frozen=True)
class Mark:
    """What the program knows at this moment: ``version`` of its state is promised to be durable."""

    version: int


Op = Enter | Size | Write | Sync | SyncFolder | Mark


@dataclass
class Disk:
    """Folders by number, each a table of names; files by number. ``folders`` and ``files`` never share a number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk({number: dict(names) for number, names in self.folders.items()}, dict(self.files))

    def apply(self, op: Op) -> None:
        """Do it, whole."""
        if isinstance(op, Enter):
            for folder, name, target in op.changes:
                if target is None:
                    self.folders[folder].pop(name, None)
                else:
                    self.folders[folder][name] = target
        elif isinstance(op, Size):
            self.files[op.file] = resized(self.files[op.file], op)
        elif isinstance(op, Write):
            self.files[op.file] = written(self.files[op.file], op.offset, op.data)

    def find(self, path: str) -> int | None:
        """What a path below the topmost folder leads to."""
        at: int | None = ROOT
        for part in path.split("/") if path else ():
            at = self.folders[at].get(part) if at in self.folders else None
            if at is None:
                return None
        return at

    def tree(self) -> Tree:
        """All that can be reached."""
        tree = Tree([], {})
        stack = [("", ROOT)]
        while stack:
            path, number = stack.pop()
            for name, target in self.folders[number].items():
                below = f"{path}/{name}" if path else name
                if target in self.folders:
                    tree.folders.append(below)
                    stack.append((below, target))
                else:
                    tree.files[below] = (target, self.files[target])
        tree.folders.sort()
        return tree


@dataclass
class Tree:
    """Folders by their paths, and files: the number (the same for all links of one) and the bytes."""

    folders: list[str]
    files: dict[str, tuple[int, bytes]]

    def contents(self) -> dict[str, bytes]:
        return {path: data for path, (_, data) in sorted(self.files.items())}

    def digest(self) -> bytes:
        """Equal for trees that no program can tell apart."""
        first: dict[int, str] = {}
        told = blake2b("\0".join(self.folders).encode(), digest_size=16)
        for path, (number, data) in sorted(self.files.items()):
            leader = first.setdefault(number, path)
            told.update(f"\0\0{path}\0{leader}\0{len(data)}\0".encode())
            if leader == path:
                told.update(data)
        return told.digest()

    def materialise(self, at: Path) -> None:
        """Make it in a folder that is there and empty; links of one file are links."""
        base = os.fspath(at)
        for folder in self.folders:  # sorted, so that what is above comes first
            os.mkdir(f"{base}/{folder}")
        first: dict[int, str] = {}
        for path, (number, data) in self.files.items():
            whole = f"{base}/{path}"
            if number in first:
                os.link(first[number], whole)
            else:
                first[number] = whole
                fd = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                os.write(fd, data)
                os.close(fd)


def resized(data: bytes, op: Size) -> bytes:
    if op.nbytes <= len(data):
        return data if op.grows else data[: op.nbytes]
    return data + bytes(op.nbytes - len(data))


def written(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset].ljust(offset, b"\0") + new + data[offset + len(new) :]


def snapshot(at: Path) -> tuple[Disk, dict[int, int]]:
    """A real folder as a disk, and the numbers of its files by their inodes."""
    disk = Disk()
    numbers: dict[int, int] = {}

    def look(folder: Path, number: int) -> None:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False):
                new = fresh()
                disk.folders[new] = {}
                disk.folders[number][entry.name] = new
                look(Path(entry.path), new)
            else:
                status = entry.stat(follow_symlinks=False)
                if status.st_ino not in numbers:
                    new = numbers[status.st_ino] = fresh()
                    disk.files[new] = Path(entry.path).read_bytes()
                disk.folders[number][entry.name] = numbers[status.st_ino]

    def fresh() -> int:
        return 1 + len(disk.folders) + len(disk.files)

    look(at, ROOT)
    return disk, numbers


@dataclass
class Trace:
    """What was done to a disk, in order; ``start`` is durable, ``root`` was its topmost folder.

    ``threads``: who did each, ``calls``: what it was called. ``left``: what was really there at the end.
    """

    start: Disk
    root: Path = Path()
    ops: list[Op] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    made_files: list[int] = field(default_factory=list)
    made_folders: list[int] = field(default_factory=list)
    left: Tree | None = None

    def replay(self, cut: int | None = None) -> Disk:
        """The disk after all operations before the cut (all), none of them lost."""
        disk = self.start.copy()
        disk.files.update(dict.fromkeys(self.made_files, b""))
        disk.folders.update((number, {}) for number in self.made_folders)
        for op in self.ops[:cut]:
            disk.apply(op)
        return disk

    def marks(self) -> Iterator[tuple[int, int]]:
        """Versions that are promised, each with the number of operations before it."""
        for index, op in enumerate(self.ops):
            if isinstance(op, Mark):
                yield index, op.version
