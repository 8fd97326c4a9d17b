"""Rules of the house that an import linter cannot express."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "holdfast"
FILES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(path)))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _offenders(what: Callable[[Path], Collection[str] | bool], files: Iterable[Path] = FILES) -> dict[str, Any]:
    """What is wrong with which file: one test for a rule, and not one for each file, of which there are hundreds."""
    wrong = {_name(path): what(path) for path in files}
    return {name: fault for name, fault in wrong.items() if fault}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _imported_modules(path: Path) -> set[str]:
    """The modules named in imports, without the names that are taken from them."""
    nodes = _nodes(path)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


# They take a process group as an argument and pass it on.
TAKE_A_GROUP = {
    "save.py", "saver.py", "load.py", "repair/verify.py", "run/options.py",
}  # fmt: skip


# The import linter knows other people's packages as wholes, so it cannot tell `torch.distributed` from `torch`.
def test_only_the_state_and_the_ranks_know_torch_distributed() -> None:
    # `dcp/` is torch's own interface around the rest, and knows nothing but torch.distributed.checkpoint.
    # `ranks.py` talks over the group's store alone; `relay.py` has the one process group that is made for moving bytes.
    def used(path: Path) -> set[str]:
        if _name(path).startswith(("state/", "dcp/")) or _name(path) in ("ranks/ranks.py", "read/shared/relay.py"):
            return set()
        taken = {"torch.distributed"} if _name(path) in TAKE_A_GROUP else set()
        return {name for name in _imports(path) if name.startswith("torch.distributed")} - taken

    assert _offenders(used) == {}


def test_format_and_plan_never_ask_other_ranks() -> None:
    asks = ("torch.distributed", "torch.multiprocessing")
    pure = [path for path in FILES if _name(path).startswith(("ondisk/", "plan/"))]
    assert _offenders(lambda path: {name for name in _imports(path) if name.startswith(asks)}, pure) == {}


INTERNALS = (
    "torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed.fsdp", "torch.distributed._shard",
    "torch.distributed.device_mesh", "torch.distributed.checkpoint.state_dict", "torch.optim",
)  # fmt: skip
KNOW_INTERNALS = {
    # Fills a state dict of torch's own interface, in which DTensors and optimizers lie bare.
    "dcp/states.py": {
        "torch.distributed._shard.sharded_tensor.api", "torch.distributed.tensor", "torch.optim",
    },
    # Hooks the begin of every step, which is torch's public way to be told of it.
    "buffers/stable.py": {"torch.optim.optimizer"},
}  # fmt: skip


def test_only_the_state_knows_dtensors_fsdp_and_optimizers() -> None:
    def internals(path: Path) -> set[str]:
        modules = _imported_modules(path)
        return {name for name in modules if any(name == root or name.startswith(f"{root}.") for root in INTERNALS)}

    assert _offenders(internals, [path for path in FILES if not _name(path).startswith("state/")]) == KNOW_INTERNALS


ROOMS_WITH_BOUNDS = ("commit/", "write/", "read/", "state/", "plan/")
MOST_LINES, MOST_FIELDS, MOST_METHODS = 350, 12, 15
TOO_LONG: set[str] = set()
"""Files of more lines. Whatever is no longer too long has to leave this list."""
TOO_LARGE: set[str] = set()
"""Classes of more fields or methods. Whatever is no longer too large has to leave this list."""


def _fields(kind: ast.ClassDef) -> set[str]:
    """The names that a class declares, or that its methods set on ``self``."""
    declared = {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stored = (n for n in ast.walk(kind) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return declared | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    yield from (node for node in _nodes(path) if isinstance(node, ast.ClassDef))


def test_the_root_holds_few_files() -> None:
    assert len([path for path in FILES if "/" not in _name(path)]) <= 12


def test_no_file_is_long() -> None:
    assert {_name(path) for path in FILES if len(path.read_text().splitlines()) > MOST_LINES} == TOO_LONG


def test_no_class_is_large() -> None:
    large = set()
    for path in FILES:
        for kind in _classes(path) if _name(path).startswith(ROOMS_WITH_BOUNDS) else ():
            methods = sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in kind.body)
            if len(_fields(kind)) > MOST_FIELDS or methods > MOST_METHODS:
                large.add(f"{_name(path)} {kind.name}")
    assert large == TOO_LARGE


def test_two_files_know_the_client_of_the_stores() -> None:
    users = _offenders(lambda path: any(name.split(".")[0] == "obstore" for name in _imports(path)))
    assert set(users) <= {"storage/cloud/cloud.py", "storage/cloud/credentials.py"}


def test_nothing_executes_what_it_reads() -> None:
    def executes(path: Path) -> list[str]:
        text = path.read_text()
        if _name(path) == "dcp/reader.py":  # torch's planner takes a value as what torch.save made of it, in memory
            text = text.replace("torch.save(value, data)", "")
        return [call for call in ("torch.load(", "torch.save(", "eval(", "exec(") if call in text]

    assert _offenders(lambda path: _imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}) == {}
    assert _offenders(executes) == {}


def test_modules_say_what_they_are() -> None:
    def says_nothing(path: Path) -> bool:
        text = ast.get_docstring(_tree(path)) or ""
        return not text or not text.splitlines()[0].endswith(".")

    assert _offenders(says_nothing, [path for path in FILES if path.stat().st_size]) == {}
    assert not {path.stem for path in FILES} & {"utils", "common", "base", "types", "misc", "helpers"}


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
        for node in _loaded_with(_tree(path).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (full & set(modules)) or {node.module}
        needs[module] = found & set(modules) - {module}
    while free := {m for m in needs if not needs[m] or not any(m in others for others in needs.values())}:
        needs = {module: others - free for module, others in needs.items() if module not in free}
    assert not needs, {module: sorted(others) for module, others in needs.items()}


# They open no files of a checkpoint: memory that processes share, what the system says, and what else is installed.
OF_THE_SYSTEM = {"__init__.py", "write/buffer.py", "read/shared/relay.py", "storage/local/disk.py"}
FILE_CALLS = {
    "open", "pread", "preadv", "pwrite", "pwritev", "read", "write", "fsync", "fdatasync", "ftruncate", "truncate",
    "link", "symlink", "replace", "rename", "unlink", "remove", "mkdir", "makedirs", "rmdir", "scandir", "listdir",
    "walk",
}  # fmt: skip
NAME_CALLS = {"unlink", "rmdir", "mkdir", "touch", "write_bytes", "write_text", "hardlink_to", "symlink_to", "rmtree"}


def _file_calls(path: Path) -> list[str]:
    calls = []
    for node in _nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if (of_os and node.func.attr in FILE_CALLS) or (not of_os and node.func.attr in NAME_CALLS):
                calls.append(f"{node.lineno}: {ast.unparse(node.func)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            calls.append(f"{node.lineno}: open")
    return calls


def test_local_files_are_touched_in_one_place() -> None:
    """So that a hook on `storage/local/disk.py` sees every call: tests of crashes and faults rest on it."""
    files = [path for path in FILES if not _name(path).startswith(("formats/", "testing/"))]
    assert _offenders(_file_calls, [path for path in files if _name(path) not in OF_THE_SYSTEM]) == {}


KINDS_OF_PLACE = {"Place", "LocalPlace", "StorePlace", "Path", "PosixPath", "PurePath", "PurePosixPath"}


def _questions_of_kind(path: Path) -> list[str]:
    questions = []
    for node in _nodes(path):
        asked: ast.AST | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked = node.args[1]
        elif isinstance(node, ast.MatchClass):
            asked = node.cls
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            asked = node.comparators[0]
        names = {ast.unparse(name).rpartition(".")[2] for name in ast.walk(asked)} if asked is not None else set()
        if names & KINDS_OF_PLACE:
            questions.append(f"{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return questions


def test_nobody_asks_which_kind_of_place_it_is() -> None:
    """A place is asked for what it can do (`is_remote`, `has_locks`, …), so that a third kind needs no change here."""
    assert _offenders(_questions_of_kind, [path for path in FILES if not _name(path).startswith("storage/")]) == {}
