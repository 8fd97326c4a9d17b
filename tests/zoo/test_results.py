"""docs/trust.md sums up zoo/results.md, which `make zoo` writes."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def tables(text: str) -> list[str]:
    """The tables of counts: by kind, and by library."""
    return re.findall(r"^\| (?:library)? ?\| kinds \|.*\n(?:\|.*\n)+", text, re.MULTILINE)


def test_the_page_has_the_counts_of_the_last_run() -> None:
    results, page = ((ROOT / name).read_text() for name in ("zoo/results.md", "docs/trust.md"))
    assert len(tables(results)) == 2 and tables(page) == tables(results)
    kinds = re.search(r"saves and loads (\d+) kinds of objects", results)
    assert kinds and f"{kinds[1]} kinds of" in page
