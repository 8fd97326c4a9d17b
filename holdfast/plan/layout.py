"""What one rank sends the others of its state before a save: names, shapes, spreads; never bytes or values.

`state.outline` makes a layout, ranks send each distinct one once, and the plan joins them. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.errors import Mismatch
from holdfast.ondisk.blocks import digest
from holdfast.ondisk.containers import SEQUENCES, Note
from holdfast.ondisk.packing import unpacked
from holdfast.ondisk.values import JSON
from holdfast.plan.spread import Spread


class TensorLayout(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor; ``spread`` indexes the layout's table. ``alias`` is set if it is the same memory as another name.

    ``empty``: the rank has no element of it, and so cannot know whether it is an alias. ``first``
    asks for the copy of the first rank that holds it, whole: a buffer, which ranks may have updated each on its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: int
    alias: str | None
    empty: bool
    first: bool = False


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """All that a plan needs of one rank. Ranks of one mesh have equal ones.

    ``version``: the version of the format that its PerRank values need.
    """

    tensors: list[TensorLayout]
    spreads: list[Spread]
    aliases: dict[str, str]
    containers: dict[str, Note]
    per_rank: list[str]
    group_params: dict[str, list[list[str]]]
    version: int = 1


class OwnedValues(msgspec.Struct, array_like=True, frozen=True):
    """Values of modules and optimizers, which pipeline stages may have each their own."""

    values: dict[str, JSON]
    group_settings: dict[str, list[dict[str, JSON]]]


_json = msgspec.json.Encoder(order="deterministic")


def digest_of(message: object) -> str:
    """32 hex digits that stand for a layout or for values."""
    return digest(_json.encode(message))


def join_values(of_ranks: Sequence[tuple[int, Layout, dict[str, JSON]]]) -> dict[str, JSON]:
    """The values of all ranks; ``of_ranks`` = (rank, its layout, its values). A rank may lack values that another has.

    Raises Mismatch for the first value that two ranks have differently, or a list that is longer on one of them.
    """
    values: dict[str, JSON] = {}
    source: dict[str, int] = {}
    lists: dict[str, tuple[int, int]] = {}
    for rank, layout, own in of_ranks:
        for path, value in own.items():
            if values.setdefault(path, value) != value:
                at, one, two = _first_difference(values[path], value)
                raise Mismatch(
                    f"{path}{at} differs between ranks: {_shown(one)} on rank {source[path]}, "
                    f"{_shown(two)} on rank {rank}. {_PER_RANK}"
                )
            source.setdefault(path, rank)
        for path, length in _lengths(layout, own).items():
            other, first = lists.setdefault(path, (rank, length))
            if length != first:
                raise Mismatch(
                    f"{path} differs between ranks: {first} values on rank {other}, {length} on rank {rank}. "
                    + _PER_RANK
                )
    return values


_PER_RANK = "Wrap it as holdfast.PerRank(…) if every rank has its own, else make the ranks agree"


def _lengths(layout: Layout, values: Iterable[str]) -> dict[str, int]:
    """How many children with values each list, tuple or deque of a rank has."""
    kinds = {path: note if isinstance(note, str) else note.kind for path, note in layout.containers.items()}
    children: dict[str, set[str]] = {path: set() for path, kind in kinds.items() if kind in SEQUENCES}
    for path in values if children else ():
        above, _, key = path.rpartition("/")
        while above:
            if above in children:
                children[above].add(key)
            above, _, key = above.rpartition("/")
    return {path: len(keys) for path, keys in children.items()}


_NOTHING = object()


def _first_difference(one: Any, two: Any) -> tuple[str, Any, Any]:
    """Where in two long lists the first different elements are, and what they are; else the values themselves."""
    one, two = unpacked(one), unpacked(two)
    if isinstance(one, list) and isinstance(two, list):
        for at in range(max(len(one), len(two))):
            ends = [values[at] if at < len(values) else _NOTHING for values in (one, two)]
            if ends[0] != ends[1]:
                return f"/{at}", ends[0], ends[1]
    return "", one, two


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


class JoinedGroups(msgspec.Struct, array_like=True, frozen=True):
    """The parameter groups of one optimizer over all ranks."""

    settings: list[dict[str, JSON]]
    params: list[list[str]]


class OwnedJoin(msgspec.Struct, array_like=True, frozen=True):
    values: dict[str, JSON]
    groups: dict[str, JoinedGroups]


def _check_one_group(path: str, joined: JoinedGroups, at: int, params: Sequence[str], rank: int) -> None:
    """Raise Mismatch if one of these parameters is in another group already, with the settings of another rank."""
    here = set(params)
    for index, others in enumerate(joined.params):
        if index != at and (both := here.intersection(others)):
            one, other = joined.settings[index], joined.settings[at]
            odd = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            raise Mismatch(
                f"{path}/param_groups: the group of {min(both)} has another {', '.join(odd[:5])} on rank {rank} than "
                "on ranks before it; make the ranks agree (all-reduce what the optimizer has summed up)"
            )


def join_owned(layouts: Sequence[Layout], of_ranks: Sequence[tuple[int, int, OwnedValues]]) -> OwnedJoin:
    """One set of values and groups from those of all ranks; ``of_ranks`` = (rank, index of its layout, its values).

    A group of one rank joins that of another if their settings are equal, in order; so pipeline stages, each with
    its own parameters, make one list of groups. Raises Mismatch where one path has two values.
    """
    values = join_values([(rank, layouts[layout], owned.values) for rank, layout, owned in of_ranks])
    groups: dict[str, JoinedGroups] = {}
    for rank, layout, owned in of_ranks:
        for path, settings in owned.group_settings.items():
            joined = groups.setdefault(path, JoinedGroups([], []))
            used: set[int] = set()
            for own, params in zip(settings, layouts[layout].group_params[path], strict=True):
                at = next((i for i, s in enumerate(joined.settings) if i not in used and s == own), None)
                if at is None:
                    at = len(joined.settings)
                    joined.settings.append(own)
                    joined.params.append([])
                used.add(at)
                _check_one_group(path, joined, at, params, rank)
                have = set(joined.params[at])
                joined.params[at].extend(p for p in params if p not in have)
    return OwnedJoin(values, groups)
