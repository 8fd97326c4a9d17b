"""Each option is said once: a new one is one field of one class, and everything that takes it takes it from there."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.run import options as run_options
from holdfast.run.options import ManagerOptions, RestoreOptions, ResumeOptions, RunOptions
from holdfast.saving.options import SaverOptions, WorkerOptions, takes, values_of

PACKAGE = Path(holdfast.__file__).parent
OPTIONS = {field.name for kind in (ManagerOptions, RestoreOptions) for field in fields(kind)}
ROOMS = ("manager.py", "saving/options.py", "run/", "trainers/", "dcp/")

ANOTHER_MEANING = {
    ("manager.py", "CheckpointManager.scrub", "every"),  # seconds between two checks of a step
    ("run/retention.py", "KeptSteps.__init__", "sign"),  # what signs, not the key
    ("run/steps.py", "Steps.newest", "run"),  # an id alone, without "any"
    ("run/tiers/uploader.py", "Uploader.wake", "step"),  # the step that was saved
    ("run/prune.py", "prune", "name"),  # None: told from the folders
    ("trainers/huggingface_best.py", "CallbackOptions", "every"),  # None: Trainer's own save_strategy
    ("trainers/titan.py", "CheckpointManager._load", "step"),  # these three are torchtitan's
    ("trainers/titan_contract.py", "BaseCheckpointManager.load", "step"),
    ("trainers/titan_contract.py", "BaseCheckpointManager._load", "step"),
}
A_CONSTANT = {"deadline": "DEADLINE"}  # an argument of whatever waits: its default is said once, as this constant


def declarations(path: Path) -> list[tuple[str, str, str]]:
    """Parameters with a default and fields of option classes that are called like an option: owner, name, default."""
    found = []

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside, args = f"{owner}.{child.name}".lstrip("."), child.args
                positional = [*args.posonlyargs, *args.args]
                given = [*zip(positional[::-1], args.defaults[::-1], strict=False)]
                given += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None]
                found.extend((inside, argument.arg, ast.unparse(default)) for argument, default in given)
                visit(child, inside)
            elif isinstance(child, ast.ClassDef):
                inside = f"{owner}.{child.name}".lstrip(".")
                if child.name.endswith("Options"):
                    found.extend(
                        (inside, one.target.id, "" if one.value is None else ast.unparse(one.value))
                        for one in child.body
                        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                    )
                visit(child, inside)
            else:
                visit(child, owner)

    visit(ast.parse(path.read_text()), "")
    return [(owner, name, default) for owner, name, default in found if name in OPTIONS]


def test_no_default_and_no_type_of_an_option_is_declared_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for owner, name, default in declarations(path) if file.startswith(ROOMS) else ():
            if (file, owner, name) not in ANOTHER_MEANING and A_CONSTANT.get(name) != default:
                places[name].append(f"{file}: {owner}")
    assert places.pop("deadline", None) is None
    assert {name: where for name, where in places.items() if len(where) != 1} == {}
    assert places.keys() == OPTIONS - {"deadline"}
    assert all(where[0].startswith(("saving/options.py", "run/options.py")) for where in places.values())


def test_every_option_says_what_it_is() -> None:
    for kind in (WorkerOptions, SaverOptions, RunOptions, run_options.RhythmOptions, ManagerOptions, RestoreOptions):
        body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
        for one, text in zip(body, [*body[1:], None], strict=True):
            if isinstance(one, ast.AnnAssign):
                assert isinstance(text, ast.Expr), f"{kind.__name__}.{ast.unparse(one.target)} has no docstring"


def test_the_call_is_flat_and_shows_types_and_defaults() -> None:
    shown = inspect.signature(holdfast.CheckpointManager).parameters
    assert [name for name, p in shown.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY] == ["root"]
    for field in fields(ManagerOptions):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert shown[field.name].default is default and shown[field.name].annotation == field.type
    assert [name for name, p in shown.items() if p.default is inspect.Parameter.empty] == ["root", "every"]
    restore = inspect.signature(holdfast.CheckpointManager.restore).parameters
    assert {*restore} == {"self", "state", *(field.name for field in fields(RestoreOptions))}


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ((), {"evry": 5}, r"CheckpointManager.__init__\(\) has no option 'evry' \(did you mean every\?\)"),
        ((), {}, r"CheckpointManager.__init__\(\): missing a required argument: 'every'"),
        ((5,), {}, r"CheckpointManager.__init__\(\): too many positional arguments"),
        ((), {"root": "elsewhere", "every": 5}, r"multiple values for argument 'root'"),
    ],
)
def test_a_wrong_call_names_the_option(tmp_path: Path, args: tuple[Any, ...], options: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        holdfast.CheckpointManager(tmp_path, *args, **options)
    with holdfast.CheckpointManager(root=tmp_path, every=1, worker="none") as manager:
        assert manager.every == 1 and not list(tmp_path.iterdir())
        with pytest.raises(TypeError, match=r"restore\(\) has no option 'onyl' \(did you mean only\?\)"):
            manager.restore({}, onyl="model")


def test_options_of_a_smaller_set() -> None:
    @takes(ManagerOptions)
    def saver_options(_: object, options: ManagerOptions) -> dict[str, Any]:
        return values_of(options, SaverOptions)

    taken = saver_options(None, "run", every=1, slots=3, poll=9)
    assert taken["slots"] == 3 and taken.keys() == {field.name for field in fields(SaverOptions)}
    assert ResumeOptions(run="any").of_run is None and ResumeOptions(run="abc").of_run == "abc"


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (holdfast.CheckpointManager.__init__, ManagerOptions),
        (holdfast.CheckpointManager.restore, RestoreOptions),
        (holdfast.Saver.__init__, SaverOptions),
    ],
)
def test_help_tells_of_each_option(function: Any, options: Any) -> None:
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    for field in fields(options):
        assert any(line.startswith(f"{field.name}: ") for line in lines), field.name
    if options is ManagerOptions:
        assert "every: Save every so many steps." in lines
        assert "deadline: Seconds that each phase of a save or load may take." in lines
