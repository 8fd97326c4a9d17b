"""The hyperparameters in a checkpoint of Lightning, as plain values that the format keeps, and back."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.events import log
from holdfast.ondisk import values

_SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPES = ("hparams_type", "datamodule_hparams_type")
_DICT_CONFIG = "omegaconf.dictconfig.DictConfig"

_PLAIN: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    ((bytes, bytearray), bytes),
    (os.PathLike, os.fsdecode),
    ((date, time), lambda moment: moment.isoformat()),
    (timedelta, timedelta.total_seconds),
)
"""What has a plain value besides plain values themselves, and what gives it; subclasses of str and int too."""

_Items = Iterator[tuple[Any, Callable[[], Any]]]
"""Keys or positions, each with a function that gets the value; it raises if OmegaConf cannot resolve the value."""


def with_plain_settings(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``checkpoint`` whose hyperparameters are plain. What has no plain value is left out, with a warning."""
    kept: dict[Any, Any] = {key: value for key, value in checkpoint.items() if key not in _SETTINGS}
    settings = ((key, partial(_item, checkpoint, key)) for key in _SETTINGS if key in checkpoint)
    kept.update(_kept("", settings, frozenset()))
    for key in _TYPES:  # Lightning keeps the class of OmegaConf's hyperparameters, and reads a name too
        if isinstance(kept.get(key), type):
            kept[key] = f"{kept[key].__module__}.{kept[key].__qualname__}"
    return kept


def with_settings_types(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``checkpoint`` that has OmegaConf's class again where its name was saved, if OmegaConf is loaded."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None:
        return checkpoint
    return {k: omegaconf.DictConfig if k in _TYPES and v == _DICT_CONFIG else v for k, v in checkpoint.items()}


def _plain(at: str, node: Any, above: frozenset[int]) -> Any:
    """``node`` as plain values, without the parts that have none. Raises Refused if ``node`` itself has none."""
    if isinstance(node, (torch.Tensor, torch.Size)):
        return node
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(node, numpy.ndarray):
        return torch.from_numpy(node.copy())
    if id(node) in above:
        raise values.Refused("", "it contains itself")
    above |= {id(node)}
    if isinstance(node, (Enum, str, bytes, bytearray)):
        return _plain_leaf(node)
    if isinstance(node, (Sequence, Set)):
        elements = [value for _, value in _kept(at, _positions(node), above)]
        return tuple(elements) if isinstance(node, tuple) else elements
    if isinstance(node, Mapping):
        return dict(_kept(at, _entries(node), above))
    if isinstance(node, (Namespace, SimpleNamespace)):
        return dict(_kept(at, _entries(vars(node)), above))
    if is_dataclass(node) and not isinstance(node, type):
        return dict(_kept(at, ((field.name, partial(getattr, node, field.name)) for field in fields(node)), above))
    return _plain_leaf(node)


def _kept(at: str, items: _Items, above: frozenset[int]) -> Iterator[tuple[str | int, Any]]:
    """Those of the items that have a plain value."""
    seen = set()
    for key, get in items:
        path = f"{at}/{key}" if at else str(key)
        try:
            values.encode(key)
            if key in seen:
                raise values.Refused("", "another key is written in the same way")
            value = _plain(path, get(), above)
        except Exception as error:  # noqa: BLE001 - resolvers of OmegaConf run anybody's code, and a save must go on
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("%s is left out of the checkpoint: %s", path, reason)
        else:
            seen.add(key)
            yield key, value


def _positions(node: Sequence[Any] | Set[Any]) -> _Items:
    ordered = sorted(node, key=repr) if isinstance(node, Set) else node
    return ((i, partial(_item, ordered, i)) for i in range(len(ordered)))


def _entries(node: Mapping[Any, Any]) -> _Items:
    names = {key: _leaf(key) for key in node}
    integers = all(type(name) is int for name in names.values())  # among texts the format might mistake them
    return ((name if integers else str(name), partial(_item, node, key)) for key, name in names.items())


def _item(node: Any, key: Any) -> Any:
    """An item of a mapping or a sequence. In OmegaConf's, interpolations are resolved and missing values are kept."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(node) and omegaconf.OmegaConf.is_missing(node, key):
        return "???"
    return node[key]


def _plain_leaf(node: object) -> Any:
    leaf = _leaf(node)
    values.encode(leaf)
    return leaf


def _leaf(node: object) -> Any:
    """The plain value of a single thing; the thing itself if there is none."""
    if isinstance(node, Enum):
        try:
            return _plain_leaf(node.value)
        except values.Refused:
            return node.name
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(node, numpy.generic):
        node = node.item()
    if type(node) is bool:
        return node
    return next((plain(node) for kind, plain in _PLAIN if isinstance(node, kind)), node)
