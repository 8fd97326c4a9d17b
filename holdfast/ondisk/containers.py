"""Which containers a state may have, what a checkpoint notes of each, and how one is built again from its children.

`values`, the walk over a state and `nested` call it. Never looks at a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from holdfast.ondisk import scalars
from holdfast.ondisk.scalars import JSON, Refused

FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool, "tuple": tuple,
}  # fmt: skip
"""What a defaultdict may make its values by: called by name, since a checkpoint holds no code."""

MAPPINGS = ("dict", "OrderedDict", "Counter", "defaultdict")
SEQUENCES = ("list", "tuple", "deque")
TENSOR = "tensor"
_MAX_LENGTH = (1 << 63) - 1
_SHOWN = 1000


class Container(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What version 2 notes of a container where the name of its kind does not say all.

    A tensor that is more than its bytes is noted too, of kind ``"tensor"``: ``tensor`` is JSON that says what it is.
    ``keys``: for each key that is no text, the name of its child and the key, coded as a value. ``order``: the names of
    the children, where they would come back in another order. ``maxlen`` of a deque, ``factory`` of a defaultdict.
    """

    kind: str
    keys: tuple[tuple[str, JSON], ...] = ()
    order: tuple[str, ...] = ()
    maxlen: int | None = None
    factory: str | None = None
    tensor: str | None = None


Note = str | Container
"""What a checkpoint notes of a container: ``"dict"``, ``"list"`` or ``"tuple"`` in version 1, and in version 2 more."""


def kind_of(node: object) -> str | None:
    """What kind of container this is, or None for what is a leaf. A dict of an unknown class counts as a dict."""
    kind = type(node)
    if isinstance(node, dict):
        return kind.__name__ if kind in (OrderedDict, Counter, defaultdict) else "dict"
    return kind.__name__ if kind in (list, tuple, deque) else None


def children(node: Any) -> Collection[Any]:
    values: Collection[Any] = node.values() if isinstance(node, dict) else node
    return values


def factory_of(node: Any) -> str | None:
    """What a defaultdict makes its values by, by name. Raises Refused for what is not in `FACTORIES`."""
    if node.default_factory is None:
        return None
    for name, factory in FACTORIES.items():
        if node.default_factory is factory:
            return name
    raise Refused(
        "",
        f"a defaultdict that makes its values by {node.default_factory!r} is not kept, since a checkpoint holds "
        f"nothing executable; store dict(it), or make them by {', '.join(FACTORIES)}",
    )


def key_names(node: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """For each key of a dict, in its order, the text that stands for it in a name, and the key as it will come back.

    A text and an integer are called what they are, other keys as Python shows them; then ``~`` is added until no other
    key is called the same. Raises Refused for a key that the format does not keep.
    """
    if all(type(key) is str for key in node):
        return [(key, key) for key in node]
    keys = [scalars.plain_key(key) for key in node]
    taken = {key for key in keys if type(key) is str}
    named: list[tuple[str, Any]] = []
    for key in keys:
        if type(key) is str:
            named.append((key, key))
            continue
        check_key(key)
        name = str(key) if type(key) is int else repr(key)
        while name in taken:
            name += "~"
        taken.add(name)
        named.append((name, key))
    return named


def check_key(key: object) -> None:
    """Raise Refused for what a dict of a state cannot have as a key."""
    if type(key) is tuple:
        for part in key:
            check_key(part)
        return
    try:
        if type(key) is not str:
            scalars.encode(key)
    except Refused:
        raise Refused(
            "",
            f"the key {str(key)[:40]!r} of type {scalars.full_name(key)} is not kept; a key is a text, a number, "
            "bytes, None, or a tuple of these",
        ) from None


def note_of(node: Any, named: Sequence[tuple[str, Any]], *, ordered: bool, exact: bool) -> Note | None:
    """What has to be noted of a container, or None if nothing has to: of a dict with texts as keys.

    ``named`` are the names and keys of a dict's children. ``ordered`` asks for their order to be noted. Without
    ``exact`` the class of a dict is left out: of one that is filled in place, and so keeps its own. Raises Refused.
    """
    kind = kind_of(node) or "dict"
    if kind == "deque":
        return Container(kind, maxlen=node.maxlen)
    if kind in SEQUENCES:
        return kind
    kind = kind if exact else "dict"
    numbers = [(name, key) for name, key in named if type(key) is int]
    others = [(name, key) for name, key in named if type(key) not in (str, int)]
    # By a plain "dict" every name that looks like an integer is one. Readers of version 1 accept this note on a
    # dict that is not empty, so integer keys alone need no later version.
    unclear = numbers and any(type(key) is str and looks_like_integer(key) for _, key in named)
    if kind == "dict" and not (ordered or others or unclear):
        return "dict" if numbers or not node else None
    # Of an empty tuple msgspec leaves out the default itself alone, and Python 3.10 makes others of generators.
    return Container(
        kind,
        keys=tuple((name, scalars.encode_key(key)) for name, key in named if type(key) is not str) or (),
        order=(tuple(name for name, _ in named) if ordered else ()) or (),
        factory=factory_of(node) if kind == "defaultdict" else None,
    )


def shown(note: Note) -> str:
    """A note in a few words."""
    if isinstance(note, str):
        return f"a {note}"
    names = note.order or [name for name, _ in note.keys]
    return f"a {note.kind}{f' of {list(names)}' if names else ''}"[:200]


def looks_like_integer(name: str) -> bool:
    """Whether a plain ``"dict"`` makes an integer of this name."""
    return name.removeprefix("-").isdecimal()


def fault_of(note: Note) -> str | None:
    """What is wrong with a note that was read, if anything."""
    if isinstance(note, str):
        return None if note in ("dict", "list", "tuple") else f"is a {note!r}"
    if (note.kind == TENSOR) != (note.tensor is not None):
        return f"is a {note.kind!r} and {'no ' if note.tensor is None else ''}tensor"
    if note.kind not in (*MAPPINGS, *SEQUENCES, TENSOR):
        return f"is a {note.kind!r}"
    if (note.keys or note.order) and note.kind not in MAPPINGS:
        return f"is a {note.kind} with keys"
    if note.maxlen is not None and (note.kind != "deque" or not 0 <= note.maxlen <= _MAX_LENGTH):
        return f"is a {note.kind} of at most {note.maxlen}"
    if note.factory is not None and (note.kind != "defaultdict" or note.factory not in FACTORIES):
        return f"is a {note.kind} that makes its values by {note.factory!r}"
    try:
        keys = [scalars.decode_key(key) for _, key in note.keys]
        if len(set(keys)) == len(keys) == len({name for name, _ in note.keys}):
            return None
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        return f"has a key that is none: {error}"
    return "has a key twice"


def mapping_of(note: Note | None, children_by_name: Mapping[str, Any]) -> dict[Any, Any]:
    """A dict as it is noted, from its children by name."""
    if not isinstance(note, Container):
        if note != "dict":
            return dict(children_by_name)
        return {int(name) if looks_like_integer(name) else name: child for name, child in children_by_name.items()}
    first = {name: at for at, name in enumerate(note.order)}
    names = sorted(children_by_name, key=lambda name: first.get(name, len(first))) if first else list(children_by_name)
    keys = {name: scalars.decode_key(key) for name, key in note.keys}
    return built_mapping(note.kind, [(keys.get(name, name), children_by_name[name]) for name in names], note.factory)


def built_mapping(kind: str, pairs: Iterable[tuple[Any, Any]], factory: str | None = None) -> dict[Any, Any]:
    if kind in ("dict", TENSOR):
        return dict(pairs)
    made: dict[Any, Any] = (
        defaultdict(None if factory is None else FACTORIES[factory]) if kind == "defaultdict"
        else OrderedDict() if kind == "OrderedDict" else Counter()
    )  # fmt: skip
    made.update(dict(pairs))  # of pairs a Counter would count how many there are
    return made


def is_tensor(note: Note | None) -> bool:
    """Whether what is noted so is no container, but a tensor."""
    return isinstance(note, Container) and note.kind == TENSOR


def sequence_of(note: Note, items: list[Any]) -> Any:
    """A list, tuple or deque as it is noted."""
    if isinstance(note, Container):
        return built_sequence(note.kind, items, note.maxlen)
    return built_sequence(note, items)


def built_sequence(kind: str, items: list[Any], maxlen: int | None = None) -> Any:
    """A list, tuple or deque."""
    return items if kind == "list" else tuple(items) if kind == "tuple" else deque(items, maxlen)


def is_sequence(note: Note | None) -> bool:
    """Whether the children of what is noted so are called by their positions."""
    return (note.kind if isinstance(note, Container) else note) in SEQUENCES


def mapped(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """A nest of containers with every leaf replaced."""
    kind = kind_of(node)
    if kind is None:
        return leaf(node)
    if not isinstance(node, dict):
        return built_sequence(kind, [mapped(child, leaf) for child in node], getattr(node, "maxlen", None))
    made = built_mapping(kind, ((key, mapped(child, leaf)) for key, child in node.items()))
    if isinstance(made, defaultdict) and isinstance(node, defaultdict):
        made.default_factory = node.default_factory
    return made


def as_text(value: Any) -> str:
    """A value as Python shows it; of a long container how it begins, and how much it holds."""
    if kind_of(value) is None or len(value) <= _SHOWN:
        return repr(value)
    first = list(islice(value.items() if isinstance(value, dict) else value, _SHOWN))
    return f"{len(value)} in all: {dict(first) if isinstance(value, dict) else first}"
