"""The options that all saves share, and `takes`, which lets a function take a set of options as flat keywords.

`Saver`, the manager and the integrations build on these classes. An option has its name, type, default and
documentation here or in `run.options`, and nowhere else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Signature, cleandoc, signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from holdfast.ondisk.arguments import SECONDS, check, one_of, or_none, whole
from holdfast.ondisk.patterns import Patterns, near
from holdfast.policies.signing.keys import Key
from holdfast.ranks.ranks import DEADLINE

_TAKES = {
    "worker": one_of("process", "thread", "none"), "deadline": SECONDS, "slots": whole(1),
    "busy": one_of("wait", "skip"), "memory_limit": or_none(whole(1)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who writes, and how long it may take."""

    worker: Literal["process", "thread", "none"] = "process"
    """A ``"process"`` of its own, which finishes what is staged even if training is killed, or ``"thread"``\\ s of this
    process. The manager also takes ``"none"``: training waits for each save."""

    deadline: float = DEADLINE
    """Seconds that each phase of a save or load may take."""

    def __post_init__(self) -> None:
        check(_TAKES, vars(self))


@dataclass(frozen=True, kw_only=True)
class SaverOptions(WorkerOptions):
    """How saves are made in the background."""

    slots: int = 1
    """Saves that may be in memory at once. Each needs as much host memory as this rank writes, or its share of
    ``memory_limit``."""

    busy: Literal["wait", "skip"] = "wait"
    """When no slot is free, ``"wait"`` until one is, or ``"skip"`` the save on all ranks."""

    memory_limit: int | None = None
    """Bytes of host memory for all slots. A larger state is written in waves."""

    degraded: bool = False
    """Commit a save although ranks are lost while they write, if others hold what those were to write. Not with
    ``fast``. See docs/crash-safety.md."""

    check_replicas: bool | Patterns = False
    """Compare tensors that several ranks hold before each commit: all, or patterns over names. See
    docs/crash-safety.md."""

    sign: Key | Literal[True] | None = None
    """A private Ed25519 key that signs each checkpoint. The first rank alone needs it, the others may pass True. See
    docs/security.md."""


Arguments = ParamSpec("Arguments")
Options = TypeVar("Options")
This = TypeVar("This")
First = TypeVar("First")
Result = TypeVar("Result")


class takes(Generic[Arguments, Options]):
    """Let a function take the fields of the dataclass ``options`` as flat arguments, and get them as one value.

        @takes(ManagerOptions)
        def __init__(self, options: ManagerOptions) -> None: ...

        CheckpointManager("/ckpt/run1", every=500)

    The value is the last parameter of the function. Type checkers, editors and `help` see the flat arguments with
    their types and defaults. A wrong name raises a TypeError that names it.
    """

    def __init__(self, options: Callable[Arguments, Options]) -> None:
        self._options = options

    @overload
    def __call__(
        self, function: Callable[[This, Options], Result]
    ) -> Callable[Concatenate[This, Arguments], Result]: ...

    @overload
    def __call__(
        self, function: Callable[[This, First, Options], Result]
    ) -> Callable[Concatenate[This, First, Arguments], Result]: ...

    def __call__(self, function: Callable[..., Result]) -> Callable[..., Result]:
        own = signature(function)
        before = [*own.parameters.values()][:-1]
        flat = Signature([*before, *signature(self._options).parameters.values()])

        @wraps(function)
        def call(*args: Any, **given: Any) -> Result:
            unknown = next((name for name in given if name not in flat.parameters), None)
            if unknown is not None:
                raise TypeError(
                    f"{function.__qualname__}() has no option {unknown!r}{near(unknown, [*flat.parameters])}"
                )
            try:
                arguments = flat.bind(*args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}(): {error}") from None
            first = [arguments.pop(parameter.name) for parameter in before]
            return function(*first, self._options(**arguments))  # type: ignore[call-arg]

        call.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{_options_text(self._options)}".strip()
        vars(call)["__signature__"] = flat.replace(return_annotation=own.return_annotation)
        return call


def _options_text(options: object) -> str:
    """A line on each option for `help`: Python keeps no docstrings of fields, so they are read from the source."""
    docs: dict[str, str] = {}
    for kind in reversed(getattr(options, "__mro__", ())):
        docs |= _docs_of_fields(kind.__module__).get(kind.__name__, {})
    return "\n".join(["The options:", *(f"    {name}: {text}" for name, text in docs.items())])


@cache
def _docs_of_fields(module: str) -> dict[str, dict[str, str]]:
    """Return the texts below the fields of each class of a module; empty if there is no source."""
    file = getattr(sys.modules[module], "__file__", None)
    try:
        tree = ast.parse(Path(file or "").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    docs: dict[str, dict[str, str]] = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(kind.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs.setdefault(kind.name, {})[name] = " ".join(doc.split())
    return docs


def values_of(options: object, kind: type) -> dict[str, Any]:
    """Those of the ``options`` that the dataclass ``kind`` has, by name."""
    names = {field.name for field in fields(kind)}
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name in names}  # type: ignore[arg-type]
