"""Bytes made wrong: as a bad disk does, and as somebody does who knows the format and wants to be believed.

`mutated` is a function of its seed alone. It looks into what it is given (zip, tar, gzip, pickle, safetensors, JSON),
changes something inside and puts sums and lengths right again, so that what is wrong is found by the reader of the
inside; or it breaks the container itself.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from holdfast.ondisk.manifest import is_sealed, seal
from tests.formats import hostile

INTEGERS = (
    0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 4095, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    1 << 40, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
)  # fmt: skip
TEXTS = (
    "", "/", "..", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "a\\b", "..\\..\\x", "%2e%2e/x",
    "a\0b", "\ud800", "é" * 300, "a" * 5000, "nan", "inf", "1e999", "0-99999999999", "0+99999999x1", "file:///etc/passwd",
    "__import__('os')", "float32", "float4_e2m1fn_x2", "complex128", "bits8", "quint8", "torch.load", "[0:9]", "@0",
    "model/", "//", ".", "CON", "-1", "0" * 5000, "9" * 5000, "\u202e", "$", "{rank}",
)  # fmt: skip


def mutated(data: bytes, seed: int) -> bytes:
    """``data`` with one to four things wrong in it."""
    rng = Random(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = once(data, rng)
    return data


def once(data: bytes, rng: Random) -> bytes:
    """One thing made wrong: mostly inside of what the bytes are, else just somewhere."""
    if rng.random() < 0.75:
        for is_one, change in _KINDS:
            if is_one(data):
                try:
                    return change(data, rng)
                except Exception:  # a former change broke it
                    break
    return raw(data, rng)


# Any bytes


def raw(data: bytes, rng: Random) -> bytes:
    """A change that knows nothing of the format; mostly near the ends, where lengths and directories are."""
    if not data:
        return rng.randbytes(rng.randrange(40))
    out = bytearray(data)
    reach = rng.choice((len(out), min(len(out), 64), min(len(out), 1024)))
    at = rng.randrange(reach) if rng.random() < 0.7 else len(out) - 1 - rng.randrange(reach)
    kind = rng.randrange(9)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at] = rng.randrange(256)
    elif kind == 2:
        width = rng.choice((1, 2, 4, 8))
        number = (rng.choice(INTEGERS) % (1 << 8 * width)).to_bytes(width, rng.choice(("little", "big")))
        out[at : at + width] = number
    elif kind == 3:
        del out[at:]
    elif kind == 4:
        del out[at : at + rng.choice((1, 2, 4, 8, 64, 512))]
    elif kind == 5:
        source = rng.randrange(len(out))
        out[at:at] = out[source : source + rng.choice((1, 4, 16, 256, 4096))]
    elif kind == 6:
        source, length = rng.randrange(len(out)), rng.choice((1, 4, 16, 256))
        out[at : at + length] = out[source : source + length]
    elif kind == 7:
        out[at : at + rng.choice((1, 8, 64, 512))] = bytes(rng.choice((0, 0xFF)) for _ in range(8))
    else:
        out[at:at] = rng.randbytes(rng.choice((1, 3, 8, 100)))
    return bytes(out)


# JSON


def strange(rng: Random) -> Any:
    """A value that somebody did not think of."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(INTEGERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, 1.5, -0.0, 1e308, [], {}, [[]], {"": {}}, [None], [1] * 3000))
    if kind == 6:
        deep: Any = 0
        for _ in range(rng.choice((10, 200, 900))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return {
        "$": rng.choice(("int", "float", "bytes", "complex", "dtype", "device", "size", "x")),
        "v": rng.choice(TEXTS),
    }


def tree(value: Any, rng: Random) -> Any:
    """A tree of JSON with one node of it changed."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                waiting.append(node[key])
    if not places:
        return strange(rng)
    deep = rng.random() < 0.5  # those near the root are few and matter most
    node, key = places[rng.randrange(len(places)) if deep else rng.randrange(min(len(places), 40))]
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(TEXTS)] = node[key]
    elif kind == 2:
        other, at = rng.choice(places)
        same = json.dumps(other[at])
        node[key] = json.loads(same) if len(same) < 1 << 16 else strange(rng)
    elif kind == 3 and isinstance(node[key], int):
        node[key] += rng.choice((-1, 1, 2, 1 << 20, -(1 << 40)))
    elif kind == 4 and isinstance(node[key], str) and node[key]:
        text, at = node[key], rng.randrange(len(node[key]))
        node[key] = text[:at] + rng.choice(("", "0", "/", "..", "-", ",", "9" * 20, "\\", text)) + text[at + 1 :]
    else:
        node[key] = strange(rng)
    return value


def _is_json(data: bytes) -> bool:
    return data[:1] in (b"{", b"[") and len(data) < 4 << 20


def _json(data: bytes, rng: Random) -> bytes:
    sealed = is_sealed(data)
    value = json.loads(data)
    if sealed:
        value.pop("digest")
    text = json.dumps(tree(value, rng), separators=(",", ":")).encode()
    if rng.random() < 0.1:
        text = raw(text, rng)
    return seal(text) if sealed else text


def _is_safetensors(data: bytes) -> bool:
    return len(data) > 10 and data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8


def _safetensors(data: bytes, rng: Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = _json(data[8 : 8 + length], rng)
    if rng.random() < 0.7:
        text = text.ljust(length)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


# Pickles


def _is_pickle(data: bytes) -> bool:
    return data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5")


_SNIPPETS = [*hostile.REFUSED.values(), *hostile.INERT.values(), *hostile.BROKEN.values()]
_WIDTHS = {"K": 1, "M": 2, "J": 4, "h": 1, "q": 1, "j": 4, "r": 4}


def _pickle(data: bytes, rng: Random) -> bytes:
    ops = []
    try:
        for op, arg, at in pickletools.genops(data):
            ops.append((op.code, arg, at))
            if len(ops) > 20_000:
                break
    except Exception:
        pass
    number = rng.randrange(len(ops) - 1)
    (code, arg, at), end = ops[number], ops[number + 1][2]
    kind = rng.randrange(7)
    if kind <= 1 or (kind == 2 and code in _WIDTHS):
        numbers = [op for op in ops if op[0] in _WIDTHS]
        code, arg, at = rng.choice(numbers) if numbers else ops[number]
        width = _WIDTHS.get(code, 0)
        value = rng.choice((*INTEGERS, *range(-3, 4)))
        if code in "KMJ" and rng.random() < 0.5:  # wider than it was
            return data[:at] + hostile.number(value) + data[at + 1 + width :]
        return data[: at + 1] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + 1 + width :]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + rng.choice(_SNIPPETS) + data[end if rng.random() < 0.5 else at :]
    if kind == 4:
        texts = [(op, n) for n, op in enumerate(ops[:-1]) if isinstance(op[1], str) and op[0] in "X\x8c"]
        (_, told, at), n = rng.choice(texts)
        text = rng.choice((*TEXTS, told[: len(told) // 2], told + "0", *(t[0][1] for t in texts[:9])))
        return data[:at] + b"X" + struct.pack("<I", len(raw_text(text))) + raw_text(text) + data[ops[n + 1][2] :]
    if kind == 5:
        return data[:at] + rng.choice((b"N", b")", b"]", b"}", b"K\x01", b"(", b"0", b"2", b"\x88", b".")) + data[end:]
    other = rng.randrange(len(ops) - 1)
    return data[:at] + data[ops[other][2] : ops[other + 1][2]] + data[end:]


def raw_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# Archives


def _is_zip(data: bytes) -> bool:
    return data[:4] == b"PK\3\4"


def _zip(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.3:
        return _zip_fields(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    small = [n for n, (name, held) in enumerate(members) if name.endswith(".pkl")] or [*range(len(members))]
    n = rng.choice(small) if rng.random() < 0.8 else rng.randrange(len(members))
    name, held = members[n]
    kind = rng.randrange(10)
    if kind < 7:
        members[n] = name, once(held, rng)
    elif kind == 7:
        del members[n]
    elif kind == 8:
        members.insert(rng.randrange(len(members) + 1), (name, raw(held, rng)))
    else:
        members[n] = rng.choice(TEXTS).replace("\ud800", "") or "x", held
    made = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if rng.random() < 0.15 else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", how) as archive:
        archive._didModify = True  # type: ignore[attr-defined]
        for name, held in members:
            archive.writestr(zipfile.ZipInfo(name), held, how)
    return made.getvalue()


def _zip_fields(data: bytes, rng: Random) -> bytes:
    """A field of the directory, of a member's own header or of the record at the end."""
    signature = rng.choice((b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"))
    places, at = [], data.find(signature)
    while at >= 0 and len(places) < 1000:
        places.append(at)
        at = data.find(signature, at + 4)
    at = rng.choice(places) + rng.randrange(4, 50)
    width = rng.choice((1, 2, 4, 8))
    number = (rng.choice(INTEGERS) % (1 << 8 * width)).to_bytes(width, "little")
    return data[:at] + number + data[at + width :]


def _is_tar(data: bytes) -> bool:
    return data[257:262] == b"ustar"


def _tar(data: bytes, rng: Random) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(m, archive.extractfile(m).read() if m.isfile() else b"") for m in archive.getmembers()]  # type: ignore[union-attr]
    n = rng.randrange(len(members))
    info, held = members[n]
    if rng.random() < 0.6:
        members[n] = info, once(held, rng)
    elif rng.random() < 0.5:
        info.name = rng.choice(TEXTS).replace("\0", "").replace("\ud800", "") or "x"
    else:
        info.type = rng.choice((b"1", b"2", b"3", b"6", b"5", b"S", b"L", b"x", b"0"))
        info.linkname = rng.choice(("/etc/passwd", "../x", info.name))
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as archive:
        for info, held in members:
            info.size = len(held) if info.isfile() else 0
            archive.addfile(info, io.BytesIO(held))
    out = bytearray(made.getvalue())
    if rng.random() < 0.3:  # a field of the first header, with a sum that fits
        at = rng.choice((124, 125, 135, 148, 156, 157, 100, 0, 257, 345))
        out[at] = rng.choice((0, 0x30, 0x37, 0x80, 0xFF))
        out[148:156] = b" " * 8
        out[148:156] = b"%06o\0 " % sum(out[:512])
    return bytes(out)


def _gzip(data: bytes, rng: Random) -> bytes:
    return gzip.compress(once(gzip.decompress(data), rng), 1, mtime=0)


def _bzip2(data: bytes, rng: Random) -> bytes:
    return bz2.compress(once(bz2.decompress(data), rng), 1)


def _zlib(data: bytes, rng: Random) -> bytes:
    return zlib.compress(once(zlib.decompress(data), rng), 1)


# Texts


def _is_text(data: bytes) -> bool:
    return 0 < len(data) < 1 << 16 and b"\0" not in data and data.isascii()


def _text(data: bytes, rng: Random) -> bytes:
    lines = data.decode().split("\n")
    n = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[n]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[n])
    elif kind == 2:
        head, colon, _ = lines[n].partition(":")
        lines[n] = head + colon + " " + str(rng.choice((*INTEGERS, *TEXTS)))
    elif kind == 3:
        lines[n] = " " * rng.randrange(9) + lines[n].lstrip()
    elif kind == 4:
        bombs = (
            "[" * 3000,
            "{" * 3000,
            "- " * 500 + "x",
            "&a [*a, *a]",
            "<<: *a",
            "!!python/object/apply:os.system [x]",
        )
        lines[n] = lines[n].partition(":")[0] + ": " + rng.choice(bombs)
    else:
        return raw(data, rng)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


_KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes, Random], bytes]], ...] = (
    (_is_zip, _zip),
    (_is_tar, _tar),
    (lambda data: data[:2] == b"\x1f\x8b", _gzip),
    (lambda data: data[:3] == b"BZh", _bzip2),
    (_is_safetensors, _safetensors),
    (_is_pickle, _pickle),
    (_is_json, _json),
    (_is_text, _text),
)  # fmt: skip
