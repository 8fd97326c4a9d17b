"""Compressed files as streams that are read forwards, a piece at a time.

`scratch` unpacks through these. Never unpacks more at once than was requested.
"""

from __future__ import annotations

import bz2
import importlib
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from holdfast.errors import Damaged, HoldfastError, StorageError, Unsupported
from holdfast.formats.sources import Stretch
from holdfast.storage.place import Place

_PIECE, _OF_STORE = 256 << 10, 4 << 20
"""How much is read at once; more of a store, where every request takes long."""

_MORSEL = 1 << 10
"""Bytes of Zstandard that unpack to 32 MiB at most."""

MEMORY = 1 << 30
"""Memory that xz may use; its strongest preset takes a sixteenth."""

_MAGIC = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"]\0\0": "lzma", b"(\xb5/\xfd": "zstd",
    b"\x04\"M\x18": "lz4", b"\x89LZO": "lzop",
}  # fmt: skip


class _Gzip:
    """zlib's, with the interface of the others."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        unpacked = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.needs_input = not self._stream.unconsumed_tail and len(unpacked) < max_length
        return unpacked

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data


class _Zstd:
    """The same for `zstandard`, which returns all that its input unpacks to, so it gets small pieces."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._stream, self._in, self._at, self._out = make(), b"", 0, b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self._in, self._at = self._in[self._at :] + data, 0
        while not self._out and self._at < len(self._in) and not self._stream.eof:
            self._out = self._stream.decompress(self._in[self._at : self._at + _MORSEL])
            self._at += _MORSEL
        unpacked, self._out = self._out[:max_length], self._out[max_length:]
        return unpacked

    @property
    def needs_input(self) -> bool:
        return not self._out and self._at >= len(self._in)

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof) and not self._out

    @property
    def unused_data(self) -> bytes:
        return bytes(self._stream.unused_data) + self._in[self._at :]


def _lzma() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=MEMORY)


_KINDS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip, "bzip2": bz2.BZ2Decompressor, "xz": _lzma, "lzma": _lzma,
}  # fmt: skip


def kind_of(head: bytes) -> str | None:
    """What a file that begins so is compressed with, or None."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def zstandard_for(path: Place) -> Any:
    """The package that unpacks Zstandard. Raises Unsupported, naming ``path``, if it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise Unsupported(f"{path} is packed by Zstandard: pip install 'holdfast[zstd]', or unpack it") from None


class Unpacking:
    """What a compressed file holds, read forwards. ``at``: bytes read so far, of which ``limit`` are too many."""

    def __init__(self, packed: Stretch, kind: str, limit: int, advance: Callable[[int], None] = lambda n: None) -> None:
        self.packed, self.limit, self.at = packed, limit, 0
        self.path, self._advance = packed.source.path, advance
        self._taken, self._rest, self._ahead = 0, b"", b""
        self._at_once = _OF_STORE if self.path.is_remote else _PIECE
        self._ended = False
        self._fault: type[Exception] = EOFError
        if kind == "zstd":
            self._kind: Callable[[], Any] = self._zstd()
        elif kind in _KINDS:
            self._kind = _KINDS[kind]
        else:
            raise Unsupported(f"{self.path} is packed by {kind}, which holdfast does not read: unpack it ({kind} -d)")
        self._stream = self._kind()

    def peek(self, nbytes: int) -> bytes:
        """The next bytes, which the next `read` gives again."""
        self._ahead = self.read(nbytes)
        self.at -= len(self._ahead)
        return self._ahead

    def read(self, nbytes: int) -> bytes:
        """The next bytes; fewer only at the end. Raises Damaged, and StorageError beyond the limit."""
        parts = [self._ahead[:nbytes]]
        self._ahead = self._ahead[nbytes:]
        self.at += len(parts[0])
        nbytes -= len(parts[0])
        while nbytes and not self._ended:
            part = self._piece(min(nbytes, 1 << 20))
            self._ended = not part
            parts.append(part)
            nbytes -= len(part)
            self.at += len(part)
            if self.at > self.limit:
                raise self.exceeded()
        return b"".join(parts)

    def exceeded(self) -> StorageError:
        """What is raised beyond the limit."""
        return StorageError(
            f"{self.path} unpacks to more than {self.limit} bytes, half of what is free for temporary files or the "
            "limit that HOLDFAST_SCRATCH_LIMIT sets. Set that (in bytes), or TMPDIR to a larger disk, or unpack the "
            "archive yourself and open what comes of it"
        )

    def skip(self, nbytes: int) -> None:
        """Pass over bytes, which has to unpack them."""
        while nbytes and (part := self.read(min(nbytes, 1 << 20))):
            nbytes -= len(part)

    def drain(self) -> None:
        """Read to the end, where the sums are."""
        while self.read(1 << 20):
            pass

    def _piece(self, nbytes: int) -> bytes:
        try:
            return self._next(nbytes)
        except HoldfastError:
            raise
        except (zlib.error, lzma.LZMAError, EOFError, ValueError, OSError, self._fault) as error:
            raise Damaged(f"{self.path} is no valid compressed file: {str(error)[:200]}") from None

    def _next(self, nbytes: int) -> bytes:
        while not self._stream.eof or self._another():
            data = b""
            if self._stream.needs_input:
                data, self._rest = self._rest or self._take(), b""
                if not data:
                    raise Damaged(f"{self.path} ends within its compressed data: it is truncated")
            if part := self._stream.decompress(data, nbytes):
                return bytes(part)
        return b""

    def _another(self) -> bool:
        """Begin the next of several streams one after the other; zeros after the last are padding."""
        rest = self._stream.unused_data or self._take()
        while rest and not rest.strip(b"\0"):
            rest = self._take()
        if not rest:
            return False
        self._rest, self._stream = rest.lstrip(b"\0"), self._kind()
        return True

    def _zstd(self) -> Callable[[], _Zstd]:
        zstandard = zstandard_for(self.path)
        self._fault = zstandard.ZstdError
        return lambda: _Zstd(zstandard.ZstdDecompressor(max_window_size=MEMORY).decompressobj)

    def _take(self) -> bytes:
        data = self.packed.read(self._taken, min(self._at_once, self.packed.nbytes - self._taken))
        self._taken += len(data)
        self._advance(len(data))
        return data
