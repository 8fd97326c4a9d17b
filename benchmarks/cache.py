"""Cold and warm: files put out of the page cache, or all of them into it.

Called by the bench between jobs, in its own process.
Never assumes that a page is gone: it counts what stayed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def files_in(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def on_disk(folder: Path) -> int:
    """Bytes of the disk that a folder's files take."""
    return sum(path.stat().st_blocks * 512 for path in files_in(folder))


def make_cold(folder: Path) -> str:
    """Put every file out of the page cache; how that was done, and what stayed if any did."""
    os.sync()
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if not (stayed := cached_bytes(folder)):
        return "posix_fadvise(DONTNEED) on each file"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return f"posix_fadvise(DONTNEED) on each file, {stayed} bytes stayed cached"
    return f"/proc/sys/vm/drop_caches, {cached_bytes(folder)} bytes stayed cached"


def make_warm(folder: Path) -> None:
    """Read every file through the page cache."""
    for path in files_in(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def cached_bytes(folder: Path) -> int:
    """Bytes of a folder's files that are in the page cache."""
    pages = 0
    for path in files_in(folder):
        size = path.stat().st_size
        if not size:
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(mapped)
            if _libc.mincore(ctypes.addressof(first), size, present) != 0:
                raise OSError(ctypes.get_errno(), f"cannot ask which pages of {path} are cached")
            del first
            pages += sum(byte & 1 for byte in bytes(present))
    return pages * mmap.PAGESIZE
