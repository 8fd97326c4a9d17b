"""The docstrings of the public names: one style, every argument, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import events, remap, tools
from holdfast.storage import Place, Upload, at

INTERNAL = {(holdfast.Saving, name) for name in ("begin", "committed", "end_planning", "finish", "follow", "known")}
INTERNAL |= {(holdfast.Saving, name) for name in ("note_copies", "note_written")}
"""What the package calls; the reference leaves it out."""
SECTIONS = ("Args", "Attributes", "Example", "Raises", "Returns", "Yields")
OURS = [holdfast.RNG, holdfast.Checkpoint, holdfast.CheckpointManager, holdfast.Keep, holdfast.PerRank, holdfast.Saver]
OURS += [holdfast.Saving, holdfast.Shard, Upload]
FUNCTIONS = [holdfast.convert, holdfast.copy, holdfast.load, holdfast.open, holdfast.save, at, events.listen]
FUNCTIONS += [remap.megatron, remap.torchtitan]
FUNCTIONS += [tools.drop, tools.merge, tools.recover, tools.repair, tools.rescue, tools.sign, tools.verify]


def documented() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All public functions, classes and their public methods, by name."""
    for function in FUNCTIONS:
        yield function.__name__, function
    for kind in OURS:
        yield kind.__name__, kind
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function) and (kind, name) not in INTERNAL:
                yield f"{kind.__name__}.{name}", function


ALL = dict(documented())


def section(text: str, name: str) -> str:
    """The lines of one section; empty if there is none."""
    match = re.search(rf"^{name}:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    return match[1] if match else ""


@pytest.mark.parametrize("name", ALL)
def test_every_argument_is_described(name: str) -> None:
    what, text = ALL[name], inspect.getdoc(ALL[name])
    assert text, "there is no docstring"
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), f"the first paragraph is no sentence: {first!r}"
    for heading in re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE):
        assert heading in SECTIONS, f"no section of this style: {heading}"
    given = section(text, "Args") + section(text, "Attributes")
    described = set(re.findall(r"^ {4}\*{0,2}(\w+):", given, re.MULTILINE))
    arguments = set(inspect.signature(what).parameters) - {"self", "args"}
    if is_dataclass(what) and isinstance(what, type):
        arguments &= {field.name for field in fields(what)}
    if "options" in described and "options" not in arguments:  # the fields of a class that has its own documentation
        assert re.search(r"`[\w.]+Options`", given)
        return
    assert not arguments - described, f"not described: {sorted(arguments - described)}"
    assert not (section(text, "Args") and described - arguments - {"kwargs"}) or section(text, "Attributes"), described


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What examples take for granted: a model, a state, a checkpoint at ``/ckpt/step-7``, a run at ``/ckpt/run1``."""
    from tests.docs import tiny

    monkeypatch.chdir(tmp_path)
    state = {"model": tiny.GPT(), "step": 500}
    holdfast.save(state, tmp_path / "ckpt" / "step-7", step=7)
    holdfast.save(state, tmp_path / "ckpt" / "step-8", step=8)
    manager = holdfast.CheckpointManager(tmp_path / "ckpt" / "run1", every=500)
    manager.save(500, state)
    names: dict[str, Any] = {
        "holdfast": holdfast, "manager": manager, "model": state["model"], "state": state, "train": lambda step: None,
        "loss": 0.25, "path": tmp_path / "ckpt" / "step-7", "checkpoint": holdfast.open(tmp_path / "ckpt" / "step-7"),
    }  # fmt: skip
    return names


@pytest.mark.parametrize("name", [name for name in ALL if section(inspect.getdoc(ALL[name]) or "", "Example")])
def test_examples_run(name: str, world: dict[str, Any], tmp_path: Path) -> None:
    text = section(inspect.getdoc(ALL[name]) or "", "Example")
    examples = doctest.DocTestParser().get_examples(inspect.cleandoc(text))
    assert examples, "an example has >>> lines"
    for example in examples:
        source = example.source.replace('"/', f'"{tmp_path}/')
        shown = StringIO()
        with redirect_stdout(shown):
            exec(compile(source, name, "single"), world)
        if example.want:
            assert shown.getvalue().replace(str(tmp_path), "") == example.want
    for value in [*world.values()]:
        if isinstance(value, (holdfast.CheckpointManager, holdfast.Saver)):
            value.close()


def test_what_every_program_calls_has_an_example() -> None:
    for name in ("convert", "copy", "load", "open_checkpoint", "save", "at", "repair", "verify", "CheckpointManager"):
        assert section(inspect.getdoc(ALL[name]) or "", "Example"), name
    assert Place.__doc__
