"""The table of docs/states.md is the one in the code."""

from __future__ import annotations

from holdfast.state.table import RULES
from tests.docs.pages import ROOT

HEAD = "| what | what is saved | its names | how it comes back | what is refused |\n|---|---|---|---|---|\n"


def table() -> str:
    """The rules as the page has them."""
    rows = (f"| {r.what} | {r.saved} | {r.named} | {r.comes_back} | {r.refused} |" for r in RULES)
    return HEAD + "\n".join(rows) + "\n"


def test_the_table_is_the_one_in_the_code() -> None:
    assert table() in (ROOT / "docs/states.md").read_text()
