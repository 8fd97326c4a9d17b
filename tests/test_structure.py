"""Rules of the house that an import linter cannot express."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "holdfast"
FILES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


# They take a process group as an argument and pass it on.
TAKE_A_GROUP = {
    "save.py", "saver.py", "load.py", "manager.py", "repair/verify.py", "run/foreground.py", "run/tiers/one.py",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_the_state_and_the_ranks_know_torch_distributed(path: Path) -> None:
    # `dcp/` is torch's own interface around the rest, and knows nothing but torch.distributed.checkpoint.
    # `ranks.py` talks over the group's store alone; `relay.py` has the one process group that is made for moving bytes.
    inside = _name(path).startswith(("state/", "dcp/")) or _name(path) in ("ranks/ranks.py", "read/shared/relay.py")
    used = {name for name in _imports(path) if name.startswith("torch.distributed")}
    if _name(path) in TAKE_A_GROUP:
        used -= {"torch.distributed"}
    assert inside or not used


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_one_file_knows_the_client_of_the_stores(path: Path) -> None:
    used = {name for name in _imports(path) if name.split(".")[0] == "obstore"}
    assert _name(path) == "storage/cloud/cloud.py" or not used


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_executes_what_it_reads(path: Path) -> None:
    assert not _imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    text = path.read_text()
    if _name(path) == "dcp/reader.py":  # torch's planner takes a value only as what torch.save made of it, in memory
        text = text.replace("torch.save(value, data)", "")
    assert "torch.load(" not in text and "torch.save(" not in text and "eval(" not in text and "exec(" not in text


@pytest.mark.parametrize("path", [p for p in FILES if p.stat().st_size], ids=_name)
def test_modules_say_what_they_are(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text and text.splitlines()[0].endswith(".")
    assert path.stem not in ("utils", "common", "base", "types", "misc", "helpers")


def _loaded_with(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The imports that run when a module is loaded, or that a type checker follows: not those inside of functions."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _loaded_with(getattr(node, part, []))


def test_no_import_leads_back() -> None:
    """Not for types either: modules that need each other are one idea in two files, or two ideas in the wrong ones."""
    modules = {f"holdfast.{_name(path)[:-3]}".replace("/", ".").removesuffix(".__init__"): path for path in FILES}
    needs: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = set()
        for node in _loaded_with(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (full & set(modules)) or {node.module}
        needs[module] = found & set(modules) - {module}
    while free := {m for m in needs if not needs[m] or not any(m in others for others in needs.values())}:
        needs = {module: others - free for module, others in needs.items() if module not in free}
    assert not needs, {module: sorted(others) for module, others in needs.items()}


# They open no files of a checkpoint: memory that processes share, and what the system tells.
OF_THE_SYSTEM = {"write/arena.py", "read/shared/relay.py", "storage/local/disk.py"}
FILE_CALLS = {
    "open", "pread", "preadv", "pwrite", "pwritev", "read", "write", "fsync", "fdatasync", "ftruncate", "truncate",
    "link", "symlink", "replace", "rename", "unlink", "remove", "mkdir", "makedirs", "rmdir", "scandir", "listdir",
    "walk",
}  # fmt: skip
NAME_CALLS = {"unlink", "rmdir", "mkdir", "touch", "write_bytes", "write_text", "hardlink_to", "symlink_to", "rmtree"}


@pytest.mark.parametrize("path", [p for p in FILES if not _name(p).startswith(("formats/", "testing/"))], ids=_name)
def test_local_files_are_touched_in_one_place(path: Path) -> None:
    """So that a hook on `storage/local/disk.py` sees every call: tests of crashes and faults rest on it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if (of_os and node.func.attr in FILE_CALLS) or (not of_os and node.func.attr in NAME_CALLS):
                found.append(f"{node.lineno}: {ast.unparse(node.func)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append(f"{node.lineno}: open")
    assert _name(path) in OF_THE_SYSTEM or not found, found
