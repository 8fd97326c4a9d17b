"""From a nested state to its leaves, for saving and for loading.

`save` and `load` call `collect`. Never copies a tensor and never changes an object of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Unsupported
from holdfast.ranks.ranks import Ranks
from holdfast.state import table
from holdfast.state.leaves import Collected, Entry, Saved
from holdfast.state.recall import Recall
from holdfast.state.walk import Loading, Walk


def collect(
    state: Mapping[str, Any], ranks: Ranks, saved: Saved | None = None, *, recall: Recall | None = None
) -> Collected:
    """All leaves of ``state`` as this rank holds them, tensors as views of their own memory.

    A load passes what the checkpoint holds as ``saved``; the result then says how to hand it back. A save may pass a
    ``recall``: what has not changed since the last time is not walked again. Raises Unsupported, naming the path of the
    first leaf that cannot be saved.
    """
    if not isinstance(state, dict):
        raise Unsupported(f"a state is a dict of names, not a {type(state).__qualname__}: wrap it as {{'model': …}}")
    if recall is not None:
        recall.begin()
    walk = Walk(ranks, state, recall) if saved is None else Loading(ranks, state, saved)
    try:
        table.container(walk, "", state, table.keep)
    except RecursionError:
        raise Unsupported("a container of the state contains itself, or is nested hundreds of times") from None
    _find_aliases(walk.into)
    return walk.into


def _find_aliases(into: Collected) -> None:
    """Names whose every byte is the memory of an earlier name: tied weights. The first name keeps the tensor."""
    first: dict[int, Entry] = {}
    later: dict[int, list[Entry]] = {}  # of memory that starts where the first does, but is not the same
    for name, entry in into.entries.items():
        if not entry.views or 0 in entry.shape:
            continue
        address = entry.views[0].tensor.data_ptr()
        one = first.setdefault(address, entry)
        if one is entry:
            continue
        others = later.setdefault(address, [])
        other = next((e for e in (one, *others) if _same_memory(e, entry)), None)
        if other is None:
            others.append(entry)
        else:
            into.aliases[name] = other.name


def _same_memory(a: Entry, b: Entry) -> bool:
    return (a.dtype, a.shape, a.spread, len(a.views)) == (b.dtype, b.shape, b.spread, len(b.views)) and all(
        (v.box, v.tensor.data_ptr(), v.tensor.stride(), v.tensor.device)
        == (w.box, w.tensor.data_ptr(), w.tensor.stride(), w.tensor.device)
        for v, w in zip(a.views, b.views, strict=True)
    )
