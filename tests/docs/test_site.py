"""The site builds without a warning, needs no network, and the reference leaves no public name out."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

from tests.docs.pages import ROOT

PUBLIC = ["holdfast", "holdfast.testing", "holdfast.tools", "holdfast.storage", "holdfast.remap"]
"""Modules whose every public name has an entry in the reference."""
TOLD_IN_PART = {"holdfast.dcp": {"save", "async_save", "load", "Writer", "Reader"}}
"""Those of which most is torch's own."""
MODULES = ("trainers", "inspect", "report", "view", "events", "errors", "run.journal")
"""Imported by their own names: of trainers every name has an entry, of the others all that the pages use."""
_USED = re.compile(rf"^from (?P<home>holdfast\.(?:{'|'.join(MODULES)})[\w.]*) import (?P<names>[\w, ]+)$", re.MULTILINE)
WITHOUT_AN_ENTRY = {"holdfast.__version__"}

_ENTRY = re.compile(r"^::: (?P<home>[\w.]+)(?: as (?P<name>[\w.]+))?$", re.MULTILINE)
_FETCHED = re.compile(
    r"<(?:link|script|img|source|iframe|video)\b[^>]*?(?:href|src)=[\"']?(?:https?:)?//", re.IGNORECASE
)


def test_the_site_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not _FETCHED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style


def test_what_is_there_for_the_tests_is_not_in_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "tests.docs" not in page.read_text(), page


def of_trainers() -> set[str]:
    """By their text: most need a library of their own to be imported."""
    found_there = set()
    of_each_other = {  # the others ask, users do not
        "huggingface_best", "huggingface_hooks",
        "huggingface_push", "lightning_files", "lightning_settings", "lightning_steps", "old_steps",
        "titan_contract", "titan_hugging_face", "titan_steps",
    }  # fmt: skip
    for module in (ROOT / "holdfast/trainers").glob("[!_]*.py"):
        if module.stem in of_each_other:
            continue
        for name in re.findall(r"^(?:def|class) ([^\W_]\w*)", module.read_text(), re.MULTILINE):
            found_there.add(f"holdfast.trainers.{module.stem}.{name}")
    return found_there


def used_by_pages() -> set[str]:
    pages = "\n".join(page.read_text() for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    named = {(found["home"], name.strip()) for found in _USED.finditer(pages) for name in found["names"].split(",")}
    return {f"{home}.{name}" for home, name in named if not is_module(f"{home}.{name}")}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_reference_has_every_public_name() -> None:
    told = {}
    for page in (ROOT / "docs/api").glob("*.md"):
        told |= {entry["name"] or entry["home"]: entry["home"] for entry in _ENTRY.finditer(page.read_text())}
    public = {f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__}
    public |= {f"{module}.{name}" for module, names in TOLD_IN_PART.items() for name in names}
    public |= used_by_pages()
    missing = sorted({*(public - set(told) - WITHOUT_AN_ENTRY), *(of_trainers() - set(told.values()))})
    assert not missing
    for name, home in told.items():
        assert found(name) is found(home), f"{name} is not {home}"


def test_an_overview_of_the_reference_has_every_name() -> None:
    text = (ROOT / "docs/api/index.md").read_text()
    names = importlib.import_module("holdfast").__all__
    assert not [name for name in names if f"`{name}`" not in text and f"holdfast.{name}" not in WITHOUT_AN_ENTRY]


def found(name: str) -> object:
    """What a dotted name means: of an attribute and a module of one name the attribute, unless more follows."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        if cut == len(parts) and cut > 1:  # a function that hides the module of its name
            value = getattr(importlib.import_module(".".join(parts[:-1])), parts[-1], value)
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise LookupError(name)


def test_pages_that_the_code_names_are_there() -> None:
    named = re.compile(r"\bdocs/[\w/-]+\.md\b")
    for path in (ROOT / "holdfast").rglob("*.py"):
        for page in named.findall(path.read_text()):
            assert (ROOT / page).is_file(), f"{path} names {page}"


def test_pictures_are_what_their_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["PICTURES"]
    for name, draw in drawn.items():
        assert (ROOT / "docs/pictures" / name).read_text() == draw(), "run docs/pictures/draw.py"
