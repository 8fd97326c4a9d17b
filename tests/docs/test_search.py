"""The search of the site finds a page for what people type, and for errors, also when the site is opened from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.view.browser import FLAGS, NAMES, chromium

FIRST = {
    "resume from a step": "resume",
    "load best": "resume",
    "rollback": "resume",
    "early stopping": "resume",
    "save_top_k": "keep",
    "preemption": "stop",
    "install": "install",
    "S3": "stores",
    "never came to phase": "troubleshooting",
    "changed while it was being copied": "troubleshooting",
    "holds other files": "troubleshooting",
    "differs between ranks": "troubleshooting",
}
"""What is typed, and the page that has to be the first answer."""

Search = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def search(site: Path) -> Iterator[Search]:
    """Type into the search of the site, opened from disk in Chromium; the pages of the answers, the best one first."""
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium is here: none of {', '.join(NAMES)} is in PATH, and HOLDFAST_CHROMIUM names none")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        field = page.locator("input.md-search__input")
        answers = page.locator(".md-search-result__link:not(.earlier)")

        def ask(words: str) -> list[str]:
            # Answers replace those of earlier words, and one key brings them, for all of the words.
            answers.evaluate_all("links => links.forEach(link => link.classList.add('earlier'))")
            field.fill(words)
            field.press("End")
            answers.first.wait_for(state="attached", timeout=120_000)
            links = [answers.nth(i).get_attribute("href") or "" for i in range(min(5, answers.count()))]
            return [re.sub(r"\.html.*", "", link.rpartition("/")[2]) for link in links]

        yield ask
        browser.close()
        assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.slow
def test_what_people_type_finds_its_page_first(search: Search) -> None:
    found = {words: search(words)[0] for words in FIRST}
    assert found == FIRST


def test_headings_have_the_words_that_people_type(site: Path) -> None:
    """Without a browser: titles count a thousand times as much as text."""
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    for words, page in FIRST.items():
        titles = " ".join(s["title"] for s in sections if s["location"].startswith(f"{page}.html")).lower()
        assert all(word.lower() in titles for word in words.split()), (words, titles)
