"""Pickles that want something done, and pickles that want to cost: what each is made of, without making it happen."""

from __future__ import annotations

import codecs
import io
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def named(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL, whose parts may hold anything."""
    return text(module) + text(attribute) + b"\x93"


def called(target: bytes, *args: bytes) -> bytes:
    return target + b"(" + b"".join(args) + b"tR"


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


# What is no class of a library that is known: refused before anything else is read.
REFUSED = {
    "os.system": called(name("os", "system"), text("true")),
    "posix.system": called(name("posix", "system"), text("true")),
    "by stack": called(named("os", "system"), text("true")),
    "by instance": b"(" + text("true") + b"ios\nsystem\n",
    "by object": b"(" + name("os", "system") + text("true") + b"o",
    "only named": name("os", "system"),
    "eval": called(name("builtins", "eval"), text("1")),
    "exec": called(name("builtins", "exec"), text("pass")),
    "old eval": called(name("__builtin__", "eval"), text("1")),
    "import": called(name("builtins", "__import__"), text("os")),
    "importlib": called(name("importlib", "import_module"), text("os")),
    "compile": called(name("builtins", "compile"), text("1"), text(""), text("eval")),
    "open": called(name("builtins", "open"), text("/dev/null")),
    "setattr": called(name("builtins", "setattr"), name("torch", "nn"), text("x"), b"N"),
    "Popen": called(name("subprocess", "Popen"), text("true")),
    "partial": called(name("functools", "partial"), name("torch", "load"), text("x")),
    "operator": called(name("operator", "attrgetter"), text("system")),
    "socket": called(name("socket", "create_connection")),
    "runpy": called(name("runpy", "run_path"), text("x")),
    "pickle": called(name("pickle", "loads"), b"C\x02N."),
    "codecs.decode": called(name("codecs", "decode"), text("x"), text("hex")),
    "numpy gadget": called(name("numpy.testing._private.utils", "runstring"), text("x"), b"}"),
    "a copyreg extension": called(name("copyreg", "add_extension"), text("os"), text("system"), b"K\x01"),
    "the main script": called(name("__main__", "Config")),
    "torch.load": called(name("torch", "load"), text("x")),
    "torch.hub.load": called(name("torch.hub", "load"), text("x"), text("y")),
    "torch.jit.load": called(name("torch.jit", "load"), text("x")),
    "a walk out of torch": called(named("torch.serialization", "os.system"), text("true")),
    "a walk by getattr": called(called(name("builtins", "getattr"), name("torch.serialization", "os"), text("system"))),
    "an extension of torch": called(name("torch.utils.cpp_extension", "load_inline"), text("x"), text("y")),
    "a subprocess of torch": called(name("torch.utils.collect_env", "run"), text("true")),
    "beside an allowed one": called(name("collections.abc", "OrderedDict")),
}

# Within torch all else may come as a record, and nothing may run.
INERT = {
    "a class": called(name("torch.optim.lr_scheduler", "LambdaLR"), text("x")),
    "a function": called(name("torch.nn.init", "normal_"), text("x")),
    "a callback": called(name("torch.storage", "UntypedStorage._new_shared_filename_cpu"), text("x")),
}

# Known names, used as nobody does.
BROKEN = {
    "a class of a number": called(name("builtins", "object"), b"K\x01") + b"K\x02\x93",
    "calling a number": b"K\x01)R",
    "calling a record": called(called(name("torch", "X")), text("x")),
    "calling a list": b"])R",
    "calling with a list": name("torch", "X") + b"]R",
    "making a type": called(name("builtins", "range")) + b"\x85" + name("builtins", "int") + b")R",
    "attributes of a number": b"K\x01}b",
    "attributes of a class": name("torch", "X") + b"}b",
    "attributes of None": b"N}b",
    "getattr of a text": called(name("builtins", "getattr"), text("x"), text("upper")),
    "getattr of a record": called(name("builtins", "getattr"), called(name("torch", "X")), text("args")),
    "getattr of no name": called(name("builtins", "getattr"), name("torch", "X"), b"K\x01"),
    "a name with a path": named("torch", "../os.system"),
    "a name of nothing": named("torch", ""),
    "a name of a number": b"K\x01" + text("x") + b"\x93",
    "a name without end": named("torch", "x" * 2000),
    "bytes of a number": called(name("builtins", "bytes"), b"J\xff\xff\xff\x7f"),
    "a bytearray of a number": called(name("builtins", "bytearray"), b"J\xff\xff\xff\x7f"),
    "an encoding": called(name("_codecs", "encode"), text("x"), text("rot13")),
    "a list of a text": called(name("builtins", "list"), text("abc")),
    "a dict of a record": called(name("collections", "OrderedDict"), called(name("torch", "X"))),
    "a dict of odd pairs": called(name("collections", "OrderedDict"), b"](K\x01K\x02K\x03te"),
    "a key that is a list": b"}]K\x01s",
    "a key that is a dict": b"}}K\x01s",
    "a set of lists": b"\x8f(]\x90",
    "items of a list": b"]K\x01K\x02s",
    "elements of a dict": b"}K\x01a",
    "elements of a tuple": b")K\x01a",
    "half an item": b"}(K\x01u",
    "no mark": b"K\x01t",
    "an empty stack": b"0",
    "two values": b"K\x01K\x02",
    "no value": b"",
    "a mark left": b"(K\x01",
    "nothing remembered": b"h\x05",
    "nothing to remember": b"q\x00",
    "an unknown opcode": b"\xff",
    "a persistent id": text("x") + b"Q",
    "a persistent line": b"Px\n",
    "a text without quotes": b"Sabc\n",
    "a text that is no text": b"X\x02\x00\x00\x00\xff\xfe",
    "a negative length": b"T\xff\xff\xff\xff",
    "a negative place": b"K\x01p-1\n",
    "keywords of a list": called(name("builtins", "list")) + b")" + b"K\x01\x92",
}


_heard: list[str] | None = None
_hooked = False


@contextmanager
def listening() -> Iterator[list[str]]:
    """What Python's audit hooks tell of imports, code, processes and files while the block runs."""
    global _heard, _hooked
    if not _hooked:  # a hook cannot be taken away again: there is one for all tests
        for codec in ("raw_unicode_escape", "unicode_escape", "latin-1", "ascii"):
            codecs.lookup(codec)  # Python imports each when it is first asked for
        sys.addaudithook(_hear)
        _hooked = True
    _heard = []
    try:
        yield _heard
    finally:
        _heard = None


def _hear(event: str, args: Any) -> None:
    if _heard is not None and (
        event in ("import", "exec", "compile", "open") or event.startswith(("os.", "subprocess.", "socket."))
    ):
        _heard.append(f"{event}{args}")


_PRIME = (1 << 61) - 1  # hash(n) is n modulo this


def bombs() -> dict[str, tuple[bytes, str]]:
    """Small files that ask for very much, each with the reason for which it is refused. But for it they are valid."""

    def over_and_over(first: bytes, again: bytes, count: int = 5000) -> tuple[bytes, str]:
        return b"(" + first + b"q\x00" + again * count + b"t", "over and over"

    nothings = b"](" + b"N" * 5000 + b"e"
    numbers = b"".join(b"M" + struct.pack("<H", n) for n in range(3000))
    attributes = b"}(" + b"".join(text(str(n)) + b"N" for n in range(3000)) + b"u"
    half = b"".join(b"h\x00h\x00\x86q\x00" for _ in range(200))  # each a pair of the one before
    ordered, inner = name("collections", "OrderedDict"), name("torch.storage", "_load_from_bytes")
    record = called(name("torch", "X")) + b"q\x01"
    alike = [number(_PRIME * n) for n in range(1, 2000)]
    ends, saved = "ends too early", io.BytesIO()
    torch.save(torch.zeros(10_000).untyped_storage(), saved, _use_new_zipfile_serialization=False)
    storage = saved.getvalue()
    return {
        "lists of a list": over_and_over(nothings, called(name("builtins", "list"), b"h\x00")),
        "tuples of a list": over_and_over(nothings, called(name("builtins", "tuple"), b"h\x00")),
        "a set of a list": over_and_over(b"](" + numbers + b"e", called(name("builtins", "set"), b"h\x00")),
        "dicts of a dict": over_and_over(attributes, called(ordered, b"h\x00")),
        "attributes": over_and_over(attributes, record + b"h\x00bh\x00b"),
        "slots": over_and_over(attributes + b"q\x02h\x02\x86", record + b"h\x00b"),
        "paths": over_and_over(text("a" * 5000), called(name("pathlib", "Path"), b"h\x00", text("b"))),
        "bytes": over_and_over(text("a" * 5000), called(name("_codecs", "encode"), b"h\x00", text("latin1"))),
        "keywords": over_and_over(attributes, name("torch", "X") + b")h\x00\x92"),
        "long keys": over_and_over(b"(" + b"K\x01" * 5000 + b"t", b"}h\x00Ns"),
        "files within": over_and_over(b"B" + struct.pack("<I", len(storage)) + storage, called(inner, b"h\x00")),
        "names of names": (
            name("torch", "x") + b"q\x00" + called(name("builtins", "getattr"), b"h\x00", text("y" * 200)) + b"q\x00"
            + b"".join(called(name("builtins", "getattr"), b"h\x00", text("y" * 200)) + b"q\x00" for _ in range(99))
            + b"0" * 100, "no name",
        ),
        "a key of pairs of pairs": (b"Nq\x00" + half + b"(1}h\x00Ns", "within a key"),
        "a member of pairs of pairs": (b"Nq\x00" + half + b"(1\x8f(h\x00\x90", "within a key"),
        "keys of one hash": (b"}(" + b"N".join(alike) + b"Nu", "may collide"),
        "members of one hash": (b"\x8f(" + b"".join(alike) + b"\x90", "may collide"),
        "frozen members of one hash": (b"(" + b"".join(alike) + b"\x91", "may collide"),
        "listed members of one hash": (called(name("builtins", "set"), b"](" + b"".join(alike) + b"e"), "may collide"),
        "listed keys of one hash": (
            called(ordered, b"](" + b"".join(n + b"N\x86" for n in alike) + b"e"), "may collide",
        ),
        "pairs of one hash": (b"}(" + b"".join(_pairs_of_one_hash(100)) + b"u", "may collide"),
        "odd keys": (b"}(" + b"".join(number((1 << 50) + n) + b"N" for n in range(66_000)) + b"u", "may collide"),
        "integers that do not count up": (
            b"}(" + b"".join(b"J" + struct.pack("<i", 5000 * n) + b"N" for n in range(1, 66_000)) + b"u", "may collide",
        ),
        "a large key": (b"}" + number(1 << 1900) + b"Ns", "bits within a key"),
        "digits": (b"L" + b"9" * 100_000 + b"L\n", "100001 digits"),
        "digits of an integer": (b"I" + b"9" * 100_000 + b"\n", "100000 digits"),
        "digits of a place": (b"Np" + b"9" * 100_000 + b"\n", "100000 digits"),
        "a place far away": (b"Nr\xff\xff\xff\xff", "remembered after"),
        "a text that is not there": (b"\x8d" + struct.pack("<Q", 1 << 62), "only 1 remain"),
        "bytes that are not there": (b"\x8e" + struct.pack("<Q", 1 << 40), "only 1 remain"),
        "a bytearray that is not there": (b"\x96" + struct.pack("<Q", 1 << 40), "only 1 remain"),
        "an integer that is not there": (b"\x8b" + struct.pack("<i", 0x7FFFFFFF), "not enough data"),
        "a frame that is not there": (b"\x95" + struct.pack("<Q", 1 << 63), ends),
    }  # fmt: skip


def _pairs_of_one_hash(count: int) -> Iterator[bytes]:
    # A tuple's hash mixes those of its parts one by one, without a secret: so the second can undo the first.
    mask, first = (1 << 64) - 1, 1 << 40
    while count:
        first += 1
        mixed = 2870177450012600261 + first * 14029467366897019727 & mask
        mixed = (mixed << 31 | mixed >> 33) * 11400714785074694791 & mask
        second = (12345 - mixed) * pow(14029467366897019727, -1, 1 << 64) & mask
        if 0 < second < _PRIME:
            count -= 1
            yield number(first) + number(second) + b"\x86N"
