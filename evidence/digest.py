"""The digest of the code that a run exercises: a row is valid while it is unchanged.

The recorder and the page call it. Comments and docstrings do not count. Never imports what it looks at.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import grimp

from evidence.runs import Run

ROOT = Path(__file__).parents[1]
PACKAGES = ("holdfast", "benchmarks", "tests", "zoo")
NOT_FOLLOWED = ("holdfast",)
"""Its imports lead to every public name; a run names those that it uses."""


def digest(run: Run, root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> str:
    """Of the command and of every file that the run exercises."""
    total = hashlib.sha256(repr((run.command, sorted(run.environment.items()))).encode())
    for path in exercised(run, root, packages):
        total.update(f"{path.relative_to(root).as_posix()} {_content(path)}\n".encode())
    return total.hexdigest()[:16]


def exercised(run: Run, root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> list[Path]:
    """The modules of the run, what they import directly or not, and its other files."""
    found = {path for module in _reached(run.modules, tuple(packages)) for path in _file_of(module, root)}
    for pattern in run.files:
        matching = [path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts]
        if not matching:
            raise ValueError(f"{run.name}: no file matches {pattern}")
        found.update(matching)
    return sorted(found)


def look_again() -> None:
    """Read all files again: they may have changed."""
    for remembered in (_graph, _reached, _content):
        remembered.cache_clear()


@cache
def _graph(packages: tuple[str, ...]) -> grimp.ImportGraph:
    return grimp.build_graph(*packages, cache_dir=None)  # with the imports inside of functions


@cache
def _reached(named: tuple[str, ...], packages: tuple[str, ...]) -> frozenset[str]:
    if not named:
        return frozenset()
    graph = _graph(packages)
    if missing := [module for module in named if module not in graph.modules]:
        raise ValueError(f"there is no module {', '.join(missing)}: correct evidence/runs.py")
    below = [one for module in named for one in graph.find_descendants(module) if ".test_" not in one]
    waiting = [*named, *below]
    reached: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        if module not in NOT_FOLLOWED:
            waiting += graph.find_modules_directly_imported_by(module)
        waiting += list(_above(module))
    return frozenset(reached)


def _above(module: str) -> Iterator[str]:
    """The packages that Python imports before it."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _file_of(module: str, root: Path) -> Iterable[Path]:
    path = root.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


@cache
def _content(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".py":
        with suppress(SyntaxError, ValueError):  # of a file of the tests that is wrong on purpose
            data = meaning(data.decode()).encode()
    return hashlib.sha256(data).hexdigest()


def meaning(source: str) -> str:
    """What a Python file says without comments, docstrings and layout, the same in every version of Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [one for one in node.body if not _is_text(one)]
    return _dump(tree)


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or a text below an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dump(node: object) -> str:
    """Like `ast.dump`, without empty fields: newer versions of Python have more of them."""
    if isinstance(node, ast.AST):
        fields = [f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    return repr(node)
