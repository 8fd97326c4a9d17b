"""Which parts of a module have methods of their own for saving and loading, and how these are called.

`module_leaves` asks it in a load. Never fills a tensor in place: such a part is loaded from new memory.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from holdfast.errors import Mismatch
from holdfast.state.modules import EXTRA_STATE, gives_extra_state, innermost, named_modules, plain_fqn, unwrapped

_SAME = (
    "torch.distributed.",  # FSDP2 and wrappers: they bring their parameters into the form in which they are read here
    "torch.nn.modules.batchnorm",  # these two only mend state dicts of torch versions before 1.0
    "torch.nn.modules.instancenorm",
)
"""Modules of torch whose hooks and methods do nothing that filling tensors in place would not do."""


@dataclass(frozen=True)
class Scope:
    """A submodule at ``prefix`` (``""`` or ending in a dot) that is loaded by its own methods, with all below it.

    ``root`` says that it is the module of the state itself, whose overridden ``load_state_dict`` counts as well.
    """

    prefix: str
    module: nn.Module
    root: bool


def scopes_of(module: nn.Module) -> list[Scope]:
    """The outermost submodules that override methods for saving and loading, or have hooks on these."""
    scopes: list[Scope] = []
    inner = innermost(module)
    for prefix, sub in named_modules(module):
        if unwrapped(sub) is not sub or any(prefix.startswith(scope.prefix) for scope in scopes):
            continue
        root = sub is inner
        if _changes_state_dict(sub) or _changes_loading(sub) or (root and _overrides(sub, "load_state_dict")):
            scopes.append(Scope(prefix, sub, root))
    return scopes


def has_a_say_in_saving(module: nn.Module) -> bool:
    """Whether a state dict of ``module`` may hold other entries each time that it is asked for."""
    return any(_changes_state_dict(sub) or gives_extra_state(sub) for sub in module.modules())


def hooks_after(module: nn.Module, scopes: list[Scope]) -> Iterator[tuple[str, Callable[[], None]]]:
    """For each submodule outside of ``scopes`` with load post-hooks: its prefix and a call of them, innermost first."""
    for prefix, sub in reversed(list(named_modules(module))):
        hooks = [hook for hook in sub._load_state_dict_post_hooks.values() if not _is_same(hook)]
        if hooks and unwrapped(sub) is sub and not any(prefix.startswith(scope.prefix) for scope in scopes):
            yield prefix, partial(_call, hooks, sub)


def takes(scope: Scope, key: str) -> bool:
    """Whether the scope's module takes the entry ``key`` (relative to the scope) back when it is loaded."""
    if may_resize(scope, key):
        return True
    owner, name = _owner_of(scope, key)[-1]
    if name == EXTRA_STATE:
        return takes_extra_state(owner)
    return name in owner._parameters or (name in owner._buffers and name not in owner._non_persistent_buffers_set)


def may_resize(scope: Scope, key: str) -> bool:
    """Whether a method of the scope sees the entry ``key`` in a load, and may change its shape."""
    if scope.root and _overrides(scope.module, "load_state_dict"):
        return True
    return any(_changes_loading(owner) for owner, _ in _owner_of(scope, key))


def _owner_of(scope: Scope, key: str) -> list[tuple[nn.Module, str]]:
    """The modules on the way to an entry, from the scope's to the one that has it, each with the rest of the key."""
    owner, name = scope.module, key
    way = [(unwrapped(owner), name)]
    while True:
        inner = innermost(owner)
        child = next((k for k, sub in inner._modules.items() if sub is not None and name.startswith(f"{k}.")), None)
        if child is None:
            return way
        owner, name = cast(nn.Module, inner._modules[child]), name[len(child) + 1 :]
        way.append((innermost(owner), name))


def attribute_of(scope: Scope, key: str, value: object) -> tuple[nn.Module, str] | None:
    """The plain attribute that the entry ``key`` is the number of, if it is one.

    A module that adds a number to its state dict (in ``_save_to_state_dict`` or a hook) and has no method that takes it
    back gets it back in the attribute of that name, if the attribute's value is what the entry says at present.
    """
    head, _, name = key.rpartition(".")
    try:
        owner = unwrapped(scope.module).get_submodule(head)
    except AttributeError:
        return None
    own = getattr(owner, name, None)
    if type(own) not in (bool, int, float) or not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    return (owner, name) if value.item() == torch.tensor(own, dtype=value.dtype, device="cpu").item() else None


def takes_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def state_of(scope: Scope) -> dict[str, Any]:
    """The present state dict of a scope by plain keys, relative to it."""
    with torch.no_grad():
        return {plain_fqn(key): value for key, value in scope.module.state_dict().items()}


def load(scope: Scope, path: str, state: Mapping[str, Any]) -> None:
    """Hand ``state`` (by plain keys, relative to the scope) to the module's own methods, as torch would.

    Raises Mismatch, naming the entry below ``path``, if the module does not take one back.
    """
    with torch.no_grad():
        present = scope.module.state_dict()
    actual = {plain_fqn(key): key for key in present}
    handed: OrderedDict[str, Any] = OrderedDict((actual.get(key, key), value) for key, value in state.items())
    handed._metadata = getattr(present, "_metadata", {})  # type: ignore[attr-defined]
    if not scope.root:
        result: Any = nn.Module.load_state_dict(scope.module, handed, False)
    elif _takes_strict(scope.module.load_state_dict):
        result = scope.module.load_state_dict(handed, strict=False)
    else:
        result = scope.module.load_state_dict(handed)
    left = list(getattr(result, "unexpected_keys", ()))
    if left:
        raise Mismatch(
            f"{path}: {type(scope.module).__qualname__} did not take back {', '.join(sorted(left)[:5])} of its own "
            "state dict: give it a _load_from_state_dict or a load hook that does"
        )


def _takes_strict(method: Callable[..., Any]) -> bool:
    kinds = inspect.signature(method).parameters.values()
    return any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in kinds)


def _changes_state_dict(module: nn.Module) -> bool:
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return (
        _overrides(module, "_save_to_state_dict")
        or _overrides(module, "state_dict")
        or any(not _is_same(hook) for hook in hooks)
    )


def _changes_loading(module: nn.Module) -> bool:
    return _overrides(module, "_load_from_state_dict") or any(
        not _is_same(hook) for hook in module._load_state_dict_pre_hooks.values()
    )


def _overrides(module: nn.Module, method: str) -> bool:
    own = vars(module).get(method) or getattr(type(module), method)
    return own is not getattr(nn.Module, method) and not _is_same(own)


def _is_same(hook: object) -> bool:
    inner: Any = hook
    while True:
        deeper = getattr(inner, "hook", None) or getattr(inner, "func", None) or getattr(inner, "__func__", None)
        if deeper is None or deeper is inner:
            break
        inner = deeper
    where = getattr(inner, "__module__", None) or type(inner).__module__
    return any(f"{where}.".startswith(known) for known in _SAME)


def _call(hooks: list[Callable[..., Any]], module: nn.Module) -> None:
    for hook in hooks:
        hook(module, nn.modules.module._IncompatibleKeys([], []))
