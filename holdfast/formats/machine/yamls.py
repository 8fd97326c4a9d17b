"""YAML files of other libraries as plain values, read by PyYAML.

`torchsnapshot` reads manifests of its old versions with it. Never makes an object: tags and aliases are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

MAX_DEPTH = 50

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C where there is a build with libyaml

_PREFIX = "tag:yaml.org,2002:"
_SCALARS: dict[str, Callable[[Any, Any], Any]] = {
    "null": yaml.SafeLoader.construct_yaml_null,
    "bool": yaml.SafeLoader.construct_yaml_bool,
    "int": yaml.SafeLoader.construct_yaml_int,
    "float": yaml.SafeLoader.construct_yaml_float,
    "str": yaml.SafeLoader.construct_yaml_str,
}


def load(text: str) -> Any:
    """The value that ``text`` holds. Raises ValueError, with the line."""
    try:
        _check_shape(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _value(loader, node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"line {mark.line + 1 if mark else 1} is no YAML: {error}") from error


def _check_shape(text: str) -> None:
    """Refuse what is nested too deep, and aliases. The parser takes one step after another, the composer recurses."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise _fault(event, "is an alias, which is not read here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _fault(event, "is nested too deep")


def _value(loader: Any, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
        return [_value(loader, inner) for inner in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
        return _mapping(loader, node)
    construct = _SCALARS.get(node.tag.removeprefix(_PREFIX)) if isinstance(node, yaml.ScalarNode) else None
    if construct is None:
        raise _fault(node, f"has the tag {node.tag}, which is not read here")
    return construct(loader, node)


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for name, inner in node.value:
        key = _value(loader, name)
        if not isinstance(key, (str, int)) or key in mapping:
            raise _fault(name, "has a key that is no text or number, or was there before")
        mapping[key] = _value(loader, inner)
    return mapping


def _fault(node: yaml.Node | yaml.Event, what: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1} {what}")
