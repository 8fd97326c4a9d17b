"""Which files of a folder are one set of weights, judged by the names that Hugging Face's libraries give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model", "consolidated")
"""What weights are called, the likeliest first; `.bin` files of other names are taken for no weights."""

ONE_FILE, INDEXED, SHARDS, OF_RANKS = range(4)
"""How weights are kept, in the order in which transformers looks for them; last what the ranks of DCP wrote."""

_VARIANT = r"(?:\.(?P<variant>[\w-]+))?"
_INDEX = re.compile(rf"(?P<stem>.+?)\.(?P<kind>safetensors|bin)\.index{_VARIANT}\.json")
_SHARD = re.compile(rf"(?P<stem>.+?)-(?P<number>\d+)-of-(?P<count>\d+){_VARIANT}\.(?P<kind>safetensors|bin)")
_ONE_FILE = re.compile(r"(?P<stem>.+)\.(?P<kind>safetensors|bin)")
_OF_RANK = re.compile(r"shard-(?P<rank>\d+)-.+\.safetensors")
_FURTHER = re.compile(r"(?:pytorch_)?model_\d+")


@dataclass(frozen=True)
class WeightSet:
    """One set of weights. ``stem``: what it is called, with its variant (``model.fp16``). ``count``: how many files a
    set of shards should have; ``index``: the file that lists them.
    """

    kind: str
    stem: str
    form: int
    files: tuple[str, ...]
    count: int = 1
    index: str = ""

    @property
    def title(self) -> str:
        """How it is called in messages."""
        return self.index or self.files[0] + (f" … {self.files[-1]}" if len(self.files) > 1 else "")

    @property
    def likely(self) -> bool:
        """Whether this is a usual name for weights."""
        return self.stem.partition(".")[0] in STEMS

    @property
    def further(self) -> bool:
        """Whether it is the second model of Accelerate, or a later one."""
        return self.form == ONE_FILE and bool(_FURTHER.fullmatch(self.stem))

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there; they are counted from 1, by a few writers from 0."""
        numbers = {int(m["number"]) for m in map(_SHARD.fullmatch, self.files) if m}
        first = 0 if 0 in numbers else 1
        return sorted({*range(first, first + self.count)} - numbers)

    def world_size(self) -> int:
        """The highest rank that wrote one of the files, counted from 1."""
        return max((int(m["rank"]) for m in map(_OF_RANK.fullmatch, self.files) if m), default=1)


def sets(names: Sequence[str]) -> list[WeightSet]:
    """The sets of weights among the files of a folder, the likeliest first."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    weight_sets: list[WeightSet] = []
    for name in names:
        if _OF_RANK.fullmatch(name):
            continue
        if (m := _SHARD.fullmatch(name)) and _is_weights(m):
            groups.setdefault((m["kind"], _stem(m), int(m["count"])), []).append(name)
        elif (m := _ONE_FILE.fullmatch(name)) and _is_weights(m):
            weight_sets.append(WeightSet(m["kind"], m["stem"], ONE_FILE, (name,)))
    indexed = [index for name in names if (index := index_of(name))]
    with_index = {(index.kind, index.stem) for index in indexed}
    for index in indexed:
        own = [group for (kind, stem, _), group in groups.items() if (kind, stem) == (index.kind, index.stem)]
        weight_sets.append(replace(index, files=tuple(name for group in own for name in group)))
    for (kind, stem, count), group in groups.items():
        if (kind, stem) not in with_index:
            weight_sets.append(WeightSet(kind, stem, SHARDS, tuple(group), count))
    ranks = of_ranks(names)
    return sorted([*weight_sets, *([ranks] if ranks else [])], key=_place)


def index_of(name: str) -> WeightSet | None:
    """The set that an index of that name lists, or None if it is no name of an index."""
    m = _INDEX.fullmatch(name)
    return m and WeightSet(m["kind"], _stem(m), INDEXED, (), index=name)


def of_ranks(names: Iterable[str]) -> WeightSet | None:
    """The files that the ranks of DCP wrote, if there are any."""
    files = tuple(name for name in names if _OF_RANK.fullmatch(name))
    return WeightSet("safetensors", "shard", OF_RANKS, files) if files else None


def shard_count(name: str) -> int:
    """How many files the set has to which a file of that name belongs; 1 if it is a set by itself."""
    m = _SHARD.fullmatch(name)
    return int(m["count"]) if m else 1


def _place(weights: WeightSet) -> tuple[bool, int, str, int]:
    base, _, variant = weights.stem.partition(".")
    return weights.kind == "bin", STEMS.index(base) if base in STEMS else len(STEMS), variant, weights.form


def _stem(match: re.Match[str]) -> str:
    return match["stem"] + (f".{match['variant']}" if match["variant"] else "")


def _is_weights(match: re.Match[str]) -> bool:
    stem = match["stem"]
    return match["kind"] == "safetensors" or stem.partition(".")[0] in STEMS or bool(_FURTHER.fullmatch(stem))
