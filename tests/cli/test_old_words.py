"""The commands of earlier versions: they do what the new ones do, and say on standard error what these are called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.cli.errors import Code
from holdfast.cli.old_words import renamed
from holdfast.report.timeline import timeline
from tests.cli.conftest import Run, state_of

NEW = {"du": "show --sizes", "plan": "show --mesh", "gc": "prune --orphans"}
STEP = "step-000000200"
SAME: dict[str, tuple[list[str], list[str]]] = {
    "du": (["du", STEP, "--depth", "1"], ["show", STEP, "--sizes", "--depth", "1"]),
    "du of a run": (["du", "."], ["ls", ".", "--sizes"]),
    "plan": (["plan", STEP, "--mesh", "fsdp=2,tp=2"], ["show", STEP, "--mesh", "fsdp=2,tp=2"]),
    "plan by ranks": (["plan", "--ranks", "3", STEP, "--json"], ["show", STEP, "--ranks", "3", "--json"]),
    "plan without a mesh": (["plan", STEP], ["show", STEP, "--mesh", ""]),
    "gc": (["gc", "."], ["prune", ".", "--orphans"]),
    "gc, in JSON": (["--json", "gc", "."], ["prune", ".", "--orphans", "--json"]),
}


@pytest.mark.parametrize("name", SAME)
def test_an_old_word_answers_with_the_new_one(
    name: str, steps: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(steps)
    (steps / "step-000000500" / "manifest.json").unlink()
    old, new = SAME[name]
    code, out, err = run(*old)
    (notice, *error), word = err.splitlines(), name.split()[0].rstrip(",")
    assert notice.startswith(f"`holdfast {word}` is now `holdfast {NEW[word]}`")
    assert (code, out, error) == (lambda c, o, e: (c, o, e.splitlines()))(*run(*new))
    assert run("--quiet", *old)[2].splitlines() == error


def test_unshard_and_bench(steps: Path, tmp_path: Path, run: Run) -> None:
    for options, new in (([], []), (["--section", "optimizer"], ["--only", "optimizer"])):
        assert run("unshard", steps / STEP, tmp_path / "old.pt", *options)[0] == Code.FINE
        assert run("convert", steps / STEP, tmp_path / "new.pt", "--model-only", *new)[0] == Code.FINE
        assert (tmp_path / "old.pt").read_bytes() == (tmp_path / "new.pt").read_bytes()
        (tmp_path / "old.pt").unlink()
        (tmp_path / "new.pt").unlink()
    assert run("unshard", steps / STEP, tmp_path / "all.pt", "--all")[0] == Code.FINE
    assert run("unshard", steps / STEP, tmp_path / "hf")[0] == Code.FINE
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    code, out, err = run("bench", tmp_path / "b", "--size", "8MB")
    assert code == Code.FINE and "save every" in out and "holdfast doctor --bench" in err


def test_timeline(tmp_path: Path, run: Run) -> None:
    import holdfast

    with timeline(tmp_path / "old"):
        holdfast.save(state_of(1), tmp_path / "a")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    code, out, err = run("timeline", tmp_path / "old")
    assert code == Code.FINE and "`holdfast view`" in err
    assert out.replace("/old", "/new") == run("view", tmp_path / "new")[1]


def test_arguments_that_are_called_like_an_old_word() -> None:
    for words in (["ls", "du"], ["show", "plan", "--json"], ["--version"], []):
        assert renamed(words) == (words, "")
    assert renamed(["--quiet", "du", "gc"])[0] == ["--quiet", "show", "--sizes", "gc"]


def test_help_shows_none_of_them(run: Run) -> None:
    shown = set(run("--help")[1].split())
    assert not {"du", "plan", "gc", "unshard", "bench", "timeline"} & shown and "prune" in shown
