"""The table of docs/values.md is the one in the code."""

from __future__ import annotations

from holdfast.state.table import RULES
from tests.docs.pages import ROOT

HEAD = "| what | what is saved | how it comes back |\n|---|---|---|\n"


def table() -> str:
    """The rules as the page has them."""
    return HEAD + "".join(f"| {r.what} | {r.saved} | {r.comes_back} |\n" for r in RULES)


def test_the_table_is_the_one_in_the_code() -> None:
    assert table() in (ROOT / "docs/values.md").read_text()
