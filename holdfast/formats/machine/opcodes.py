"""What each opcode of a pickle does to the machine, but for the commonest, which its loop does itself.

`pickles` looks them up in `OPERATIONS`. Never makes anything but containers, numbers, texts and what the machine makes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from holdfast.errors import Unsupported
from holdfast.formats.machine.inert import Name, Record
from holdfast.formats.machine.machine import Machine

_BYTE, _INT = struct.Struct("<B"), struct.Struct("<i")
_UNSIGNED, _LONG, _DOUBLE = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct(">d")


# The pickle itself


def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise Unsupported(f"{m.where} is a pickle of protocol {version}, newer than any that holdfast knows")


def _frame(m: Machine) -> None:
    m.need(m.number(_LONG))


def _refuse(m: Machine) -> None:
    raise Unsupported(
        f"{m.where}: its pickle keeps parts outside of itself (opcode {m.data[m.at - 1]:#04x}); save it again in one "
        "piece"
    )


def _persist(m: Machine, key: Any) -> None:
    if m.persistent is None:
        raise ValueError("a persistent id where none belongs")
    m.stack.append(m.persistent(key))


# Stack


def _drop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _drop_to_mark(m: Machine) -> None:
    m.to_mark()


# Objects


def _global(m: Machine) -> None:
    m.stack.append(m.name(m.line().decode(), m.line().decode()))


def _stack_global(m: Machine) -> None:
    text = m.stack.pop()
    m.stack[-1] = m.name(m.stack[-1], text)


def _new_with_keywords(m: Machine) -> None:
    keywords, args = m.stack.pop(), m.stack.pop()
    instance = m.made(m.stack[-1], args)
    if keywords:
        if not isinstance(keywords, dict) or not isinstance(instance, Record):
            raise TypeError(f"keywords of a {type(instance).__name__}")
        m.charge((keywords,))
        instance.state = dict(keywords)
    m.stack[-1] = instance


def _instance(m: Machine) -> None:
    name = m.name(m.line().decode(), m.line().decode())
    args = m.to_mark()
    m.stack.append(m.made(name, tuple(args)))


def _object(m: Machine) -> None:
    target, *args = m.to_mark()
    m.stack.append(m.made(target, tuple(args)))


def _build(m: Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, Record):
        if isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state):
            m.charge(state)
            state = {**(state[0] or {}), **(state[1] or {})}  # attributes and slots
        if isinstance(state, dict) and isinstance(target.state, dict):
            m.charge((state, target.state))
            state = {**target.state, **state}
        target.state = state
    elif isinstance(target, (str, bytes, int, float, complex, type(None), Name, frozenset)):
        raise TypeError(f"attributes of a {type(target).__name__}")
    # What became a plain container or a tensor loses its attributes: `_metadata` of a state dict, hooks.


# Containers


def _append(m: Machine) -> None:
    value = m.stack.pop()
    m.append_all([value])


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_all([key, value])


def _add_all(m: Machine) -> None:
    values = m.to_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise TypeError(f"added to a {type(target).__name__}")
    target.update(m.keys(values, len(target)))


def _marked(make: Callable[[list[Any]], Any]) -> Callable[[Machine], None]:
    def operation(m: Machine) -> None:
        values = m.to_mark()
        m.stack.append(make(values))

    return operation


def _dict_to_mark(m: Machine) -> None:
    flat = m.to_mark()
    m.stack.append({})
    m.set_all(flat)


def _frozen_to_mark(m: Machine) -> None:
    values = m.to_mark()
    m.stack.append(frozenset(m.keys(values)))


def _triple(m: Machine) -> None:
    m.stack[-3:] = [(m.stack[-3], m.stack[-2], m.stack[-1])]


# Numbers and texts


def _integer(m: Machine) -> int:
    if m.data[m.at : m.at + 3] in (b"00\n", b"01\n"):  # False and True before there were opcodes
        return m.line() == b"01"
    return m.decimal()


def _large_integer(m: Machine, layout: struct.Struct) -> int:
    return int.from_bytes(m.take(m.number(layout)), "little", signed=True)


def _text(m: Machine, layout: struct.Struct) -> str:
    return m.take(m.number(layout)).decode("utf-8", "surrogatepass")


def _old_text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:  # a byte string of Python 2
        return raw


def _old_line(m: Machine) -> str | bytes:
    raw = m.line().strip()
    if len(raw) < 2 or raw[0] != raw[-1] or raw[:1] not in (b"'", b'"'):
        raise ValueError("a text without quotes")
    return _old_text(_ESCAPE.sub(_unescaped, raw[1:-1]))


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|[\n\\'\"abfnrtv])")
_ESCAPED = {
    b"\n": b"", b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r",
    b"t": b"\t", b"v": b"\v",
}  # fmt: skip


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    return bytes([int(code[1:], 16) if code[:1] == b"x" else int(code, 8) & 0xFF])


def _push(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(make(m))


OPERATIONS: dict[int, Callable[[Machine], None]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _protocol,
        "\x95": _frame,
        **dict.fromkeys("\x82\x83\x84\x97\x98", _refuse),  # EXT1, EXT2, EXT4; NEXT_BUFFER, READONLY_BUFFER
        "P": lambda m: _persist(m, m.line().decode()),
        "Q": lambda m: _persist(m, m.stack.pop()),
        # Stack and memo
        "0": _drop,
        "1": _drop_to_mark,
        "2": _push(lambda m: m.stack[-1]),
        "p": lambda m: m.remember(m.decimal()),
        "g": _push(lambda m: m.recalled(m.decimal())),
        # Objects
        "c": _global,
        "\x93": _stack_global,
        "\x92": _new_with_keywords,
        "i": _instance,
        "o": _object,
        "b": _build,
        # Containers
        "]": _push(lambda m: []),
        "\x8f": _push(lambda m: set()),
        "l": _marked(list),
        "t": _marked(tuple),
        "d": _dict_to_mark,
        "\x91": _frozen_to_mark,
        "\x87": _triple,
        "a": _append,
        "e": lambda m: m.append_all(m.to_mark()),
        "s": _set_item,
        "u": lambda m: m.set_all(m.to_mark()),
        "\x90": _add_all,
        # Numbers
        "N": _push(lambda m: None),
        "\x88": _push(lambda m: True),
        "\x89": _push(lambda m: False),
        "I": _push(_integer),
        "L": _push(lambda m: m.decimal()),
        "\x8a": _push(lambda m: _large_integer(m, _BYTE)),
        "\x8b": _push(lambda m: _large_integer(m, _INT)),
        "F": _push(lambda m: float(m.line())),
        "G": _push(lambda m: m.number(_DOUBLE)),
        # Texts and bytes
        "V": _push(lambda m: m.line().decode("raw-unicode-escape")),
        "\x8d": _push(lambda m: _text(m, _LONG)),
        "S": _push(_old_line),
        "T": _push(lambda m: _old_text(m.take(m.number(_INT)))),
        "U": _push(lambda m: _old_text(m.take(m.number(_BYTE)))),
        "B": _push(lambda m: m.take(m.number(_UNSIGNED))),
        "C": _push(lambda m: m.take(m.number(_BYTE))),
        "\x8e": _push(lambda m: m.take(m.number(_LONG))),
        "\x96": _push(lambda m: m.take(m.number(_LONG))),
    }.items()
}
