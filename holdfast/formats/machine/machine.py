"""The machine that reads a pickle: a stack, a memo, a position, and limits that keep its cost in proportion."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.errors import Unsupported
from holdfast.formats.machine import inert
from holdfast.formats.machine.inert import Calls, Name, Record
from holdfast.storage.place import Place

MAX_DIGITS = 4300
"""Of a number in decimal; reading more takes Python quadratic time."""

_DECIMALS = b"FILgp"
_READERS: dict[int, Callable[[Any], Any]] = {ord(op.code): op.arg.reader for op in pickletools.opcodes if op.arg}

MAX_ALIKE = 16
"""Different keys with one hash; an honest file hardly ever has two."""

FEW = 4096
MAX_ODD_KEYS = 1 << 16
"""Different keys that a file could choose so that they collide in a dict: fractions, tuples, and integers other than
those that count up from 0, and ``FEW``."""

MAX_COPIES = 4
"""How many times its own length a pickle may make the machine copy, by naming one thing over and over."""


_ATOMS = (str, bytes, int, float, type(None), Name, Record)
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
NOTHING = object()
"""In a memo: nothing was remembered under that number."""


class Machine:
    """The stack, the memo and the position, in one pickle."""

    def __init__(self, data: bytes, where: Place, calls: Calls, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.where, self.persistent = data, where, persistent
        self.calls = {**inert.CALLS, **calls}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what lay on the stack before each mark
        self.memo: list[Any] = []
        self.at = 0
        self._file = io.BytesIO(data)
        self.spare = MAX_COPIES * len(data) + (1 << 16)
        self.alike: dict[int, list[Any]] = {}

    def argument(self) -> Any:
        """What follows the opcode before ``at``, as `pickletools` reads it."""
        code = self.data[self.at - 1]
        if code in _DECIMALS and (digits := self.data.find(b"\n", self.at) - self.at) > MAX_DIGITS:
            raise ValueError(f"a number of {digits} digits")
        self._file.seek(self.at)
        try:
            return _READERS[code](self._file)
        finally:
            self.at = self._file.tell()

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.at = len(self.data)
            raise ValueError("it ends too early")
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def to_mark(self) -> list[Any]:
        values = self.stack
        self.stack = self.below.pop()
        return values

    def remember(self, index: int) -> None:
        count = len(self.memo)
        if index == count:
            self.memo.append(self.stack[-1])
            return
        if not 0 <= index <= self.at:
            raise ValueError(f"thing {index} is remembered after {self.at} bytes")
        if index > count:
            self.memo += [NOTHING] * (index + 1 - count)
        self.memo[index] = self.stack[-1]

    def recalled(self, index: int) -> Any:
        value = self.memo[index] if index >= 0 else NOTHING
        if value is NOTHING:
            raise ValueError("nothing was remembered")
        return value

    def charge(self, values: Iterable[Any]) -> None:
        """Count what is about to be copied."""
        for value in values:
            if isinstance(value, _SIZED):
                self.spare -= len(value)
        if self.spare < 0:
            raise ValueError("it copies the same things over and over")

    def key(self, key: Any, count: int) -> Any:
        """A key for a dict of ``count`` items, if placing it takes bounded time. Raises ValueError, TypeError."""
        kind = type(key)
        if kind is str or (kind is int and 0 <= key <= count + FEW):
            return key
        inner = [key]
        if isinstance(key, (tuple, frozenset)):
            self.charge((key,))
            inner = [k for part in key for k in (part if isinstance(part, tuple) else (part,))]
            self.charge((inner,))
        for part in inner:
            if not isinstance(part, _ATOMS):
                raise TypeError(f"a {type(part).__name__} within a key")
            if isinstance(part, int) and part.bit_length() > 256:
                raise ValueError(f"an integer of {part.bit_length()} bits within a key")
        if any(isinstance(part, (int, float)) for part in inner):
            kin = self.alike.setdefault(hash(key), [])
            if key not in kin:
                kin.append(key)
            if len(kin) > MAX_ALIKE or len(self.alike) > MAX_ODD_KEYS:
                raise ValueError("it has too many keys that may collide")
        return key

    def keys(self, keys: Iterable[Any], count: int = 0) -> Iterator[Any]:
        for i, key in enumerate(keys):
            yield self.key(key, count + i)

    def name(self, module: Any, text: Any) -> Name | Record:
        if not isinstance(module, str) or not isinstance(text, str):
            raise TypeError("a name that is no text")
        full = inert.full_name(module, text)
        if full in inert.SIGNALS:
            return Record("signal.Signals", (inert.SIGNALS[full],))
        if not (full in self.calls or full in _METHODS or inert.is_known(full)):
            raise Unsupported(
                f"{self.where}: its pickle names {full[:200]}, which is no tensor, container or number and no class "
                "of a library that holdfast knows; nothing was executed. If you trust the file, load it with what "
                "wrote it and save it again without that object"
            )
        return Name(full)

    def made(self, target: Any, args: Any) -> Any:
        """What a pickle asks to be called: made by a function of ours, or a record."""
        if type(target) is not Name or not isinstance(args, tuple):
            raise TypeError(f"a {type(target).__name__} is called")
        function = self.calls.get(target.text)
        if function is not None:
            self.charge(args)
            return function(*args)
        method = _METHODS.get(target.text)
        if method is not None:
            self.charge(args)
            return method(self, *args)
        if not inert.is_record(target.text):
            raise TypeError(f"{target.text} is called")
        return Record(target.text, args)

    def append_all(self, values: list[Any]) -> None:
        target = into = self.stack[-1]
        if isinstance(target, Record):
            into = target.elements = target.elements or []
        if not isinstance(into, list):
            raise TypeError(f"appended to a {type(target).__name__}")
        into.extend(values)

    def set_all(self, flat: list[Any]) -> None:
        target = into = self.stack[-1]
        if isinstance(target, Record):
            into = target.items = target.items or {}
        if not isinstance(into, dict) or len(flat) % 2:
            raise TypeError(f"items of a {type(target).__name__}")
        for i in range(0, len(flat), 2):
            key = flat[i]
            into[key if type(key) is str else self.key(key, len(into))] = flat[i + 1]

    def _dict(self, *args: Any) -> dict[Any, Any]:
        # OrderedDict, dict and Counter from nothing, a dict or pairs; a defaultdict has its factory first.
        given = [a for a in args if not isinstance(a, Name) and a is not None]
        if len(given) > 1 or (given and not isinstance(given[0], (dict, list, tuple))):
            raise TypeError(f"a dict of {[type(a).__name__ for a in given[:5]]}")
        pairs = given[0].items() if given and isinstance(given[0], dict) else given[0] if given else ()
        return {self.key(k, i): v for i, (k, v) in enumerate(pairs)}

    def _set(self, values: Any = ()) -> set[Any]:
        if not isinstance(values, (list, tuple, set, frozenset)):
            raise TypeError(f"a set of a {type(values).__name__}")
        return set(self.keys(values))

    def _frozenset(self, values: Any = ()) -> frozenset[Any]:
        return frozenset(self._set(values))

    def _new(self, target: Any, *args: Any) -> Any:
        return self.made(target, args)

    def _reconstructed(self, target: Any, base: Any, state: Any) -> Any:
        # Protocols 0 and 1 make an object from its base class and the value that this had.
        if not isinstance(target, Name) or not isinstance(base, Name):
            raise TypeError("an object of no class")
        if base.text == "builtins.object":
            return Record(target.text)
        if base.text == "builtins.dict" and isinstance(state, dict):
            return Record(target.text, items=state)
        if base.text == "builtins.list" and isinstance(state, list):
            return Record(target.text, elements=state)
        return self.made(target, (state,))


_METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"],
                    Machine._dict),
    "builtins.set": Machine._set,
    "builtins.frozenset": Machine._frozenset,
    "copyreg.__newobj__": Machine._new,
    "copyreg._reconstructor": Machine._reconstructed,
}  # fmt: skip
