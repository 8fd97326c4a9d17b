"""The glossary names few nouns, each defined in the file that the page says, and no file twice over for one noun."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

MOST = 30
ROWS = re.findall(r"^\| (\w+) \| `([\w/.]+)` \| (.+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)


def defined_in(path: str) -> set[str]:
    """The names that a module of the package defines: classes, functions, constants and aliases."""
    names = set()
    for node in ast.parse((ROOT / "holdfast" / path).read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def test_there_are_few_nouns_and_each_stands_once() -> None:
    nouns = [noun for noun, _, _ in ROWS]
    assert 0 < len(nouns) <= MOST and len(set(nouns)) == len(nouns)


@pytest.mark.parametrize(("noun", "path", "meaning"), ROWS, ids=[noun for noun, _, _ in ROWS])
def test_a_noun_is_defined_where_the_page_says(noun: str, path: str, meaning: str) -> None:
    assert noun in defined_in(path)


def test_the_page_is_linked() -> None:
    assert "glossary.md" in (ROOT / "mkdocs.yml").read_text()
    assert "(glossary.md)" in (ROOT / "docs/architecture.md").read_text()
