"""A digest changes with the code that a run exercises, and with nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from evidence.digest import digest, look_again, meaning
from evidence.runs import Run

_numbers = count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in which `run` imports `near` inside of a function, that imports `far`, and nobody `other`."""
    folder = tmp_path / f"made_up_{next(_numbers)}"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "run.py").write_text(f"def go():\n    from {folder.name} import near\n    return near\n")
    (folder / "near.py").write_text(f"from {folder.name}.far import ONE\n")
    (folder / "far.py").write_text('"""Text."""\n\nONE = 1\n')
    (folder / "other.py").write_text("TWO = 2\n")
    (tmp_path / "data.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    look_again()
    yield folder
    look_again()
    sys.modules.pop(folder.name, None)


def of(package: Path, *command: str) -> str:
    look_again()
    run = Run("one", command, "pytest", (f"{package.name}.run",), ("*.json",))
    return digest(run, package.parent, (package.name,))


def test_it_changes_with_what_is_imported_directly_or_not(package: Path) -> None:
    before = of(package)
    (package / "far.py").write_text("ONE = 2\n")
    assert of(package) != before


def test_it_changes_with_other_files_and_with_the_command(package: Path) -> None:
    before = of(package)
    assert of(package, "longer") != before
    (package.parent / "data.json").write_text("[]")
    assert of(package) != before


def test_it_does_not_change_with_what_is_not_exercised(package: Path) -> None:
    before = of(package)
    (package / "other.py").write_text("TWO = 3\n")
    assert of(package) == before


def test_it_does_not_change_with_prose(package: Path) -> None:
    before = of(package)
    (package / "far.py").write_text('"""Other text."""\n\n# A comment.\nONE = 1  # and one more\n"""Of ONE."""\n')
    assert of(package) == before


def test_a_module_or_a_file_that_is_not_there_is_an_error(package: Path) -> None:
    with pytest.raises(ValueError, match="there is no module"):
        digest(Run("one", (), "pytest", (f"{package.name}.gone",)), package.parent, (package.name,))
    with pytest.raises(ValueError, match="no file matches"):
        digest(Run("one", (), "pytest", (), ("*.gone",)), package.parent, (package.name,))


def test_only_docstrings_are_passed_over() -> None:
    assert meaning("def f():\n    '''One.'''\n    return 'a'") == meaning("def f():\n    return 'a'  # two")
    assert meaning("a = 'one'") != meaning("a = 'two'")
    assert meaning("a = [None]") != meaning("a = []")
    assert meaning("f(0)") != meaning("f(1)") != meaning("f(True)")
