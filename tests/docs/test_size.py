"""The documentation stays small enough to be read: few pages, few words."""

from __future__ import annotations

from tests.docs.pages import ROOT

MOST_PAGES = 40
MOST_WORDS = 35_000
README_WORDS = 800

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_there_are_few_pages_with_few_words() -> None:
    words = {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in PAGES}
    assert len(words) <= MOST_PAGES
    assert sum(words.values()) <= MOST_WORDS, dict(sorted(words.items(), key=lambda item: -item[1])[:10])


def test_the_readme_is_three_screens() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS
