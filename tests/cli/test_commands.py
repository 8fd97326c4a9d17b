"""The list of commands: the arguments they pass on, what help and TAB import, and where options may stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from holdfast.cli import app as application
from holdfast.cli import commands
from holdfast.cli.errors import Code
from tests.cli.conftest import Run

VERBS = [function.__name__ for functions in application._COMMANDS.values() for function in functions]


def test_few_verbs() -> None:
    assert sorted(VERBS) == [
        "convert", "copy", "diff", "doctor", "ls", "prune", "repair", "rescue", "show", "verify", "view", "watch",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_command_passes_on_what_its_function_takes(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(commands, "_run", lambda function, arguments: called.append(function))
    getattr(commands, verb)()
    module, _, name = called[0].partition(".")

    def kinds(function: Any) -> dict[str, str]:
        return {name: str(kind) for name, kind in get_type_hints(function).items()}

    assert name == verb
    assert kinds(getattr(import_module(f"holdfast.cli.{module}"), name)) == kinds(getattr(commands, verb))


def test_the_help_of_diff_explains_its_columns(run: Run) -> None:
    out = " ".join(run("diff", "--help")[1].split())
    for column in ("relative: ", "largest, mean: ", "cosine: ", "norm first, norm second: "):
        assert column in out


def test_no_help_is_taken_for_markup() -> None:
    program: Any = typer.main.get_command(application.app)
    texts = [one.help for verb in VERBS for one in program.commands[verb].params if getattr(one, "help", None)]
    assert len(texts) > 50 and not [text for text in texts if "[" in text]


LIGHT = {"", "errors", "ondisk", "ondisk.version", "storage", "storage.local", "storage.local.disk"}
"""What of the package help and TAB may import beside the room of the command."""
QUESTIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "help": (["--help"], {}),
    "help of a command": (["show", "--help"], {}),
    "version": (["--version"], {}),
    "TAB": ([], {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast show --", "COMP_CWORD": "2"}),
    "TAB in zsh": ([], {"_HOLDFAST_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "holdfast "}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_help_and_tab_do_not_wait_for_torch(question: str) -> None:
    words, variables = QUESTIONS[question]
    code = f"""if True:
        import sys
        from holdfast.cli import app
        code = app.run({words!r})
        sys.stderr.write(f"{{code}} " + " ".join(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables})
    code_shown, *modules = done.stderr.split()
    assert code_shown == "0" and done.stdout, done.stderr
    ours = {name.removeprefix("holdfast").removeprefix(".") for name in modules if name.startswith("holdfast")}
    assert {name for name in ours if not name.startswith("cli")} <= LIGHT
    assert not {"torch", "numpy", "obstore", "yaml"} & set(modules)


def test_options_of_the_program_stand_anywhere(steps: Path, run: Run) -> None:
    behind = run("ls", steps, "--json")
    assert behind[0] == Code.FINE and json.loads(behind[1])["checkpoints"]

    def shape(out: str) -> list[str]:
        return [step["name"] for step in json.loads(out)["checkpoints"]]

    for words in (["--json", "ls", steps], ["--quiet", "--json", "ls", steps], ["--json", "ls", "--quiet", steps]):
        code, out, err = run(*words)
        assert (code, err) == (Code.FINE, "") and shape(out) == shape(behind[1])
    code, out, err = run("--json", "show", steps / "nothing")
    assert (code, out) == (Code.NOT_A_CHECKPOINT, "") and json.loads(err)["error"]["kind"] == "no checkpoint"
    with pytest.raises(FileNotFoundError):
        run("--json", "show", steps / "nothing", "--debug")


def test_completion(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(words: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv("_HOLDFAST_COMPLETE", "complete_bash")
            patch.setenv("COMP_WORDS", words)
            patch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
            return run()[1].split()

    assert set(completed("holdfast ")) == set(VERBS) and completed("holdfast pru") == ["prune"]
    assert {"--sizes", "--mesh", "--json"} <= set(completed("holdfast show --"))
    assert set(completed("holdfast convert a b --to ")) == {"holdfast", "torch", "dcp", "huggingface", "hf"}
    # Nothing of its own for a path: then the shell completes files.
    assert completed("holdfast verify /tm") == []
    # Asked for by name: which shell runs the tests, if any, is found from the processes above them.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = run("--show-completion", "bash")
    assert code == Code.FINE and "complete_bash" in out and "complete -o default" in out
