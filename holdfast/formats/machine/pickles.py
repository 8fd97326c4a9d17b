"""A machine that reads pickles and executes none of them: containers, numbers, and inert records.

Every reader whose format pickles calls `load`. Never imports, calls or looks up what a pickle names, and never takes
memory or time out of proportion to the pickle's length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from holdfast.errors import Damaged, HoldfastError
from holdfast.formats.machine.inert import Calls, Name, Record
from holdfast.formats.machine.machine import NOTHING, Machine
from holdfast.formats.machine.opcodes import OPERATIONS
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
    Raises Unsupported for a name that stands on no list, Damaged for anything that is no pickle (EndsEarly if there
    is only too little of it). The value may share parts and hold itself: `inert.expanded` tells.
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


_SIGNED = struct.Struct("<i")


def _run(machine: Machine, start: int) -> tuple[Any, int]:
    """The value that ends at the first STOP, and the byte after it.

    The common opcodes are done here: a look-up and a call for each would cost more than they do.
    """
    data, memo, below, others = machine.data, machine.memo, machine.below, OPERATIONS
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
                at += 4
                push(machine.recalled(int.from_bytes(data[at - 4 : at], "little")))
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
