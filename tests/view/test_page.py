"""The frame of all pages: nothing that is shown becomes markup or script, nothing is asked of a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.view.page import as_json, asset, page
from tests.view.browser import Tab, script, with_script

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "${alert(1)}",
    "'\"><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "\u2028\u2029",
    "a\u202ereversed",
    "\x00\x7f",
    "__proto__",
    "constructor",
    "{{7*7}}",
    "%3Cscript%3E",
    "\\u003cscript\\u003e",
]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_json_in_a_page_is_text_and_nothing_else() -> None:
    made = as_json({"names": HOSTILE, "x": float("nan")})
    assert json.loads(made) == {"names": HOSTILE, "x": None}
    assert not re.search("[<>&\u2028\u2029]", made)


def test_what_is_no_text_is_shown_all_the_same() -> None:
    assert json.loads(as_json({"path": "a\udcff", "tensors": [("\udcff<", 1.5)]})) == {
        "path": "a?",
        "tensors": [["?<", 1.5]],
    }


def test_hostile_texts_are_shown_as_they_are(tab: Callable[..., Tab], tmp_path: Path) -> None:
    text = page(HOSTILE[0], ["table.js", "chart.js"], {"names": HOSTILE})
    probe = script("hostile")
    text = with_script(text, probe)
    one = tab()
    shown = one.open(written(tmp_path / "page.html", text))
    assert shown.title() == HOSTILE[0]
    assert shown.eval_on_selector_all(".shown", "all => all.map((e) => e.textContent)") == HOSTILE
    assert shown.evaluate("document.querySelectorAll('main img, main script, main svg[onload]').length") == 0
    assert not one.network()


def test_the_policy_lets_no_other_script_and_no_network(tab: Callable[..., Tab], tmp_path: Path) -> None:
    text = page("plain", [], {}).replace("</body>", "<script>document.title='owned'</script></body>")
    one = tab()
    one.page.goto(written(tmp_path / "page.html", text).as_uri())
    assert one.page.title() == "plain"
    assert any("Content Security Policy" in error for error in one.errors)
    one.errors.clear()
    told = one.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'got', (e) => 'refused')")
    assert told == "refused" and any("Content Security Policy" in error for error in one.errors)
    one.errors.clear()


@pytest.mark.parametrize("name", ["frame.js", "table.js", "chart.js", "style.css"])
def test_assets_can_stand_in_a_page(name: str) -> None:
    text = asset(name)
    assert "</script" not in text.lower() and "</style" not in text.lower() and "<!--" not in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)


def test_numbers_and_ticks(tab: Callable[..., Tab], tmp_path: Path) -> None:
    shown = tab().open(written(tmp_path / "page.html", with_script(page("frame", [], {}), "H.ready();")))
    assert shown.evaluate("H.ticks(0, 10)") == [0, 2, 4, 6, 8, 10]
    # They differ in the last bit, or can hardly be told apart from it: no number between is rounder than they are.
    close = [
        [0.3, 0.30000000000000004],
        [4e18, 4e18 + 1024],
        [1e300, 1.0000000000000002e300],
        [-0.1, -0.09999999999999999],
    ]
    assert shown.evaluate("all => all.map(([low, high]) => H.ticks(low, high))", close) == [[low] for low, _ in close]
    told = shown.evaluate("[0.99999, 119.7, 179.6, 7199.7, 10799].map(H.seconds)")
    assert told == ["1.00 s", "2 min 0 s", "3 min 0 s", "2 h 0 min", "3 h 0 min"]


@pytest.mark.slow
def test_there_is_a_theme_for_day_and_night(tab: Callable[..., Tab], tmp_path: Path) -> None:
    text = page("theme", [], {})
    probe = "H.header('theme', '/a/path'); H.ready();"
    text = with_script(text, probe)
    path = written(tmp_path / "page.html", text)
    found = {}
    for scheme in ("light", "dark"):
        shown = tab(scheme=scheme).open(path)
        assert shown.evaluate(script("contrast"))[0][0] >= 4.5
        found[scheme] = shown.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        shown.click("#theme")
        found[f"{scheme} turned"] = shown.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        shown.keyboard.press("?")
        shown.wait_for_selector("dialog[open]")
        shown.keyboard.press("Escape")
        shown.wait_for_selector("dialog[open]", state="detached")
    assert found["light"] != found["dark"]
    assert found["light turned"] == found["dark"] and found["dark turned"] == found["light"]
