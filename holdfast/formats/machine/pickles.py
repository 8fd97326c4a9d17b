"""Reads pickles and executes none of them: containers, numbers, and inert records.

Nothing that a pickle names is imported or called, and its memory and time stay in proportion to its length.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from holdfast.errors import Damaged, HoldfastError, Unsupported
from holdfast.formats.machine.inert import Calls, Name, Record
from holdfast.formats.machine.machine import NOTHING, Machine
from holdfast.storage.place import Place

__all__ = ["Calls", "EndsEarly", "Name", "Record", "load"]


class EndsEarly(Damaged):
    """The data end before the pickle does."""


def load(
    data: bytes, where: Place, *, calls: Calls | None = None, persistent: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> tuple[Any, int]:  # fmt: skip
    """The value pickled in ``data`` from byte ``start`` on, and where it ends. ``where`` is named in errors.

    ``calls`` adds functions of ours for names of the format; ``persistent`` answers persistent ids (storages).
    Raises Unsupported for a name that is on no list, Damaged for anything that is no pickle (EndsEarly if it is cut
    short). The value may share parts and hold itself: see `inert.expanded`.
    """
    machine = Machine(data, where, calls or {}, persistent)
    try:
        return _run(machine, start)
    except HoldfastError:
        raise
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error, MemoryError,
    ) as error:  # fmt: skip
        early = machine.at >= len(data) or isinstance(error, struct.error)
        damaged = (EndsEarly if early else Damaged)(
            f"{where}: not a valid pickle (byte {machine.at} of {len(data)}): {type(error).__name__}: "
            f"{str(error)[:200]}. It is truncated or was altered: bring it back from a copy"
        )
        damaged.file = str(where)
        raise damaged from None


_SIGNED, _UNSIGNED = struct.Struct("<i"), struct.Struct("<I")


def _run(machine: Machine, start: int) -> tuple[Any, int]:
    """The value that ends at the first STOP, and the byte after it.

    The common opcodes are done here: a look-up and a call for each would cost more than they do.
    """
    data, memo, below, others = machine.data, machine.memo, machine.below, _OPERATIONS
    stack, at = machine.stack, start
    push = stack.append
    try:
        while True:
            code = data[at]
            at += 1
            if code == 0x68:  # BINGET
                value = memo[data[at]]
                at += 1
                if value is NOTHING:
                    raise ValueError("nothing was remembered")
                push(value)
            elif code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x71:  # BINPUT
                machine.at = at = at + 1
                machine.remember(data[at - 1])
            elif code == 0x6A:  # LONG_BINGET
                value = memo[_UNSIGNED.unpack_from(data, at)[0]]
                at += 4
                if value is NOTHING:
                    raise ValueError("nothing was remembered")
                push(value)
            elif code == 0x72:  # LONG_BINPUT
                machine.at = at = at + 4
                machine.remember(int.from_bytes(data[at - 4 : at], "little"))
            elif code == 0x28:  # MARK
                below.append(stack)
                stack = machine.stack = []
                push = stack.append
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x8C:  # SHORT_BINUNICODE
                begin = at + 1
                at = begin + data[at]
                push(str(data[begin:at], "utf-8", "surrogatepass"))
            elif code == 0x58:  # BINUNICODE
                begin = at + 4
                at = begin + int.from_bytes(data[at:begin], "little")
                push(str(data[begin:at], "utf-8", "surrogatepass"))
            elif code == 0x4D:  # BININT2
                at += 2
                push(data[at - 2] | data[at - 1] << 8)
            elif code == 0x4A:  # BININT
                push(_SIGNED.unpack_from(data, at)[0])
                at += 4
            elif code == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            elif code == 0x81 or code == 0x52:  # NEWOBJ, REDUCE
                machine.at = at
                args = stack.pop()
                stack[-1] = machine.made(stack[-1], args)
            elif code == 0x2E:  # STOP
                (value,) = stack
                if below:
                    raise ValueError("it ends after a mark")
                return value, at
            else:
                machine.at = at
                others[code](machine)
                at, stack = machine.at, machine.stack
                push = stack.append
    finally:
        machine.at = max(at, machine.at)


def _protocol(m: Machine) -> None:
    version = m.argument()
    if version > 5:
        raise Unsupported(f"{m.where} is a pickle of protocol {version}, newer than any that holdfast knows")


def _frame(m: Machine) -> None:
    if m.argument() > len(m.data) - m.at:
        m.at = len(m.data)
        raise ValueError("it ends too early")


def _refuse(m: Machine) -> None:
    raise Unsupported(
        f"{m.where}: its pickle keeps parts outside of itself (opcode {m.data[m.at - 1]:#04x}); save it again in one "
        "piece"
    )


def _persist(m: Machine, key: Any) -> None:
    if m.persistent is None:
        raise ValueError("a persistent id where none belongs")
    m.stack.append(m.persistent(key))


def _drop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.to_mark()


def _drop_to_mark(m: Machine) -> None:
    m.to_mark()


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


def _old_text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:  # a byte string of Python 2
        return raw


def _old_line(m: Machine) -> str | bytes:
    raw = m.line().strip()
    if len(raw) < 2 or raw[0] != raw[-1] or raw[:1] not in (b"'", b'"'):
        raise ValueError("a text without quotes")
    return _old_text(codecs.escape_decode(raw[1:-1])[0])


def _push(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(make(m))


_OPERATIONS: dict[int, Callable[[Machine], None]] = {
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
        "p": lambda m: m.remember(m.argument()),
        "g": _push(lambda m: m.recalled(m.argument())),
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
        "N": _push(lambda m: None),
        "\x88": _push(lambda m: True),
        "\x89": _push(lambda m: False),
        # Numbers, texts and bytes: INT, LONG, LONG1, LONG4, FLOAT, BINFLOAT; UNICODE, BINUNICODE8; BINBYTES, …
        **dict.fromkeys("IL\x8a\x8bFGV\x8dBC\x8e", _push(Machine.argument)),
        "\x96": _push(lambda m: bytes(m.argument())),
        "S": _push(_old_line),
        **dict.fromkeys("TU", _push(lambda m: _old_text(m.argument().encode("latin1")))),  # BINSTRING, SHORT_BINSTRING
    }.items()
}
