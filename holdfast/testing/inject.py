"""Runs a training script, unchanged, with faults: ``python -m holdfast.testing.inject FAULTS SCRIPT ARGUMENTS…``.

FAULTS are calls of the functions below with plain arguments; nothing in them is evaluated.
"""

from __future__ import annotations

import ast
import errno
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from holdfast.testing.disk_faults import faults, flip, short_writes, slow, torn_writes
from holdfast.testing.phases import freeze_at, kill_at

KNOWN: Mapping[str, Callable[..., AbstractContextManager[object]]] = {
    f.__name__: f for f in (faults, flip, freeze_at, kill_at, short_writes, slow, torn_writes)
}

USAGE = f"""python -m holdfast.testing.inject FAULTS (SCRIPT | -m MODULE) ARGUMENTS…

FAULTS: one or several of {", ".join(sorted(KNOWN))}, with ; between them, as in
    'kill_at("write", rank=1, nth=3); slow("write", bytes_per_second=1e8)'
"""


def read(text: str) -> list[AbstractContextManager[object]]:
    """The faults that a text asks for. Raises ValueError, saying what is wrong with it."""
    try:
        lines = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from None
    return [_made(line, text) for line in lines]


def _made(line: ast.stmt, text: str) -> AbstractContextManager[object]:
    call = line.value if isinstance(line, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KNOWN):
        raise ValueError(f"{ast.unparse(line)!r} in {text!r} is no call of {', '.join(sorted(KNOWN))}")
    named = {keyword.arg: _plain(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    if len(named) < len(call.keywords) or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise ValueError(f"{ast.unparse(line)!r}: arguments are given one by one, without stars")
    try:
        return KNOWN[call.func.id](*map(_plain, call.args), **named)
    except TypeError as error:
        raise ValueError(f"{ast.unparse(line)!r}: {error}") from None


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "errno":
        return getattr(errno, node.attr)
    if isinstance(node, ast.Name) and node.id in errno.errorcode.values():
        return getattr(errno, node.id)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_plain(item) for item in node.elts]
    raise ValueError(f"{ast.unparse(node)!r} is no plain value")


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with ``-m`` a module, as Python would, with faults around it.

    Where torchrun starts it again after a failure, it runs without them: so a test sees the restart too.
    """
    as_module = len(arguments) > 1 and arguments[1] == "-m"
    rest = list(arguments[2 if as_module else 1 :])
    if not rest or arguments[0].startswith("-"):
        raise SystemExit(USAGE)
    with ExitStack() as stack:
        try:
            for one in read(arguments[0]):
                if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                    stack.enter_context(one)
        except ValueError as error:
            raise SystemExit(f"{error}\n\n{USAGE}") from None
        sys.argv = rest
        _run(rest[0], as_module=as_module)


def _run(target: str, *, as_module: bool) -> None:
    sys.path[0] = os.getcwd() if as_module else str(Path(target).parent.absolute())
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
