"""docs/trust.md sums up zoo/results.md, which `make zoo` writes."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

RESULTS, PAGE = ((ROOT / name).read_text() for name in ("zoo/results.md", "docs/trust.md"))


def test_the_page_has_the_counts_of_the_last_run() -> None:
    [counts] = re.findall(r"^\| \| kinds \|.*\n(?:\|.*\n)+", RESULTS, re.MULTILINE)
    kinds = re.search(r"saves and loads (\d+) kinds of objects", RESULTS)
    assert counts in PAGE and kinds and f"{kinds[1]} kinds of" in PAGE
