"""What the site needs besides the pages: a home page that is the README, files of the repository that pages link to.

Called by mkdocs. Hidden set-up of blocks, which is there for the tests, is taken out. Never fetches anything.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

_HIDDEN = re.compile(r"^[ ]*<!-- *(?:before\b.*?|(?:not run|raises|prints)\b[^\n]*?)-->\n", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^::: (?P<home>[\w.]+)(?: as (?P<name>[\w.]+))?\n(?:    options:\n)?", re.MULTILINE)
"""An entry of the reference: where an object is defined, and the name by which users import it, if that is another."""
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


BOOST = {
    "resume.md": 4,
    "troubleshooting.md": 2,
    "keep.md": 2,
    "api/index.md": 0.5,
    "api/tools.md": 0.5,
    "api/adapters.md": 0.5,
}
"""Weights of pages in the search; 1 for the others."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README as the home page, and what pages link to outside of the folder of pages."""
    readme = _LINK.sub(lambda link: link[1].removeprefix("docs/"), (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=readme))
    for name in sorted(_outside(files)):
        files.append(File.generated(config, f"repository/{name}.txt", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Take out what is there for the tests, and turn links out of the folder of pages to the copies in the site."""
    page.meta.setdefault("search", {"boost": BOOST.get(page.file.src_uri, 1)})
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri == "troubleshooting.md":  # every message that can be raised, so that the search finds it
        markdown = runpy.run_path(str(ROOT / "docs/messages.py"))["with_messages"](markdown)

    def turned(link: re.Match[str]) -> str:
        name = _target(page.file.src_uri, link[1])
        return f"{up}repository/{name}.txt" if name else link[1]

    return _LINK.sub(turned, _ENTRY.sub(_entry, _HIDDEN.sub("", markdown)))


def _entry(entry: re.Match[str]) -> str:
    name = entry["name"] or entry["home"]
    return f"::: {entry['home']}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"


def _outside(files: Files) -> set[str]:
    found = set()
    for file in files.documentation_pages():
        for link in _LINK.findall(file.content_string):
            found |= {_target(file.src_uri, link)} - {""}
    return found


def _target(page: str, link: str) -> str:
    """The file of the repository that a link of a page leads to, if it lies outside of the pages; else nothing."""
    if urlsplit(link).scheme or link.startswith("#"):
        return ""
    path = link.partition("#")[0]
    at = (
        (ROOT / path)
        if page == "index.md" and not (ROOT / "docs" / path).exists()
        else (ROOT / "docs" / page).parent / path
    )
    at = at.resolve()
    inside = at.is_relative_to(ROOT) and not at.is_relative_to(ROOT / "docs")
    return at.relative_to(ROOT).as_posix() if inside and at.is_file() else ""
