"""What kind of layer each module of a state is, told in the manifest: another model may have the same names and shapes.

The walk calls `kinds_of`, the commit `told`, `load` `heard` and `unlike`. Never compares what torch does not define
itself: classes of users and of other libraries are renamed, fused and replaced without becoming other models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import cast

import msgspec
from torch import nn

from holdfast.ondisk import names
from holdfast.state.modules import named_modules, unwrapped

KEY = "modules"
"""Where a manifest's ``producer`` tells it."""

_FAMILIES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Linear, "Linear"),
    (nn.Bilinear, "Bilinear"),
    (nn.Embedding, "Embedding"),
    (nn.EmbeddingBag, "EmbeddingBag"),
    (nn.modules.batchnorm._BatchNorm, "BatchNorm"),  # SyncBatchNorm too, in whose place it is put
    (nn.modules.instancenorm._InstanceNorm, "InstanceNorm"),
    (nn.LayerNorm, "LayerNorm"),
    (nn.GroupNorm, "GroupNorm"),
    (nn.RMSNorm, "RMSNorm"),
    (nn.modules.conv._ConvTransposeNd, "ConvTranspose"),
    (nn.modules.conv._ConvNd, "Conv"),
    (nn.RNN, "RNN"),
    (nn.LSTM, "LSTM"),
    (nn.GRU, "GRU"),
)
"""Layers that do different things with tensors of the same names and shapes. What derives from one is of its kind:
FSDP2, LoRA, parametrizations and quantised layers are such classes."""

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


@lru_cache(maxsize=1024)
def _kind(kind: type[nn.Module]) -> str:
    for family, name in _FAMILIES:
        if issubclass(kind, family):
            return name
    if not issubclass(kind, nn.MultiheadAttention):
        for base in kind.__mro__:
            if base.__module__ == "torch.nn.modules.activation":
                return base.__name__
    return ""


def kinds_of(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """The kind of each module by name, empty if it is of none; wrappers leave no trace."""
    for prefix, sub in named_modules(module):
        if unwrapped(sub) is sub:
            yield (names.child(path, prefix[:-1]) if prefix else path), _kind(cast(Hashable, type(sub)))


def told(kinds: Mapping[str, str]) -> str:
    """The kinds in few words: numbers in names are ``*`` where all layers are alike. Empty if there is none."""
    by_pattern: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        by_pattern.setdefault(_pattern(name), {})[name] = kind
    short: dict[str, str] = {}
    for pattern, found in by_pattern.items():
        short.update({pattern: next(iter(found.values()))} if len(set(found.values())) == 1 else found)
    short = {name: kind for name, kind in short.items() if kind}
    return msgspec.json.encode(short).decode() if short else ""


def heard(producer: Mapping[str, str]) -> dict[str, str]:
    """What `told` told; nothing if nobody did."""
    try:
        return msgspec.json.decode(producer.get(KEY, "{}"), type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def unlike(saved: Mapping[str, str], own: Mapping[str, str], asked: Callable[[str], bool]) -> list[str]:
    """A line for each module that was saved as another kind than it is here, of the names that are ``asked`` for."""
    lines = []
    for name, kind in own.items() if saved else ():
        was = saved.get(name) or saved.get(_pattern(name))
        if kind and was and was != kind and (asked(name) or asked(f"{name}.weight")):
            lines.append(f"{name}: saved by a {was}, here a {kind} (other_model=True loads it all the same)")
    return lines


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)
