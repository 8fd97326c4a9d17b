"""Every system call on local files, each in one place: so that a test can see all of them, and let any of them fail.

Called wherever a local disk is read or written, in the trainer and in the writer process. Never decides anything: no
retries, no durability, no texts of errors; and it needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from stat import S_ISDIR as is_folder
from stat import S_ISREG as is_regular
from typing import Any, NamedTuple, TypeVar

SECTOR = 4096
"""Direct I/O moves multiples of this many bytes between addresses and offsets that are multiples of it."""

Path = str | os.PathLike[str]
Result = TypeVar("Result")


class Call(NamedTuple):
    """One system call, before it is made.

    ``verb``: "create", "open", "write", "read", "sync", "cut", "reserve", "link", "replace", "rename" (to a name that
    is free), "exchange", "delete", "make folder", "remove folder", "sync folder", "list" or "stat". ``target``: the
    second path of those that have two, which is the new name. ``offset``: in the file; -1 is its end; for "cut" and
    "reserve" the length. ``data``: what is written, or the memory to be filled (None if the bytes are returned).
    """

    verb: str
    path: str
    target: str = ""
    offset: int = 0
    data: Any = None
    fd: int = -1


Hook = Callable[[Call, Callable[[], Any]], Any]
"""``hook(call, do)``: does it by ``do()`` and answers what that returned, or does something else, or raises OSError.

One that has a method ``travel`` is hooked to the calls of the writer process too: ``(module, told, descriptors)``, of
which ``arrive(told, descriptors)`` of that module, which imports the standard library alone, makes the hook there. When
it is removed, its ``close`` is called in that process.
"""

_hooks: list[Hook] = []


def install(hook: Hook) -> None:
    """From now on every call of this process, in any thread, goes through ``hook``; the last one installed is first."""
    _hooks.append(hook)


def remove(hook: Hook) -> None:
    """Take `install` back."""
    _hooks.remove(hook)


def installed() -> list[Hook]:
    """The hooks of this process, the first one first."""
    return list(_hooks)


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    install(hook)
    try:
        yield
    finally:
        remove(hook)


def _made(call: Call, do: Callable[[], Result]) -> Result:
    for hook in list(_hooks):
        do = partial(hook, call, do)
    return do()


# Bytes of a file. ``path`` is what it was opened by, for hooks alone.


def open(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor, closed on exec. The umask takes its part of ``mode``."""
    call = Call("create" if flags & os.O_CREAT else "open", str(path))
    return _made(call, lambda: os.open(path, flags | os.O_CLOEXEC, mode))


def read(fd: int, memory: Any, offset: int, path: object, *, flags: int = 0) -> int:
    """How many bytes were read into ``memory``, a writable buffer; 0 at the end of the file."""
    if not _hooks and not flags:  # the short way: cached pages come in a few microseconds
        return os.preadv(fd, [memory], offset)
    call = Call("read", str(path), offset=offset, data=memory, fd=fd)
    return _made(call, lambda: os.preadv(fd, [memory], offset, flags) if flags else os.preadv(fd, [memory], offset))


def read_bytes(fd: int, nbytes: int, offset: int, path: object) -> bytes:
    """Up to so many bytes; fewer at the end of the file."""
    return _made(Call("read", str(path), offset=offset, fd=fd), lambda: os.pread(fd, nbytes, offset))


def write(fd: int, data: Any, offset: int, path: object) -> int:
    """How many bytes of ``data`` were written, perhaps not all; see `write_all`."""
    call = Call("write", str(path), offset=offset, data=data, fd=fd)
    return _made(call, lambda: os.pwrite(fd, data, offset))


def append(fd: int, data: Any, path: object) -> int:
    """How many bytes of ``data`` were written to the end of a file that was opened to be appended to."""
    return _made(Call("write", str(path), offset=-1, data=data, fd=fd), lambda: os.write(fd, data))


def sync(fd: int, path: object) -> None:
    """Make the bytes of a file durable, not its name."""
    _made(Call("sync", str(path), fd=fd), lambda: os.fsync(fd))


def cut(fd: int, nbytes: int, path: object) -> None:
    """Let a file end at ``nbytes``."""
    _made(Call("cut", str(path), offset=nbytes, fd=fd), lambda: os.ftruncate(fd, nbytes))


def reserve(fd: int, nbytes: int, path: object) -> None:
    """Take space for all of a file, and let it be so long. Raises OSError (EOPNOTSUPP) where that cannot be had."""
    _made(Call("reserve", str(path), offset=nbytes, fd=fd), lambda: _fallocate(fd, nbytes))


# Names.


def link(path: Path, target: Path) -> None:
    """Give a file a second name."""
    _made(Call("link", os.fspath(path), os.fspath(target)), lambda: os.link(path, target))


def replace(path: Path, target: Path) -> None:
    """Call a file or folder ``target``; a file of that name is gone in the same step."""
    _made(Call("replace", os.fspath(path), os.fspath(target)), lambda: os.replace(path, target))


def rename(path: Path, target: Path) -> bool:
    """The same for a name that is free; False if it is not, or if the file system has no such step."""
    return _made(Call("rename", os.fspath(path), os.fspath(target)), lambda: _renameat2(path, target, _ONLY_NEW))


def exchange(path: Path, target: Path) -> bool:
    """Let two files or folders change their names in one step; False if the file system has no such step."""
    return _made(Call("exchange", os.fspath(path), os.fspath(target)), lambda: _renameat2(path, target, _EXCHANGE))


def delete(path: Path) -> None:
    """Take a file's name away."""
    _made(Call("delete", os.fspath(path)), lambda: os.unlink(path))


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make one folder; the one above is there."""
    _made(Call("make folder", os.fspath(path)), lambda: os.mkdir(path, mode))


def remove_folder(path: Path) -> None:
    _made(Call("remove folder", os.fspath(path)), lambda: os.rmdir(path))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Some network file systems cannot, and need not."""
    _made(Call("sync folder", os.fspath(path)), lambda: _sync_folder(path))


def listed(path: Path) -> list[os.DirEntry[str]]:
    return _made(Call("list", os.fspath(path)), lambda: _scanned(path))


def stat(path: Path) -> os.stat_result:
    """What is known of a file or folder; links are followed."""
    return _made(Call("stat", os.fspath(path)), lambda: os.stat(path))


# Several of these in a row.


def write_all(fd: int, data: Any, offset: int, path: object) -> None:
    """All of ``data``, which one call may write only in part."""
    view = memoryview(data).cast("B")
    while view:
        count = write(fd, view, offset, path)
        view, offset = view[count:], offset + count


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """`open` of a file that is there. Raises OSError (EINVAL) for a pipe or a device: those wait, or never end."""
    mode = stat(path).st_mode
    if not is_regular(mode):
        number = errno.EISDIR if is_folder(mode) else errno.EINVAL
        text = os.strerror(number) if number == errno.EISDIR else "it is no regular file"
        raise OSError(number, text, os.fspath(path))
    return open(path, flags)


def read_file(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        parts, at = [], 0
        while part := read_bytes(fd, max(os.fstat(fd).st_size - at, 1), at, path):
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def make_folders(path: Path, mode: int = 0o777) -> None:
    """A folder and those above it, as far as they are lacking."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(os.path.abspath(path)), mode)
        try:
            make_folder(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):  # else somebody else has made it
                raise


def delete_all(path: Path) -> None:
    """A file, or a folder with all that is in it. Links are not followed."""
    if os.path.isdir(path) and not os.path.islink(path):
        for entry in listed(path):
            delete_all(entry.path)
        remove_folder(path)
    else:
        delete(path)


_libc = ctypes.CDLL(None, use_errno=True)
_ONLY_NEW, _EXCHANGE = 1, 2  # flags of renameat2(2)
_HERE = -100  # AT_FDCWD


def _fallocate(fd: int, nbytes: int) -> None:
    # fallocate(2) itself: posix_fallocate would write zeros where the file system has no such call.
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _renameat2(path: Path, target: Path, flag: int) -> bool:
    old, new = os.fsencode(path), os.fsencode(target)
    return hasattr(_libc, "renameat2") and not _libc.renameat2(_HERE, old, _HERE, new, flag)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _scanned(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)
