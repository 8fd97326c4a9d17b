"""Compressed files as streams that are read forwards, never unpacked further than was requested."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.errors import Damaged, HoldfastError, StorageError, Unsupported
from holdfast.formats.sources import Stretch

_PIECE, _OF_STORE = 256 << 10, 4 << 20
"""How much is read at once; more of a store, where every request takes long."""

_MAGIC = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"]\0\0": "lzma", b"(\xb5/\xfd": "zstd",
    b"\x04\"M\x18": "lz4", b"\x89LZO": "lzop",
}  # fmt: skip
_MEMORY = 1 << 30
"""Bytes that unpacking xz or lzma may take, of which the strongest preset takes a sixteenth."""


class _Lzma:
    """What a file of xz or lzma holds, as `lzma.LZMAFile` reads it, in bounded memory."""

    def __init__(self, packed: io.BufferedReader, form: int) -> None:
        self._packed, self._form = packed, form
        self._stream = lzma.LZMADecompressor(form, memlimit=_MEMORY)

    def read(self, nbytes: int) -> bytes:
        while True:
            data = b""
            if self._stream.eof:  # another stream may follow, after padding
                data = self._stream.unused_data.lstrip(b"\0") or self._packed.read1(_PIECE).lstrip(b"\0")
                if not data:
                    return b""
                self._stream = lzma.LZMADecompressor(self._form, memlimit=_MEMORY)
            elif self._stream.needs_input and not (data := self._packed.read1(_PIECE)):
                raise EOFError("it ends in the middle of a stream")
            if unpacked := self._stream.decompress(data, nbytes):
                return unpacked


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda packed: gzip.GzipFile(fileobj=packed),
    "bzip2": bz2.BZ2File,
    "xz": partial(_Lzma, form=lzma.FORMAT_XZ),
    "lzma": partial(_Lzma, form=lzma.FORMAT_ALONE),
}


def kind_of(head: bytes) -> str | None:
    """What a file that begins with ``head`` is compressed with, or None."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


class _Packed(io.RawIOBase):
    """The compressed bytes as a file object."""

    def __init__(self, packed: Stretch, advance: Callable[[int], None]) -> None:
        self._packed, self._advance, self._at = packed, advance, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._packed.read(self._at, min(len(target), self._packed.nbytes - self._at))
        target[: len(data)] = data
        self._at += len(data)
        self._advance(len(data))
        return len(data)


class Unpacking:
    """What a compressed file holds, read forwards. ``at``: bytes read so far, of which ``limit`` are too many."""

    def __init__(self, packed: Stretch, kind: str, limit: int, advance: Callable[[int], None] = lambda n: None) -> None:
        self.path, self.limit, self.at, self._ahead = packed.source.path, limit, 0, b""
        source = io.BufferedReader(_Packed(packed, advance), _OF_STORE if self.path.is_remote else _PIECE)
        if kind not in _OPENERS:
            raise Unsupported(f"{self.path} is packed by {kind}, which holdfast does not read: unpack it ({kind} -d)")
        self._stream = _OPENERS[kind](source)

    def peek(self, nbytes: int) -> bytes:
        """The next bytes, which the next `read` gives again."""
        self._ahead = self.read(nbytes)
        self.at -= len(self._ahead)
        return self._ahead

    def read(self, nbytes: int) -> bytes:
        """The next bytes; fewer only at the end. Raises Damaged, and StorageError beyond the limit."""
        parts = [self._ahead[:nbytes]]
        self._ahead = self._ahead[nbytes:]
        missing = nbytes - len(parts[0])
        try:
            while missing and (part := self._stream.read(min(missing, 1 << 20))):
                parts.append(part)
                missing -= len(part)
                if self.at + nbytes - missing > self.limit:
                    raise self.exceeded()
        except HoldfastError:
            raise
        except (zlib.error, lzma.LZMAError, EOFError, ValueError, OSError) as error:
            raise Damaged(f"{self.path} is no valid compressed file, or is truncated: {str(error)[:200]}") from None
        self.at += nbytes - missing
        return b"".join(parts)

    def exceeded(self) -> StorageError:
        """The error for more than ``limit`` bytes."""
        return StorageError(
            f"{self.path} unpacks to more than {self.limit} bytes, half of what is free for temporary files or the "
            "limit that HOLDFAST_SCRATCH_LIMIT sets. Set that (in bytes), or TMPDIR to a larger disk, or unpack the "
            "archive yourself and open the result"
        )

    def skip(self, nbytes: int) -> None:
        """Pass over bytes, which has to unpack them."""
        while nbytes and (part := self.read(min(nbytes, 1 << 20))):
            nbytes -= len(part)

    def drain(self) -> None:
        """Read to the end, where the sums are."""
        while self.read(1 << 20):
            pass
