"""The kind of layer of each module, kept in the manifest: another model may have the same names and shapes.

The walk calls `kinds_of`, the commit `encode_kinds`, a load `decode_kinds` and `unlike`. Never compares classes that
torch does not define: users and libraries rename, fuse and replace them without making another model.
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
"""The key of a manifest's ``producer`` that holds them."""

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


def encode_kinds(kinds: Mapping[str, str]) -> str:
    """The kinds as JSON: numbers in names become ``*`` where all layers are alike. Empty if there is none."""
    by_pattern: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        by_pattern.setdefault(_pattern(name), {})[name] = kind
    short: dict[str, str] = {}
    for pattern, same in by_pattern.items():
        short.update({pattern: next(iter(same.values()))} if len(set(same.values())) == 1 else same)
    short = {name: kind for name, kind in short.items() if kind}
    return msgspec.json.encode(short).decode() if short else ""


def decode_kinds(producer: Mapping[str, str]) -> dict[str, str]:
    """The inverse of `encode_kinds`; empty if there is nothing, or nothing readable."""
    try:
        return msgspec.json.decode(producer.get(KEY, "{}"), type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def unlike(saved: Mapping[str, str], own: Mapping[str, str], asked: Callable[[str], bool]) -> list[str]:
    """A line for each module that was saved as another kind than it is here, if its name is ``asked`` for."""
    lines = []
    for name, kind in own.items() if saved else ():
        was = saved.get(name) or saved.get(_pattern(name))
        if kind and was and was != kind and (asked(name) or asked(f"{name}.weight")):
            lines.append(f"{name}: saved by a {was}, here a {kind} (other_model=True loads it all the same)")
    return lines


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)
