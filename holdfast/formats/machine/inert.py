"""What a pickle may name, and what stands for it: inert records, plain names, and functions of ours for a few.

A name is compared with lists; it is never imported or looked up.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

MAX_NAME = 1000
"""Characters of a name; names of real classes have a tenth of that."""

# Hardly a record has any, and there may be a million records.
_NO_ITEMS: Any = MappingProxyType({})
_NO_ELEMENTS: Any = ()


class Record:
    """An object of a peer's class as inert data: its class by name, what it was made from, and its attributes.

    ``items`` and ``elements`` are what was put into it as into a dict or a list; they are only read.
    """

    __slots__ = ("args", "elements", "items", "name", "state")

    def __init__(
        self, name: str, args: tuple[Any, ...] = (), state: Any = None, items: dict[Any, Any] = _NO_ITEMS,
        elements: list[Any] = _NO_ELEMENTS,
    ) -> None:  # fmt: skip
        self.name, self.args, self.state, self.items, self.elements = name, args, state, items, elements

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute of the object."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        # Not what it holds: for records that share their parts, or hold themselves, that would never end.
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names: nothing but its name."""

    text: str

    def __str__(self) -> str:
        return self.text


Calls = Mapping[str, Callable[..., Any]]
"""What stands for the functions that a pickle may name: our own, by their names."""

# Packages whose classes may become records. Nothing of theirs runs, so one is listed if its files are worth reading.
_PACKAGES = frozenset([
    "accelerate", "apex", "bitsandbytes", "colossalai", "composer", "deepspeed", "easydict", "fairscale", "fairseq",
    "hfai", "hydra", "lightning", "lightning_fabric", "lightning_utilities", "llmfoundry", "megatron",
    "ml_collections", "mmcv", "mmengine", "nemo", "olmo", "olmo_core", "omegaconf", "peft", "pytorch_lightning",
    "streaming", "timm", "torch", "torch_checkpointing", "torch_xla", "torchao", "torchdata", "torchmetrics",
    "torchsnapshot", "torchtitan", "torchtune", "torchvision", "transformer_engine", "transformers", "trl",
])  # fmt: skip
_CLASSES = frozenset([
    "_io.BytesIO", "argparse.Namespace", "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta",
    "datetime.timezone", "decimal.Decimal", "fractions.Fraction", "ml_dtypes.bfloat16", "ml_dtypes.float8_e4m3fn",
    "ml_dtypes.float8_e5m2", "numpy.core.memmap.memmap", "numpy.dtype", "numpy.memmap", "numpy.ndarray",
    "random.Random", "signal.Signals", "types.SimpleNamespace", "uuid.UUID", "zoneinfo.ZoneInfo",
    # Objects without meaning outside of Python, and types as arguments: defaultdict(list), getattr(SomeEnum, …).
    "builtins.bool", "builtins.bytes", "builtins.dict", "builtins.float", "builtins.int", "builtins.list",
    "builtins.object", "builtins.range", "builtins.set", "builtins.slice", "builtins.str", "builtins.tuple",
])  # fmt: skip
# Generators and their states, which are arrays and numbers; classes of numbers.
_NUMPY = re.compile(
    r"numpy\.(random\..+|dtypes\..+|(bool|str|bytes)_?|(u?int|float|complex)\d+|longdouble|"
    r"core\._internal\._convert_to_stringdtype_kwargs)"
)
# Functions of known packages that run what they are given. Only a hostile checkpoint names them.
_RUNS = re.compile(
    r"torch\.(load|compile|ops|classes|library|(hub|jit|package|fx|onnx|testing|multiprocessing|_inductor|_dynamo(?!\.decorators\._DimRange$)|"
    r"serialization|utils\.(cpp_extension|bottleneck|collect_env|_config_module|data\.datapipes|model_zoo)|"
    r"distributed\.(rpc|run|launch(er)?|elastic))\..+)(\..+)?"
)
SIGNALS = {f"signal.{number.name}": int(number) for number in signal.Signals}
"""Signals by name, as Python 3.10 pickles them; later ones pickle a call with the number."""
_RECORDS_OF_BUILTINS = frozenset(["builtins.object", "builtins.range", "builtins.slice"])
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "torch.tensor": "torch._tensor"}
_OLD_NAMES = {"builtins.long": "builtins.int", "builtins.unicode": "builtins.str", "builtins.xrange": "builtins.range"}


def full_name(module: str, name: str) -> str:
    """One name for what Python 2, older NumPy and older torch call otherwise. Raises ValueError if it is no name."""
    module = _OLD_MODULES.get(module, module)
    if module.startswith("numpy._core"):
        module = "numpy.core" + module.removeprefix("numpy._core")
    full = f"{module}.{name}"
    if len(full) > MAX_NAME or not all(part.isidentifier() for part in full.split(".")):
        raise ValueError(f"{full[:100]!r} is no name")
    return _OLD_NAMES.get(full, full)


def is_known(full: str) -> bool:
    """Whether a name may come as a record or a plain name."""
    if _RUNS.fullmatch(full):
        return False
    return full in _CLASSES or full.partition(".")[0] in _PACKAGES or _NUMPY.fullmatch(full) is not None


def is_record(full: str) -> bool:
    """Whether an object of that name, called without a function of ours, becomes a record."""
    return not full.startswith("builtins.") or full in _RECORDS_OF_BUILTINS


def of_type(*kinds: type) -> Callable[..., Any]:
    """A function that returns its one argument, if that is of such a type."""

    def same(*args: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], kinds):
            raise TypeError(f"made from {[type(a).__name__ for a in args[:5]]}")
        return args[0]

    return same


def _list(values: Any = (), *_: Any) -> list[Any]:  # a deque has its greatest length after its values
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"a list of a {type(values).__name__}")
    return list(values)


def _bytes(text: Any = b"", encoding: str = "latin1") -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError(f"bytes of a {type(text).__name__}")
    return text.encode("latin1")


def _complex(*parts: Any) -> complex:
    return complex(*map(of_type(int, float), parts))


def _attribute(owner: Any, name: Any) -> Name:
    # Enums are pickled as getattr(class, name) by some Pythons: the answer is the joined name.
    if not isinstance(owner, Name) or not isinstance(name, str):
        raise TypeError(f"getattr of a {type(owner).__name__}")
    return Name(full_name(owner.text, name))


def _path(*parts: Any) -> str:
    return str(PurePath(*map(of_type(str), parts)))


CALLS: Calls = {
    "collections.deque": _list,
    "builtins.list": _list,
    "builtins.tuple": lambda *args: tuple(_list(*args)),
    "builtins.int": of_type(int),
    "builtins.float": of_type(int, float),
    "builtins.str": of_type(str),
    "builtins.bool": of_type(bool),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _bytes,
    "builtins.complex": _complex,
    "builtins.getattr": _attribute,
    **{
        f"pathlib.{where}{kind}": _path
        for where in ("", "_local.")
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    },
}
"""The functions of ours that need nothing but their arguments."""


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        return iter(list(node.values()))
    if isinstance(node, (list, tuple, set, frozenset)):
        return iter(list(node))
    if isinstance(node, Record):
        return iter([*node.args, node.state, *node.items.values(), *node.elements])
    return iter(())


def expanded(value: Any, limit: int) -> int | None:
    """How many values a walk through ``value`` meets that goes into shared parts each time; None if over ``limit``.

    A few hundred bytes of pickle can make billions, or a list that holds itself. Takes time in proportion to memory.
    """
    totals: dict[int, int] = {}
    path: list[tuple[Any, Iterator[Any], int]] = [(value, _parts(value), 1)]
    while True:
        node, parts, total = path.pop()
        for part in parts:
            if not isinstance(part, (dict, list, tuple, set, frozenset, Record)):
                total += 1
            elif (known := totals.get(id(part))) is None:
                totals[id(part)] = limit + 1  # if it is met again before it is done, it holds itself
                path += [(node, parts, total), (part, _parts(part), 1)]
                break
            else:
                total += known
            if total > limit:
                return None
        else:
            totals[id(node)] = total
            if not path:
                return total if total <= limit else None
            node, parts, above = path.pop()
            path.append((node, parts, above + total))
